"""One base model in memory with any number of LoRA adapters: samples drawn from it, losses of the Tinker API, and
adapters in training.

L: position.

Axes: B sequence, L position, V vocabulary.

The losses of the Tinker API: sums over the tokens of one datum, from the log-probs of its targets.
As defined at https://tinker-docs.thinkingmachines.ai/losses (and /tinker/losses/{ppo,cispo,dro}). L: position.

Samples from the shared model, many sequences at once, each with its own temperature, limits and stops.
The log-probs are the model's own, before temperature, top-k and top-p: what `forward` says of the same tokens.
Axes: B sequence, L position, V vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from spo.errors import FieldViolation, IntegrityError, InvalidInput
from spo.model.folder import PREFIX, inspect_model_folder
from spo.model.logprobs import DTYPES
from spo.model.tokenizer import load_tokenizer
from spo.v1 import tinker_service_pb2 as wire

_DTYPES: Mapping[int, np.dtype[np.generic]] = {
    wire.TINKER_DTYPE_FLOAT32: np.dtype("<f4"),
    wire.TINKER_DTYPE_INT64: np.dtype("<i8"),
    wire.TINKER_DTYPE_INT32: np.dtype("<i4"),
}
TARGETS = "target_tokens"

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]

# Tinker scales every adapter by 32 / rank.
ALPHA = 32
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query_key_value"})
HEADS = frozenset({"lm_head", "embed_out"})

# Text stops are looked for in the end of what has been sampled.
TAIL_TOKENS = 32

Check = Callable[[], None]
# Of AdamW, as torch names them.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Datum:
    """One sequence: what the model reads, what it is asked for at each position, and what the loss needs beside."""

    tokens_L: NDArray[np.int64]
    targets_L: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.float32]]


def read_datum(sent: wire.TinkerDatum, at: int, wanted: Sequence[str], vocabulary: int, longest: int) -> Datum:
    """The datum at this place of a request; wanted: the inputs of its loss. Raises InvalidInput with a pointer."""
    tokens_L = np.concatenate([np.zeros(0, np.int64), *(_tokens(chunk, at) for chunk in sent.model_input)])
    if not 1 <= len(tokens_L) <= longest:
        raise _fault(at, "model_input", f"it has {len(tokens_L)} tokens; 1 to {longest} are taken")
    missing = [name for name in (TARGETS, *wanted) if name not in sent.loss_fn_inputs]
    if missing:
        raise _fault(at, f"loss_fn_inputs/{missing[0]}", "the loss needs it")
    targets_L = _tensor(sent.loss_fn_inputs[TARGETS], at, TARGETS, len(tokens_L)).astype(np.int64)
    for name, ids_L in (("model_input", tokens_L), (f"loss_fn_inputs/{TARGETS}", targets_L)):
        if ids_L.min() < 0 or ids_L.max() >= vocabulary:
            raise _fault(at, name, f"a token id is outside the vocabulary of {vocabulary}")
    inputs = {name: _tensor(sent.loss_fn_inputs[name], at, name, len(tokens_L)).astype(np.float32) for name in wanted}
    for name, values_L in inputs.items():
        if not np.isfinite(values_L).all():
            raise _fault(at, f"loss_fn_inputs/{name}", "a number is not finite")
    return Datum(tokens_L, targets_L, inputs)


def array_records(name: str, arrays: Sequence[NDArray[np.float32]]) -> wire.TinkerArrayRecord:
    """One array per datum under one name."""
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
    batched = wire.TinkerBatchedTensor(
        data=b"".join(array.astype("<f4").tobytes() for array in arrays),
        offsets=offsets.tobytes(),
        dtype=wire.TINKER_DTYPE_FLOAT32,
    )
    return wire.TinkerArrayRecord(type_tag="ArrayRecord", fields={name: batched}, num_datums=len(arrays))


def floats(values: Iterable[float]) -> bytes:
    """float32, little-endian."""
    return np.fromiter(values, dtype="<f4").tobytes()


def ids(values: Iterable[int]) -> bytes:
    """int32, little-endian."""
    return np.fromiter(values, dtype="<i4").tobytes()


def _tokens(chunk: wire.TinkerChunk, at: int) -> NDArray[np.int64]:
    if chunk.WhichOneof("chunk") != "encoded_text":
        raise _fault(at, "model_input", "only tokens of text are taken")
    return _array_numbers(chunk.encoded_text.tokens, np.dtype("<i4"), at, "model_input").astype(np.int64)


def _tensor(sent: wire.TinkerTensor, at: int, name: str, length: int) -> NDArray[np.generic]:
    pointer = f"loss_fn_inputs/{name}"
    if sent.sparse_csr or len(sent.shape) > 1:
        raise _fault(at, pointer, "only plain vectors are taken, one number per position")
    if sent.dtype not in _DTYPES:
        raise _fault(at, pointer, "float32, int64 and int32 are taken")
    values = _array_numbers(sent.dense, _DTYPES[sent.dtype], at, pointer)
    if len(values) != length:
        raise _fault(at, pointer, f"it has {len(values)} numbers for {length} tokens")
    return values


def _array_numbers(raw: bytes, dtype: np.dtype[np.generic], at: int, pointer: str) -> NDArray[np.generic]:
    if len(raw) % dtype.itemsize:
        raise _fault(at, pointer, f"{len(raw)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(raw, dtype)


def _fault(at: int, pointer: str, message: str) -> InvalidInput:
    violation = FieldViolation(f"/data/{at}/{pointer}", message)
    return InvalidInput(f"data {at}, {pointer}: {message}", code="tinker_datum", violations=(violation,))


@dataclass(frozen=True)
class TinkerLoss:
    """inputs: what a datum brings beside its targets; defaults: the numbers that a request may set."""

    compute: Callable[[Tensor, Inputs, Config], Tensor]
    inputs: tuple[str, ...]
    defaults: Mapping[str, float]


def _cross_entropy(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(logprobs_L * inputs["weights"]).sum()


def _importance_sampling(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(_ratio(logprobs_L, inputs) * inputs["advantages"]).sum()


def _ppo(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio_L, advantages_L = _ratio(logprobs_L, inputs), inputs["advantages"]
    return -torch.minimum(ratio_L * advantages_L, _clipped(ratio_L, config) * advantages_L).sum()


def _cispo(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    clipped_L = _clipped(_ratio(logprobs_L, inputs), config).detach()
    return -(clipped_L * logprobs_L * inputs["advantages"]).sum()


def _dro(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    distance_L = (logprobs_L - inputs["logprobs"]) ** 2
    return -(logprobs_L * inputs["advantages"] - 0.5 * config["beta"] * distance_L).sum()


def _ratio(logprobs_L: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs_L - inputs["logprobs"]).exp()


def _clipped(ratio_L: Tensor, config: Config) -> Tensor:
    return ratio_L.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


_SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(_cross_entropy, ("weights",), {}),
    "importance_sampling": TinkerLoss(_importance_sampling, _SAMPLED, {}),
    "ppo": TinkerLoss(_ppo, _SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": TinkerLoss(_cispo, _SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": TinkerLoss(_dro, _SAMPLED, {"beta": 0.05}),
}


def loss_named(name: str) -> TinkerLoss:
    """Raises InvalidInput naming the losses that there are."""
    if name not in LOSSES:
        raise InvalidInput(f"the loss {name!r} is not offered; offered: {', '.join(LOSSES)}", code="tinker_loss")
    return LOSSES[name]


def loss_config(loss: TinkerLoss, given: Mapping[str, float]) -> dict[str, float]:
    """A request's numbers over the defaults. Raises InvalidInput on a name that the loss does not know."""
    unknown = sorted(given.keys() - loss.defaults.keys())
    if unknown:
        raise InvalidInput(f"the loss takes no {unknown[0]!r}", code="tinker_loss")
    return {**loss.defaults, **given}


@dataclass(frozen=True)
class LoraShape:
    """What of the model an adapter changes, and by how many directions."""

    rank: int
    attention: bool = True
    mlp: bool = True
    head: bool = True

    def document(self) -> dict[str, int | bool]:
        """As it is stored."""
        return dict(vars(self))


class SharedModel:
    """Not safe from several threads: one thread computes."""

    def __init__(self, path: Path, dtype: str) -> None:
        """Raises InvalidInput where the folder may not or cannot be loaded."""
        folder = inspect_model_folder(path)
        transformers.utils.logging.disable_progress_bar()
        self.path, self.hash = folder.path, folder.model_hash
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype=DTYPES[dtype], trust_remote_code=False, use_safetensors=True, local_files_only=True
        )
        self.model = nn.Module.to(model, self.device).eval().requires_grad_(requires_grad=False)
        self.tokenizer = load_tokenizer(folder.path)
        self.vocabulary = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
        self.max_tokens = int(getattr(model.config, "max_position_embeddings", 1 << 17))
        ends = model.generation_config.eos_token_id if model.generation_config else None
        ends = self.tokenizer.eos_token_id if ends is None else ends
        self.end_tokens = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._linear = [
            name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
        ]

    def add(self, name: str, shape: LoraShape, seed: int | None = None) -> None:
        """Give the model an adapter that changes nothing yet. Raises InvalidInput where no layer is to be changed."""
        config = self._config(shape)
        # What peft remembers of the one before; it would warn of every further one.
        vars(self.model).pop("peft_config", None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(secrets.randbits(63) if seed is None else seed)
            inject_adapter_in_model(config, self.model, adapter_name=name)
        for layer in self._layers():
            if name in layer.lora_A:
                for part in (layer.lora_A, layer.lora_B):
                    part[name].float().to(self.device)
        self.use(None)

    def remove(self, name: str) -> None:
        """Take an adapter away; nothing where there is none."""
        for layer in self._layers():
            if name in layer.lora_A:
                layer.set_adapter([])
                layer.delete_adapter(name)
        self.use(None)

    def use(self, name: str | None) -> None:
        """From now on the model computes with this adapter, or as it was."""
        for layer in self._layers():
            layer.enable_adapters(enabled=name is not None)
            if name is not None:
                layer.set_adapter(name)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """An adapter's tensors by the names that peft gives them in a file."""
        found: dict[str, nn.Parameter] = {}
        for path, layer in self.model.named_modules():
            if isinstance(layer, LoraLayer) and name in layer.lora_A:
                for part, half in (("lora_A", layer.lora_A[name]), ("lora_B", layer.lora_B[name])):
                    found[f"{PREFIX}{path}.{part}.weight"] = cast(nn.Parameter, cast(nn.Linear, half).weight)
        return found

    @torch.no_grad()
    def fill(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Put stored tensors in an adapter. Raises IntegrityError when they are another adapter's."""
        own = self.parameters(name)
        if own.keys() != tensors.keys() or any(own[each].shape != tensors[each].shape for each in own):
            raise IntegrityError("the stored adapter is of other layers or another rank")
        for each, parameter in own.items():
            parameter.copy_(tensors[each])

    def peft_config(self, shape: LoraShape) -> dict[str, Any]:
        """What peft writes beside the tensors of such an adapter."""
        document = self._config(shape).to_dict() | {"inference_mode": True}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in document.items()}

    def logits(self, input_ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Of the token after each position, float32 (B, L, V), with the adapter in use. Padding on either side."""
        found = self.model(
            input_ids=input_ids_BL, attention_mask=mask_BL, position_ids=_positions(mask_BL), use_cache=False
        )
        logits_BLV: Tensor = found.logits.float()
        return logits_BLV

    def next_logits(self, input_ids_BL: Tensor, mask_BL: Tensor, cache: DynamicCache) -> Tensor:
        """Of the token after the last, float32 (B, V); mask_BL covers what the cache holds too. Padding on the left."""
        found = self.model(
            input_ids=input_ids_BL,
            attention_mask=mask_BL,
            position_ids=_positions(mask_BL)[:, -input_ids_BL.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: Tensor = found.logits[:, -1].float()
        return logits_BV

    def _layers(self) -> list[LoraLayer]:
        return [module for module in self.model.modules() if isinstance(module, LoraLayer)]

    def _config(self, shape: LoraShape) -> LoraConfig:
        targets = sorted({name for name in self._linear if self._is_wanted(name, shape)})
        if not targets:
            raise InvalidInput("the adapter would change no layer of this model", code="tinker_model")
        return LoraConfig(
            r=shape.rank,
            lora_alpha=ALPHA,
            target_modules=targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(self.path),
        )

    @staticmethod
    def _is_wanted(name: str, shape: LoraShape) -> bool:
        if name in HEADS:
            return shape.head
        return shape.attention if name in ATTENTION else shape.mlp


def _positions(mask_BL: Tensor) -> Tensor:
    """Counted from the first token of each sequence."""
    return (mask_BL.cumsum(-1) - 1).clamp(min=0)


@dataclass(frozen=True)
class SamplingOptions:
    """temperature 0: the likeliest token. top_k below 1: no limit."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass
class SampledTokens:
    """What one sequence has become; `stopped`: by itself, not by its limit."""

    prompt: Sequence[int]
    options: SamplingOptions
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.options.max_tokens


@torch.no_grad()
def sample(model: SharedModel, sequences: Sequence[SampledTokens], check: Callable[[], None]) -> None:
    """Fill in all sequences, with the adapter in use; check: raises once nobody waits any more."""
    longest = max(len(sequence.prompt) for sequence in sequences)
    ids_BL = torch.zeros((len(sequences), longest), dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, sequence in enumerate(sequences):
        ids_BL[row, longest - len(sequence.prompt) :] = torch.tensor(list(sequence.prompt))
        mask_BL[row, longest - len(sequence.prompt) :] = 1
    ids_BL, mask_BL = ids_BL.to(model.device), mask_BL.to(model.device)
    cache = DynamicCache()
    while not all(sequence.done for sequence in sequences):
        check()
        logits_BV = model.next_logits(ids_BL, mask_BL, cache)
        logprobs_BV = logits_BV.log_softmax(-1)
        chosen = [
            0 if sequence.done else _draw(logits_V, sequence.options, sequence.generator)
            for logits_V, sequence in zip(logits_BV, sequences, strict=True)
        ]
        ids_BL = torch.tensor(chosen, device=model.device).unsqueeze(1)
        mask_BL = torch.nn.functional.pad(mask_BL, (0, 1), value=1)
        taken_B = logprobs_BV.gather(1, ids_BL).squeeze(1).tolist()
        for sequence, token, logprob in zip(sequences, chosen, taken_B, strict=True):
            if not sequence.done:
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.stopped = _stops(model, sequence)


@torch.no_grad()
def prompt_logprobs(model: SharedModel, prompt: Sequence[int], last: int) -> list[float]:
    """Of each token given those before it; NaN for the first, and for all but the last so many where last is not 0."""
    ids_BL = torch.tensor([list(prompt)], device=model.device)
    logits_LV = model.logits(ids_BL, torch.ones_like(ids_BL))[0, :-1]
    logprobs_L = logits_LV.gather(1, ids_BL[0, 1:, None]).squeeze(1) - logits_LV.logsumexp(-1)
    found = [float("nan"), *logprobs_L.tolist()]
    unasked = len(found) - last if last else 0
    return [float("nan")] * unasked + found[unasked:]


def _draw(logits_V: Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    if options.temperature == 0:
        return int(logits_V.argmax())
    scaled_V = (logits_V / options.temperature).cpu()
    if 0 < options.top_k < len(scaled_V):
        scaled_V[scaled_V < scaled_V.topk(options.top_k).values[-1]] = float("-inf")
    probabilities_V = scaled_V.softmax(-1)
    if options.top_p < 1:
        sorted_V, order_V = probabilities_V.sort(descending=True)
        # The first that reaches the sum stays.
        beyond_V = sorted_V.cumsum(-1) - sorted_V >= options.top_p
        probabilities_V[order_V[beyond_V]] = 0
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def _stops(model: SharedModel, sequence: SampledTokens) -> bool:
    options = sequence.options
    if sequence.tokens[-1] in options.stop_tokens:
        return True
    if not options.stop_strings:
        return False
    tail = TAIL_TOKENS + max(map(len, options.stop_strings))
    text = model.tokenizer.decode(sequence.tokens[-tail:])
    return any(stop in text for stop in options.stop_strings)


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
