"""One rank's share of a training step: the policy with its reference, PPO's critic, and their gradients over
minibatches and epochs.

Axes: B trajectory, L padded position. Values, returns and advantages in reward units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.trainer.batches import (
    MicroBatch,
    Minibatch,
    TrainingSample,
    UnusableBatch,
    WeightedMeans,
    is_anchored,
    on_each,
    policy_metrics,
    sampler_metrics,
    token_batch,
    weight_metrics,
)
from services.trainer.critic import Critic, CriticOutput
from services.trainer.deepspeed_engine import (
    DeepSpeedEngine,
    ReferenceModel,
    SequenceGroup,
    model_faults_named,
    partitioned_loading,
    take_weights,
)
from services.trainer.ranks import Ranks
from spo.algorithm.baselines import (
    BatchTotals,
    teaching_rows,
)
from spo.algorithm.objectives import (
    Difference,
    Rounding,
    TokenBatch,
    batch_diagnostics,
    check_starts_at_reference,
    effective_sample_share,
    residuals,
    sampler_log_weights,
    spo_loss,
)
from spo.errors import FieldViolation, InvalidInput, storage_faults_named
from spo.model.chat import is_unchanged_sample, is_untempered
from spo.model.folder import Adapter, inspect_model_folder, tensor_shapes
from spo.model.folder_names import FolderNames
from spo.model.logprobs import (
    DTYPES,
    adapter_off,
    add_adapter,
    is_packed,
    load_policy,
    take_adapter,
    token_logprobs,
)
from spo.observability import is_out_of_memory
from spo.spec.job_spec import JobSpec
from spo.spec.section import LIVE_SOURCES
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH

# Prefix of the critic's tensors in a checkpoint.
CRITIC = "critic."


def load_model(spec: JobSpec, device: torch.device, path: str = "") -> PreTrainedModel:
    """A copy of pi0, or of the model at `path`, on the device; at ZeRO stage 3 no rank holds more than its part of it.

    Raises InvalidInput when the folder may not or cannot be loaded.
    """
    path, dtype = path or spec.model.path, spec.model.dtype
    on_cpu = spec.trainer.offload == "optimizer_and_parameters"
    cut = partitioned_loading(DTYPES[dtype], on_cpu=on_cpu) if spec.trainer.zero_stage == 3 else nullcontext()
    try:
        with cut, model_faults_named(path), storage_faults_named(path):
            model = load_policy(path, dtype, packing=spec.trainer.packing)
        # As any module's: transformers hides its signature behind a wrapper.
        nn.Module.to(model, device)
        return model
    except (OSError, RuntimeError) as error:
        if is_out_of_memory(error):
            # No fault of the folder: reported as a death of the trainer, which it is.
            raise
        raise InvalidInput(f"the model at {path} cannot be loaded: {error}", code="model_not_loadable") from error


class Policy:
    """What is trained. All ranks call every method together."""

    def __init__(self, spec: JobSpec, ranks: Ranks, start: Sequence[Path], passes: int) -> None:
        """start: files of the weights that training begins with, none: pi0's. passes: micro-batches per update."""
        self._spec = spec
        self._device = device = ranks.device
        model = load_model(spec, device)
        self._shared = SequenceGroup.of(ranks, spec.trainer.sequence_parallel)
        if self._shared:
            self._shared.check(model)
        lora = spec.model.lora
        if not lora:
            # An engine would refuse every version, after a step's work.
            FolderNames(model).check(tensor_shapes(inspect_model_folder(spec.model.path).safetensors_files))
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
        given = batch.input_ids_BL, batch.attention_mask_BL, batch.response_mask_BL
        return token_logprobs(self.engine.model, *given, self._shared)

    @torch.no_grad()
    def reference_logprobs(self, input_ids_BL: Tensor, attention_mask_BL: Tensor, wanted_BL: Tensor) -> Tensor:
        """ln pi0 of each wanted token, 0 elsewhere; (B, L), nats. Raises InvalidInput without a reference."""
        if self._reference is not None:
            return token_logprobs(self._reference.model, input_ids_BL, attention_mask_BL, wanted_BL, self._shared)
        if not self._adapter_config:
            raise InvalidInput("the trainer holds no reference", code="no_reference")
        with adapter_off(self.engine.model):
            return token_logprobs(self.engine.model, input_ids_BL, attention_mask_BL, wanted_BL, self._shared)

    def loss(self, micro_batch: MicroBatch, means: WeightedMeans) -> Tensor:
        """The mean loss of a micro-batch; what was measured on the way goes into `means`. Raises InvalidInput."""
        kept = self._without_skipped(micro_batch)
        batch = self.batch(kept)
        logprobs_BL = self.logprobs(batch)
        algorithm = self._spec.algorithm
        loss, parts = spo_loss(logprobs_BL, batch, algorithm.losses, algorithm.beta, algorithm.value_noise)
        # Of the whole micro-batch: what was skipped adds 0.
        share = len(kept.rows) / len(micro_batch.rows)
        loss = loss * share
        if micro_batch.idle:
            return loss
        parts = {name: part * share for name, part in parts.items()}
        skipped = {} if self._spec.trainer.skip_rows == "none" else {"skipped": 1 - share}
        means.add({"loss": loss.item(), **parts, **skipped}, micro_batch.weight)
        means.add(policy_metrics(logprobs_BL.detach(), batch, algorithm), kept.weight)
        self._measure_samples(kept, logprobs_BL.detach(), means)
        self._measure_sources(kept, logprobs_BL.detach(), means)
        return loss

    def _without_skipped(self, micro_batch: MicroBatch) -> MicroBatch:
        """The rows that a forward is needed for, by `trainer.skip_rows`; never none, since ranks go in step."""
        skip, algorithm = self._spec.trainer.skip_rows, self._spec.algorithm
        if skip == "none":
            return micro_batch
        batch = self.batch(micro_batch)
        contrast_only = skip == "without_contrast"
        kept_B = teaching_rows(batch, algorithm.losses, algorithm.beta, contrast_only=contrast_only)
        if not kept_B.any():
            kept_B = batch.group_B == batch.group_B[0]
        if kept_B.all():
            return micro_batch
        rows = [row for row, is_kept in zip(micro_batch.rows, kept_B.tolist(), strict=True) if is_kept]
        kept = MicroBatch(rows, micro_batch.idle)
        kept.keep(batch.select(kept_B))
        return kept

    def _measure_sources(self, micro_batch: MicroBatch, logprobs_BL: Tensor, means: WeightedMeans) -> None:
        """How far the rewards of each source of feedback are from what the policy has learned from all of them."""
        said_by = [row.trajectory.said_by for row in micro_batch.rows]
        if any(said_by):
            found = residuals(logprobs_BL, self.batch(micro_batch), self._spec.algorithm.beta)
            means.add_by_source(said_by, found.abs().tolist())

    def _measure_samples(self, micro_batch: MicroBatch, logprobs_BL: Tensor, means: WeightedMeans) -> None:
        """What the run's own samples show of the policy, and how far it is from the versions that sampled them."""
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
            taught_BL = token_logprobs(self._teacher.model, *wanted, self._shared)
            micro_batch.keep(replace(batch, teacher_logprobs_BL=taught_BL))

    def close(self) -> None:
        """Free the models; the process goes on to the next job."""
        for held in (self._reference, self._teacher):
            if held is not None:
                held.close()
        self._reference = self._teacher = None
        self.engine.close()


@dataclass(frozen=True)
class StepResult:
    """What a step did: its metrics, or why it changed nothing (the same on every rank); the updates it made."""

    metrics: dict[str, float] = field(default_factory=dict)
    refused: str = ""
    updates: int = 0


class Learner:
    """The models of one run on this rank, and how they learn from a batch. All ranks call every method together."""

    def __init__(self, ranks: Ranks, spec: JobSpec, start: Sequence[Path] = ()) -> None:
        """start: files of the weights that training begins with; none: the model folder's, which are the reference."""
        self._ranks = ranks
        self._spec = spec
        trainer = spec.trainer
        # At most: how many passes they are follows from each batch's lengths.
        passes, rest = divmod(trainer.batch_size, ranks.groups_of(trainer.sequence_parallel) * trainer.minibatches)
        if rest:
            raise InvalidInput(
                f"a batch of {trainer.batch_size} cannot be split evenly over {ranks.world_size} ranks "
                f"in {trainer.minibatches} minibatches",
                code="batch_not_divisible",
            )
        self._policy = Policy(spec, ranks, start, passes)
        self._critic = None
        if spec.algorithm.critic:
            self._critic = Critic(load_model(spec, ranks.device), spec.algorithm, trainer, passes)

    @property
    def engine(self) -> DeepSpeedEngine:
        """The policy's engine, whose weights are published."""
        return self._policy.engine

    def adapter(self) -> Adapter | None:
        """What the published tensors adapt; None where all weights are trained."""
        return self._policy.adapter()

    @property
    def packed(self) -> bool:
        """Whether the policy computes without padding."""
        return is_packed(self.engine.model)

    def set_reference(self, files: Sequence[Path]) -> None:
        """Take published weights as the reference in place of the model folder's. Raises InvalidInput without one."""
        self._policy.set_reference(files)

    def check_reference(self, micro_batches: Sequence[MicroBatch], factor: float) -> dict[str, float]:
        """Raise InvalidInput (code "reference_mismatch") unless Q_t = Qhat_0 for every t, as it must before any step.

        The tolerance is rounding, times `factor`. If one rank finds a mismatch, every rank raises. Returns, by metric
        name, how the sampler's log-probs differ from the policy's, for samples of the unchanged pi0.
        """
        dtype = DTYPES[self._spec.model.dtype]
        of = Rounding.of_two_engines if self._spec.trainer.reference == "sampler" else Rounding.of_one_forward
        samplers: list[Difference] = []

        @torch.no_grad()
        def check(micro_batch: MicroBatch) -> None:
            batch = self._policy.batch(micro_batch)
            logprobs_BL = self._policy.logprobs(batch)
            # Those of later versions are met where a run begins again before its first checkpoint.
            numbers = [number for number, row in enumerate(micro_batch.rows) if not is_anchored(row.trajectory)]
            if not numbers:
                return
            kept = [micro_batch.rows[number] for number in numbers]
            logprobs_BL = logprobs_BL[numbers]
            batch = batch.select(torch.tensor(numbers, device=logprobs_BL.device))
            check_starts_at_reference(logprobs_BL, batch, self._spec.algorithm.beta, of(dtype, factor))
            rows = [index for index, row in enumerate(kept) if is_unchanged_sample(row.trajectory)]
            if rows and not micro_batch.idle:
                chosen = batch.select(torch.tensor(rows, device=logprobs_BL.device))
                given = logprobs_BL[rows], chosen.sampling_logprobs_BL, chosen.response_mask_BL
                samplers.append(Difference.between(*given, Rounding.of_two_engines(dtype, factor)))

        try:
            on_each(self._ranks, micro_batches, self._policy.batch)
            on_each(self._ranks, micro_batches, self._policy.add_reference)
            on_each(self._ranks, micro_batches, check)
        except UnusableBatch as error:
            raise error.first from error
        return sampler_metrics([found for own in self._ranks.gather(samplers) for found in own])

    def learn(self, minibatches: Sequence[Minibatch], learning_rate: float) -> StepResult:
        """An optimiser step on each minibatch in turn, `trainer.epochs` times; a loss is the mean over the minibatch.

        Refused when any rank meets a number that is not finite. What the trajectories bring is checked before the first
        update, so a bad one leaves no trace in weights or optimiser; should the model itself overflow in a
        later minibatch, the updates before stay.
        """
        means = WeightedMeans()
        updates = 0
        schedule = list(minibatches) * self._spec.trainer.epochs
        micro_batches = [micro_batch for minibatch in minibatches for micro_batch in minibatch.micro_batches]
        try:
            # Before any forward: a rank without tensors would keep the others waiting for its parameters.
            on_each(self._ranks, micro_batches, self._policy.batch)
            on_each(self._ranks, micro_batches, self._policy.add_reference)
            on_each(self._ranks, micro_batches, self._policy.add_teacher)
            if self._critic:
                self._add_advantages(self._critic, micro_batches)
            self._add_proximal_logprobs(micro_batches, updates=len(schedule))
            self._add_totals(micro_batches)
            for minibatch in schedule:
                self._update(minibatch, learning_rate, means)
                updates += 1
        except UnusableBatch as error:
            return StepResult(refused=str(error), updates=updates)
        finally:
            for micro_batch in micro_batches:
                micro_batch.release()
        gathered = self._ranks.gather(means)
        weights = weight_metrics([weight for found in gathered for weight in found.log_weights])
        return StepResult({**means.means(gathered), **weights}, updates=updates)

    def _add_advantages(self, critic: Critic, micro_batches: Sequence[MicroBatch]) -> None:
        """Add advantages and returns, under the policy and critic of this moment, to the micro-batches' tensors."""

        @torch.no_grad()
        def compute(micro_batch: MicroBatch) -> CriticOutput:
            batch = self._policy.batch(micro_batch)
            return critic.compute_advantages(self._policy.logprobs(batch), batch)

        outputs = on_each(self._ranks, micro_batches, compute)
        pairs = list(zip(micro_batches, outputs, strict=True))
        own = [output.moments() for micro_batch, output in pairs if not micro_batch.idle]
        moments = [moment for found in self._ranks.gather(own) for moment in found]
        for micro_batch, output in pairs:
            micro_batch.keep(critic.normalised(output, moments).added_to(self._policy.batch(micro_batch)))

    def _add_proximal_logprobs(self, micro_batches: Sequence[MicroBatch], *, updates: int) -> None:
        """Add the policy's log-probs of this moment, where a loss needs them; of one update they are its forward's."""
        if updates == 1 or not any(term.needs("proximal") for term in self._spec.algorithm.losses):
            return

        @torch.no_grad()
        def add(micro_batch: MicroBatch) -> None:
            batch = self._policy.batch(micro_batch)
            micro_batch.keep(replace(batch, proximal_logprobs_BL=self._policy.logprobs(batch)))

        on_each(self._ranks, micro_batches, add)

    def _add_totals(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the whole batch's numbers to its parts, where a loss needs them."""
        algorithm = self._spec.algorithm
        if not any(term.needs("batch") for term in algorithm.losses):
            return
        # Ranks that share rows have the same parts.
        tells = self._ranks.rank % self._spec.trainer.sequence_parallel == 0
        parts = [each for each in micro_batches if tells and not each.idle]
        own = [BatchTotals.of(self._policy.batch(part), algorithm.losses, algorithm.beta) for part in parts]
        totals = BatchTotals.added([found for each in self._ranks.gather(own) for found in each])
        for micro_batch in micro_batches:
            micro_batch.keep(totals.told_to(self._policy.batch(micro_batch)))

    def _update(self, minibatch: Minibatch, learning_rate: float, means: WeightedMeans) -> None:
        """One step of the policy, and of the critic if there is one. Raises UnusableBatch on every rank."""
        met = len(means.log_weights)
        try:
            self._accumulate(self.engine, minibatch, lambda micro_batch: self._policy.loss(micro_batch, means))
            learning_rate *= self._rate_factor(means.log_weights[met:])
            if self._critic:
                self._update_critic(self._critic, minibatch, learning_rate, means)
        except UnusableBatch:
            for engine in self._engines().values():
                engine.discard_gradients()
            raise
        norm = self.engine.step(learning_rate)
        if norm is None:
            raise _not_finite("the gradient is not finite")
        means.add({"grad_norm": norm, "learning_rate": learning_rate}, 1)

    def _rate_factor(self, log_weights: Sequence[float]) -> float:
        """Of the learning rate: the root of the effective sample share of this update, all ranks together, if asked.

        Adam's step does not shrink with noise, so that its rate is to follow the root of the samples' number
        (Huang et al. 2026).
        """
        if not self._spec.trainer.scale_rate_by_effective_samples:
            return 1.0
        every = [weight for found in self._ranks.gather(list(log_weights)) for weight in found]
        return math.sqrt(effective_sample_share(every))

    def _update_critic(self, critic: Critic, minibatch: Minibatch, learning_rate: float, means: WeightedMeans) -> None:
        def loss_of(micro_batch: MicroBatch) -> Tensor:
            loss = critic.loss(self._policy.batch(micro_batch))
            means.add({"value_loss": loss.item()}, micro_batch.weight)
            return loss

        self._accumulate(critic.engine, minibatch, loss_of)
        # Its rate warms up with the policy's.
        norm = critic.step(learning_rate / self._spec.trainer.learning_rate)
        if norm is None:
            raise _not_finite("the critic's gradient is not finite")
        means.add({"value_grad_norm": norm}, 1)

    def _accumulate(
        self, engine: DeepSpeedEngine, minibatch: Minibatch, loss_of: Callable[[MicroBatch], Tensor]
    ) -> None:
        """Add up the gradients of all micro-batches. Raises UnusableBatch where one has no loss on some rank."""
        # DeepSpeed averages gradients over ranks, so a rank's losses add up to world_size times its part of the mean.
        scale = self._ranks.world_size / minibatch.size
        for number, micro_batch in enumerate(minibatch.micro_batches, start=1):
            (loss,) = on_each(self._ranks, [micro_batch], loss_of)
            engine.backward(loss * (micro_batch.weight * scale), last=number == len(minibatch.micro_batches))

    def _engines(self) -> dict[str, DeepSpeedEngine]:
        """By the prefix of their tensors in a checkpoint."""
        return {"": self.engine, CRITIC: self._critic.engine} if self._critic else {"": self.engine}

    @property
    def stage(self) -> int:
        """The ZeRO stage; the critic's is the same."""
        return self.engine.stage

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's part of the training state, the critic's included."""
        states = {prefix: engine.state_tensors() for prefix, engine in self._engines().items()}
        return {prefix + name: tensor for prefix, state in states.items() for name, tensor in state.items()}

    def reshard_state_tensors(self, paths: Sequence[Path]) -> dict[str, Tensor]:
        """This rank's part of what another number of ranks wrote, one file each. Raises IntegrityError."""
        states = {prefix: engine.reshard(paths, prefix, self._ranks) for prefix, engine in self._engines().items()}
        return {prefix + name: tensor for prefix, state in states.items() for name, tensor in state.items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`. Raises IntegrityError on another model's."""
        for prefix, engine in self._engines().items():
            own = {name: tensor for name, tensor in tensors.items() if name.startswith(CRITIC) == (prefix == CRITIC)}
            engine.load_state_tensors({name.removeprefix(prefix): tensor for name, tensor in own.items()})

    def close(self) -> None:
        """Free the models; the process goes on to the next job."""
        if self._critic:
            self._critic.close()
        self._policy.close()


def _not_finite(message: str) -> UnusableBatch:
    """For gradients: they are summed over all ranks, so that every rank raises this."""
    return UnusableBatch([(message, InvalidInput(message, code="not_finite"))])
