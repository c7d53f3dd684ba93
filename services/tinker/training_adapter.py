"""One tenant's adapter in training: gradients that add up over requests, and AdamW that takes them.

Axes: B sequence, L position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.tinker.losses import Config, TinkerLoss, loss_config, loss_named
from services.tinker.shared_model import LoraShape, SharedModel
from services.tinker.wire import Datum, array_records, read_datum
from spo.errors import InvalidInput
from spo.v1 import tinker_service_pb2 as wire

Check = Callable[[], None]
# Of AdamW, as torch names them.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class TrainingAdapter:
    """An adapter of the shared model and what its optimiser remembers. `close` takes it out of the model."""

    model: SharedModel
    name: str
    shape: LoraShape
    seed: int | None
    tokens_per_pass: int
    steps: int = 0
    _gradients: list[Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.model.add(self.name, self.shape, self.seed)
        # Their order is that of the gradients; the numbers of the optimiser come with each step.
        self._named = self.model.parameters(self.name)
        self._optimizer = torch.optim.AdamW(self._named.values(), lr=0.0)

    def forward_backward(
        self, request: wire.TinkerForwardBackwardRequest, check: Check
    ) -> wire.TinkerForwardBackwardOutput:
        """Log-probs of all targets and the summed loss; unless forward_only its gradient is added to what is there.

        What fails adds nothing. check: raises once nobody waits any more. Raises InvalidInput on a faulty request.
        """
        loss, data = self._read(request)
        config = loss_config(loss, _numbers(request))
        self.model.use(self.name)
        parameters = list(self._named.values())
        added = None if request.forward_only else [torch.zeros_like(parameter) for parameter in parameters]
        total = 0.0
        outputs: list[NDArray[np.float32]] = []
        for batch in _passes(data, self.tokens_per_pass):
            check()
            with torch.set_grad_enabled(added is not None):
                summed, logprobs = self._loss(batch, loss, config)
            if added is not None:
                parts = torch.autograd.grad(summed, parameters, allow_unused=True)
                for gradient, part in zip(added, parts, strict=True):
                    if part is not None:
                        gradient += part
            total += float(summed.detach())
            outputs += logprobs
        if not math.isfinite(total) or not all(bool(gradient.isfinite().all()) for gradient in added or ()):
            raise InvalidInput(f"the loss is {total}, or its gradient is not finite", code="tinker_datum")
        if added is not None:
            held = self._gradients
            self._gradients = added if held is None else [a + b for a, b in zip(held, added, strict=True)]
        return wire.TinkerForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[array_records("logprobs", outputs)],
            metrics={"loss:sum": total},
        )

    def step(self, asked: wire.StepTinkerOptimizer) -> dict[str, float]:
        """One step of AdamW along what has been added up, which is then gone; without any, along 0.

        Raises InvalidInput on numbers that AdamW does not take.
        """
        options = _options(asked)
        gradients = self._gradients or [torch.zeros_like(parameter) for parameter in self._named.values()]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        scale = min(1.0, asked.grad_clip_norm / norm) if asked.grad_clip_norm > 0 and norm > 0 else 1.0
        for parameter, gradient in zip(self._named.values(), gradients, strict=True):
            parameter.grad = gradient * scale
        self._optimizer.param_groups[0].update(options)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._gradients = None
        self.steps += 1
        return {"unclipped_grad_l2:mean": norm}

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's weights by peft's names, on the CPU."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self._named.items()}

    def moments(self) -> dict[str, Tensor]:
        """What AdamW remembers, by `exp_avg:<name>` and so on; empty before the first step."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            state = self._optimizer.state.get(parameter) or {}
            found |= {f"{kind}:{name}": state[kind].detach().cpu().clone() for kind in MOMENTS if state}
        return found

    def take(self, tensors: Mapping[str, Tensor], moments: Mapping[str, Tensor], steps: int) -> None:
        """Go on from stored weights; without moments AdamW begins anew. Raises IntegrityError on another adapter's."""
        self.model.fill(self.name, tensors)
        self._gradients = None
        self._optimizer.state.clear()
        for name, parameter in self._named.items() if moments else ():
            stored = {kind: moments[f"{kind}:{name}"].to(parameter) for kind in MOMENTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **stored}
        self.steps = steps if moments else 0

    def close(self) -> None:
        """Free its memory."""
        self.model.remove(self.name)

    def _read(self, request: wire.TinkerForwardBackwardRequest) -> tuple[TinkerLoss, list[Datum]]:
        loss = loss_named(request.loss_fn)
        if not request.data:
            raise InvalidInput("there is no data", code="tinker_datum")
        sizes = self.model.vocabulary, self.model.max_tokens
        return loss, [read_datum(sent, at, loss.inputs, *sizes) for at, sent in enumerate(request.data)]

    def _loss(
        self, batch: Sequence[Datum], loss: TinkerLoss, config: Config
    ) -> tuple[Tensor, list[NDArray[np.float32]]]:
        longest = max(len(datum.tokens_L) for datum in batch)
        ids_BL = torch.zeros((len(batch), longest), dtype=torch.long)
        mask_BL, targets_BL = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL)
        for row, datum in enumerate(batch):
            ids_BL[row, : len(datum.tokens_L)] = torch.from_numpy(datum.tokens_L.copy())
            targets_BL[row, : len(datum.tokens_L)] = torch.from_numpy(datum.targets_L.copy())
            mask_BL[row, : len(datum.tokens_L)] = 1
        device = self.model.device
        logits_BLV = self.model.logits(ids_BL.to(device), mask_BL.to(device))
        chosen_BL = logits_BLV.gather(-1, targets_BL.to(device).unsqueeze(-1)).squeeze(-1)
        logprobs_BL = chosen_BL - logits_BLV.logsumexp(-1)
        rows = [logprobs_BL[row, : len(datum.tokens_L)] for row, datum in enumerate(batch)]
        losses = [
            loss.compute(
                row_L, {name: torch.from_numpy(v.copy()).to(device) for name, v in datum.inputs.items()}, config
            )
            for row_L, datum in zip(rows, batch, strict=True)
        ]
        return torch.stack(losses).sum(), [row_L.detach().cpu().numpy() for row_L in rows]


def _numbers(request: wire.TinkerForwardBackwardRequest) -> dict[str, float]:
    """The loss's numbers, of the newer field where it is set."""
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    texts = [name for name, value in request.loss_fn_config_v2.items() if value.WhichOneof("value") != "number"]
    if texts:
        raise InvalidInput(f"{texts[0]!r} of the loss is a number", code="tinker_loss")
    return {name: value.number for name, value in request.loss_fn_config_v2.items()}


def _options(asked: wire.StepTinkerOptimizer) -> dict[str, object]:
    rates = (asked.learning_rate, asked.eps, asked.weight_decay, asked.grad_clip_norm)
    in_range = all(math.isfinite(rate) and rate >= 0 for rate in rates)
    if not in_range or not all(0 <= beta < 1 for beta in (asked.beta1, asked.beta2)):
        message = "rates are finite and not negative, betas in [0, 1)"
        raise InvalidInput(message, code="tinker_optimizer")
    betas = (asked.beta1, asked.beta2)
    return {"lr": asked.learning_rate, "betas": betas, "eps": asked.eps, "weight_decay": asked.weight_decay}


def _passes(data: Sequence[Datum], most_tokens: int) -> Iterator[list[Datum]]:
    """Data in their order, so many at once as fit when padded to the longest; at least one."""
    batch: list[Datum] = []
    longest = 0
    for datum in data:
        longest = max(longest, len(datum.tokens_L))
        if batch and longest * (len(batch) + 1) > most_tokens:
            yield batch
            batch, longest = [], len(datum.tokens_L)
        batch.append(datum)
    if batch:
        yield batch
