"""The policy of one run on this rank: its model and engine, the reference beside it, tensors, log-probs and loss.

Axes: B trajectory, L padded position.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.trainer.batches import TrainingSample, is_anchored, token_batch
from services.trainer.deepspeed_engine import DeepSpeedEngine
from services.trainer.microbatches import MicroBatch
from services.trainer.step_metrics import WeightedMeans, is_untempered, named_diagnostics
from services.trainer.weights import take_weights
from services.trainer.zero3.loading import partitioned_loading
from services.trainer.zero3.reference import ReferenceModel
from spo.algorithm.diagnostics import batch_diagnostics, residuals, sampler_log_weights
from spo.algorithm.losses import spo_loss
from spo.algorithm.token_batch import TokenBatch
from spo.errors import FieldViolation, InvalidInput
from spo.model.adapter_folder import Adapter
from spo.model.folder import inspect_model_folder
from spo.model.logprobs import DTYPES, load_policy, token_logprobs
from spo.model.lora import adapter_off, add_adapter, take_adapter
from spo.observability.memory import is_out_of_memory
from spo.spec.job_spec import JobSpec
from spo.spec.section import LIVE_SOURCES
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH


def load_model(spec: JobSpec, device: torch.device, path: str = "") -> PreTrainedModel:
    """A copy of pi0, or of the model at `path`, on the device; at ZeRO stage 3 no rank holds more than its part of it.

    Raises InvalidInput when the folder may not or cannot be loaded.
    """
    path, dtype = path or spec.model.path, spec.model.dtype
    on_cpu = spec.trainer.offload == "optimizer_and_parameters"
    cut = partitioned_loading(DTYPES[dtype], on_cpu=on_cpu) if spec.trainer.zero_stage == 3 else nullcontext()
    try:
        with cut:
            model = load_policy(path, dtype, packing=spec.trainer.packing)
        # As any module's: transformers hides its signature behind a wrapper.
        nn.Module.to(model, device)
        return model
    except (OSError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            # No fault of the folder: told as the death of the trainer that it is.
            raise
        raise InvalidInput(f"the model at {path} cannot be loaded: {error}", code="model_not_loadable") from error


class Policy:
    """What is trained. Every rank calls every method alike."""

    def __init__(self, spec: JobSpec, device: torch.device, start: Sequence[Path], passes: int) -> None:
        """start: files of the weights that training begins with, none: pi0's. passes: micro-batches per update."""
        self._spec = spec
        self._device = device
        model = load_model(spec, device)
        lora = spec.model.lora
        self._adapter_config = add_adapter(model, lora.peft_options(), seed=spec.seed) if lora else {}
        if start:
            (take_adapter if self._adapter_config else take_weights)(model, start)
        self._vocabulary_size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
        # With an adapter the model itself is the reference, the adapter switched off.
        second_model = spec.trainer.reference == "in_trainer" and not self._adapter_config
        self._reference = ReferenceModel(load_model(spec, device), spec.trainer.offload) if second_model else None
        teacher = spec.algorithm.teacher
        self._teacher = (
            ReferenceModel(load_model(spec, device, teacher.path), spec.trainer.offload) if teacher else None
        )
        self.engine = DeepSpeedEngine(model, spec.trainer, passes)

    def adapter(self) -> Adapter | None:
        """What the published tensors adapt; None where all weights are trained. Hashes the model the first time."""
        if not self._adapter_config:
            return None
        return Adapter(inspect_model_folder(self._spec.model.path).model_hash, self._adapter_config)

    def set_reference(self, files: Sequence[Path]) -> None:
        """Take published weights as the reference in place of the model folder's. Raises InvalidInput without one."""
        if self._reference is None:
            raise InvalidInput("only a reference held by the trainer can change", code="no_reference")
        take_weights(self._reference.weights, files)

    def batch(self, micro_batch: MicroBatch) -> TokenBatch:
        """The tensors of a micro-batch on the device, built at most once. Raises InvalidInput on an unknown token."""
        return micro_batch.batch(self._build)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """ln pi_theta of each response token, 0 elsewhere; (B, L), nats."""
        return token_logprobs(self.engine.model, batch.input_ids_BL, batch.attention_mask_BL, batch.response_mask_BL)

    @torch.no_grad()
    def reference_logprobs(self, input_ids_BL: Tensor, attention_mask_BL: Tensor, wanted_BL: Tensor) -> Tensor:
        """ln pi0 of each wanted token, 0 elsewhere; (B, L), nats. Raises InvalidInput without a reference."""
        if self._reference is not None:
            return token_logprobs(self._reference.model, input_ids_BL, attention_mask_BL, wanted_BL)
        if not self._adapter_config:
            raise InvalidInput("the trainer holds no reference", code="no_reference")
        with adapter_off(self.engine.model):
            return token_logprobs(self.engine.model, input_ids_BL, attention_mask_BL, wanted_BL)

    def loss(self, micro_batch: MicroBatch, means: WeightedMeans) -> Tensor:
        """The mean loss of a micro-batch; what was measured on the way goes into `means`. Raises InvalidInput."""
        batch = self.batch(micro_batch)
        logprobs_BL = self.logprobs(batch)
        algorithm = self._spec.algorithm
        loss, parts = spo_loss(logprobs_BL, batch, algorithm.losses, algorithm.beta, algorithm.value_noise)
        if micro_batch.idle:
            return loss
        diagnostics = batch_diagnostics(logprobs_BL.detach(), batch, algorithm.beta)
        means.add({"loss": loss.item(), **parts, **named_diagnostics(diagnostics)}, micro_batch.weight)
        self._measure_samples(micro_batch, logprobs_BL.detach(), means)
        self._measure_sources(micro_batch, logprobs_BL.detach(), means)
        return loss

    def _measure_sources(self, micro_batch: MicroBatch, logprobs_BL: Tensor, means: WeightedMeans) -> None:
        """How far the rewards of each source of feedback are from what the policy has learned from all of them."""
        said_by = [row.trajectory.said_by for row in micro_batch.rows]
        if any(said_by):
            found = residuals(logprobs_BL, self.batch(micro_batch), self._spec.algorithm.beta)
            means.add_by_source(said_by, found.abs().tolist())

    def _measure_samples(self, micro_batch: MicroBatch, logprobs_BL: Tensor, means: WeightedMeans) -> None:
        """What the run's own samples tell of the policy, and of how far it is from those who sampled them."""
        batch = self.batch(micro_batch)
        online_B = batch.source_B == SOURCE_ONLINE
        if online_B.any():
            online = batch_diagnostics(logprobs_BL[online_B], batch.select(online_B), self._spec.algorithm.beta)
            of_online = {"token_nll/online": online["token_nll_nats"], "log_ratio/online": online["log_ratio_nats"]}
            means.add(of_online, int(online_B.sum()))
        plain = torch.tensor([is_untempered(row.trajectory) for row in micro_batch.rows], device=online_B.device)
        plain_B = online_B & plain
        if plain_B.any():
            # On samples of (nearly) the current policy the mean of -ln pi estimates its entropy per token; on cooler
            # ones it would be too low.
            found = batch_diagnostics(logprobs_BL[plain_B], batch.select(plain_B), self._spec.algorithm.beta)
            means.add({"entropy": found["token_nll_nats"]}, int(plain_B.sum()))
        known = torch.tensor([bool(row.trajectory.sampling_logprobs) for row in micro_batch.rows])
        known_B = batch.rows_from(tuple(sorted(LIVE_SOURCES))) & known.to(online_B.device)
        if known_B.any():
            means.log_weights += sampler_log_weights(logprobs_BL[known_B], batch.select(known_B)).tolist()

    def _build(self, rows: Sequence[TrainingSample]) -> TokenBatch:
        algorithm = self._spec.algorithm
        batch = token_batch(rows, algorithm.temperature_of_values, self._spec.tasks.reward).to(self._device)
        if algorithm.beta_per == "token":
            batch = batch.with_beta_per_token()
        foreign_BL = (batch.input_ids_BL < 0) | (batch.input_ids_BL >= self._vocabulary_size)
        if foreign_BL.any():
            foreign_rows = foreign_BL.any(dim=1).nonzero().flatten().tolist()
            raise InvalidInput(
                f"a token id is outside the vocabulary of {self._vocabulary_size}",
                code="token_out_of_range",
                violations=tuple(FieldViolation(f"/input_ids/{row}", "unknown token") for row in foreign_rows),
            )
        return self._with_overlong(batch, rows)

    def _with_overlong(self, batch: TokenBatch, rows: Sequence[TrainingSample]) -> TokenBatch:
        """The batch as the job wants responses that are too long to be seen: left out, or with less reward."""
        overlong = self._spec.algorithm.overlong
        if overlong is None:
            return batch
        if overlong.kind == "filter":
            whole = [row.trajectory.finish_reason != FINISH_REASON_LENGTH for row in rows]
            return replace(batch, learned_B=torch.tensor(whole, device=self._device))
        limit, scale = self._spec.model.max_response_tokens, self._spec.tasks.reward.scale
        lost = [scale * overlong.penalty(tokens, limit) for tokens in batch.response_lengths.tolist()]
        return replace(batch, reward_B=batch.reward_B - torch.tensor(lost, device=self._device))

    def add_reference(self, micro_batch: MicroBatch) -> None:
        """Add the reference's log-probs to a micro-batch's tensors, where the trainer computes them.

        Trajectories under an anchor of their own keep its log-probs. Only once every rank has its tensors: the forward
        may gather parameters from all of them.
        """
        if self._spec.trainer.reference == "in_trainer":
            batch = self.batch(micro_batch)
            computed_BL = self.reference_logprobs(batch.input_ids_BL, batch.attention_mask_BL, batch.response_mask_BL)
            own_B = torch.tensor([is_anchored(row.trajectory) for row in micro_batch.rows], device=computed_BL.device)
            given_BL = torch.where(own_B[:, None], batch.reference_logprobs_BL, computed_BL)
            micro_batch.keep(replace(batch, reference_logprobs_BL=given_BL))

    @torch.no_grad()
    def add_teacher(self, micro_batch: MicroBatch) -> None:
        """Add the teacher's log-probs where the job names one, under the same condition as `add_reference`."""
        if self._teacher is not None:
            batch = self.batch(micro_batch)
            wanted = batch.input_ids_BL, batch.attention_mask_BL, batch.response_mask_BL
            taught_BL = token_logprobs(self._teacher.model, *wanted)
            micro_batch.keep(replace(batch, teacher_logprobs_BL=taught_BL))

    def close(self) -> None:
        """Free the models; the process goes on to the next job."""
        for held in (self._reference, self._teacher):
            if held is not None:
                held.close()
        self._reference = self._teacher = None
        self.engine.close()
