"""One rank's share of a training step: gradients of the policy, and of PPO's critic, over minibatches and epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from services.trainer.batches import is_anchored
from services.trainer.critic import Critic, CriticOutput
from services.trainer.deepspeed_engine import DeepSpeedEngine
from services.trainer.microbatches import MicroBatch, Minibatch
from services.trainer.policy import Policy, load_model
from services.trainer.ranks import Ranks
from services.trainer.step_metrics import WeightedMeans, is_unchanged_sample, sampler_metrics, weight_metrics
from services.trainer.unusable_batch import UnusableBatch, on_each
from spo.algorithm.diagnostics import effective_sample_share
from spo.algorithm.q_values import check_starts_at_reference
from spo.algorithm.rounding import Difference, Rounding
from spo.algorithm.whole_batch import BatchTotals
from spo.errors import InvalidInput
from spo.model.adapter_folder import Adapter
from spo.model.logprobs import DTYPES
from spo.model.packing import is_packed
from spo.spec.job_spec import JobSpec

# Prefix of the critic's tensors in a checkpoint.
CRITIC = "critic."


@dataclass(frozen=True)
class StepResult:
    """What a step did: its metrics, or why it changed nothing (the same on every rank); the updates it made."""

    metrics: dict[str, float] = field(default_factory=dict)
    refused: str = ""
    updates: int = 0


class Learner:
    """The models of one run on this rank, and how they learn from a batch. Every rank calls every method alike."""

    def __init__(self, ranks: Ranks, spec: JobSpec, start: Sequence[Path] = ()) -> None:
        """start: files of the weights that training begins with; none: the model folder's, which are the reference."""
        self._ranks = ranks
        self._spec = spec
        trainer = spec.trainer
        share, rest = divmod(trainer.batch_size, ranks.world_size * trainer.minibatches)
        if rest:
            raise InvalidInput(
                f"a batch of {trainer.batch_size} cannot be split evenly over {ranks.world_size} ranks "
                f"in {trainer.minibatches} minibatches",
                code="batch_not_divisible",
            )
        # At most: how many they are follows from each batch's lengths.
        passes = share
        self._policy = Policy(spec, ranks.device, start, passes)
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

        Up to rounding, times `factor`. Raised on every rank when it holds on any. Returns by the names of metrics how
        the sampler's log-probs differ from the policy's, where it sampled from pi0 as it is.
        """
        dtype = DTYPES[self._spec.model.dtype]
        beta = self._spec.algorithm.beta
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
            check_starts_at_reference(logprobs_BL, batch, beta, Rounding.of_one_forward(dtype, factor))
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
        parts = [micro_batch for micro_batch in micro_batches if not micro_batch.idle]
        own = [BatchTotals.of(self._policy.batch(part), algorithm.losses, algorithm.beta) for part in parts]
        totals = BatchTotals.added([found for each in self._ranks.gather(own) for found in each])
        for micro_batch in micro_batches:
            micro_batch.keep(totals.told_to(self._policy.batch(micro_batch)))

    def _update(self, minibatch: Minibatch, learning_rate: float, means: WeightedMeans) -> None:
        """One step of the policy, and of the critic if there is one. Raises UnusableBatch on every rank alike."""
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
    """For gradients: they are summed over all ranks, so that every rank raises this alike."""
    return UnusableBatch([(message, InvalidInput(message, code="not_finite"))])
