"""The policy of one run on this rank: its model and engine, the reference beside it, tensors, log-probs and loss.

Axes: B trajectory, L padded position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.trainer.batches import TrainingSample, token_batch
from services.trainer.deepspeed_engine import DeepSpeedEngine
from services.trainer.microbatches import MicroBatch
from services.trainer.step_metrics import WeightedMeans, named_diagnostics
from services.trainer.weights import take_weights
from spo.algorithm.diagnostics import batch_diagnostics
from spo.algorithm.losses import spo_loss
from spo.algorithm.token_batch import TokenBatch
from spo.errors import FieldViolation, InvalidInput
from spo.model.logprobs import load_policy, packed_token_logprobs, token_logprobs
from spo.spec.job_spec import JobSpec, ModelSpec
from spo.v1.prompt_pb2 import SOURCE_ONLINE


def load_model(spec: ModelSpec, device: torch.device) -> PreTrainedModel:
    """A copy of pi0 on the device. Raises InvalidInput when the folder may not or cannot be loaded."""
    try:
        model = load_policy(spec.path, spec.dtype)
        # As any module's: transformers hides its signature behind a wrapper.
        nn.Module.to(model, device)
        return model
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"the model at {spec.path} cannot be loaded: {error}", code="model_not_loadable") from error


class Policy:
    """What is trained. Every rank calls every method alike."""

    def __init__(self, spec: JobSpec, device: torch.device, start: Sequence[Path], passes: int) -> None:
        """start: files of the weights that training begins with, none: pi0's. passes: micro-batches per update."""
        self._spec = spec
        self._device = device
        model = load_model(spec.model, device)
        take_weights(model, start)
        self._vocabulary_size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
        in_trainer = spec.trainer.reference == "in_trainer"
        self._reference = load_model(spec.model, device).requires_grad_(False) if in_trainer else None
        self.engine = DeepSpeedEngine(model, spec.trainer, passes)

    def set_reference(self, files: Sequence[Path]) -> None:
        """Take published weights as the reference in place of the model folder's. Raises InvalidInput without one."""
        if self._reference is None:
            raise InvalidInput("only a reference held by the trainer can change", code="no_reference")
        take_weights(self._reference, files)

    def batch(self, micro_batch: MicroBatch) -> TokenBatch:
        """The tensors of a micro-batch on the device, built at most once. Raises InvalidInput on an unknown token."""
        return micro_batch.batch(self._build)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """ln pi_theta of each token; (B, L), nats."""
        forward = packed_token_logprobs if self._spec.trainer.packing else token_logprobs
        return forward(self.engine.model, batch.input_ids_BL, batch.attention_mask_BL)

    def loss(self, micro_batch: MicroBatch, means: WeightedMeans) -> Tensor:
        """The mean loss of a micro-batch; what was measured on the way goes into `means`. Raises InvalidInput."""
        batch = self.batch(micro_batch)
        logprobs_BL = self.logprobs(batch)
        algorithm = self._spec.algorithm
        loss, parts = spo_loss(logprobs_BL, batch, algorithm.losses, algorithm.beta)
        if micro_batch.idle:
            return loss
        diagnostics = batch_diagnostics(logprobs_BL.detach(), batch, algorithm.beta)
        means.add({"loss": loss.item(), **parts, **named_diagnostics(diagnostics)}, micro_batch.weight)
        online_B = batch.source_B == SOURCE_ONLINE
        if online_B.any():
            # On samples of (nearly) the current policy the mean of -ln pi estimates its entropy per token.
            online = batch_diagnostics(logprobs_BL.detach()[online_B], batch.select(online_B), algorithm.beta)
            of_online = {"entropy": online["token_nll_nats"], "log_ratio/online": online["log_ratio_nats"]}
            means.add(of_online, int(online_B.sum()))
        return loss

    def _build(self, rows: Sequence[TrainingSample]) -> TokenBatch:
        batch = token_batch(rows, self._spec.algorithm.beta, self._spec.tasks.reward).to(self._device)
        foreign_BL = (batch.input_ids_BL < 0) | (batch.input_ids_BL >= self._vocabulary_size)
        if foreign_BL.any():
            foreign_rows = foreign_BL.any(dim=1).nonzero().flatten().tolist()
            raise InvalidInput(
                f"a token id is outside the vocabulary of {self._vocabulary_size}",
                code="token_out_of_range",
                violations=tuple(FieldViolation(f"/input_ids/{row}", "unknown token") for row in foreign_rows),
            )
        if self._reference is not None:
            with torch.no_grad():
                reference_BL = token_logprobs(self._reference, batch.input_ids_BL, batch.attention_mask_BL)
            batch = replace(batch, reference_logprobs_BL=reference_BL)
        return batch

    def close(self) -> None:
        """Free the models; the process goes on to the next job."""
        self._reference = None
        self.engine.close()
