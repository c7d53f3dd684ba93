"""One rank's share of a training step: log-probs, loss, gradients, update.

Axes: B trajectory, L padded position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.batches import TrainingSample, token_batch
from services.trainer.critic import Critic, CriticOutput
from services.trainer.deepspeed_engine import DeepSpeedEngine
from services.trainer.microbatches import MicroBatch, Minibatch
from services.trainer.ranks import Ranks
from services.trainer.step_metrics import WeightedMeans, named_diagnostics
from services.trainer.weights import take_weights
from spo.algorithm.diagnostics import batch_diagnostics
from spo.algorithm.losses import spo_loss
from spo.algorithm.q_values import check_starts_at_reference
from spo.algorithm.token_batch import TokenBatch
from spo.errors import FieldViolation, InvalidInput, SpoError
from spo.model.logprobs import load_policy, packed_token_logprobs, token_logprobs
from spo.spec.job_spec import JobSpec
from spo.v1.prompt_pb2 import SOURCE_ONLINE


@dataclass(frozen=True)
class StepResult:
    """What a step did: its metrics, or why it changed nothing (the same on every rank); the updates it made."""

    metrics: dict[str, float] = field(default_factory=dict)
    refused: str = ""
    updates: int = 0


# What the critic said about each piece before the batch's first update; empty without a critic.
CriticOutputs = dict[int, CriticOutput]
# Prefix of the critic's tensors in a checkpoint.
CRITIC = "critic."


class Learner:
    """The policy of one run on this rank. Every rank calls every method alike."""

    def __init__(self, ranks: Ranks, spec: JobSpec, start: Sequence[Path] = ()) -> None:
        """start: files of the weights that training begins with; none: the model folder's, which are the reference."""
        self._ranks = ranks
        self._spec = spec
        self._terms = spec.algorithm.losses
        trainer = spec.trainer
        share, rest = divmod(trainer.batch_size, ranks.world_size * trainer.minibatches)
        if rest:
            raise InvalidInput(
                f"a batch of {trainer.batch_size} cannot be split evenly over {ranks.world_size} ranks "
                f"in {trainer.minibatches} minibatches",
                code="batch_not_divisible",
            )
        passes = -(-share // trainer.micro_batch_size)
        policy = self._load()
        take_weights(policy, start)
        self._vocabulary_size = policy.get_input_embeddings().num_embeddings
        self._reference = self._load().requires_grad_(False) if trainer.reference == "in_trainer" else None
        self.engine = DeepSpeedEngine(policy, trainer, passes)
        self._critic = Critic(self._load(), spec.algorithm, trainer, passes) if spec.algorithm.critic else None

    def _load(self) -> Any:
        try:
            policy: Any = load_policy(self._spec.model.path, self._spec.model.dtype)
            return policy.to(self._ranks.device)
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidInput(
                f"the model at {self._spec.model.path} cannot be loaded: {error}", code="model_not_loadable"
            ) from error

    def set_reference(self, files: Sequence[Path]) -> None:
        """Take published weights as the reference in place of the model folder's. Raises InvalidInput without one."""
        if self._reference is None:
            raise InvalidInput("only a reference held by the trainer can change", code="no_reference")
        take_weights(self._reference, files)

    def check_reference(self, micro_batches: Sequence[MicroBatch], tolerance: float) -> None:
        """Raise InvalidInput (code "reference_mismatch") unless Q_t = Qhat_0 for every t, as it must before any step.

        Raised on every rank when it holds on any.
        """
        problem: SpoError | None = None
        try:
            for micro_batch in micro_batches:
                batch = self._batch(micro_batch.rows)
                with torch.no_grad():
                    logprobs_BL = self._logprobs(batch)
                check_starts_at_reference(logprobs_BL, batch, self._spec.algorithm.beta, tolerance)
        except InvalidInput as error:
            problem = error
        for found in self._ranks.gather(problem):
            if found:
                raise found

    def learn(self, minibatches: Sequence[Minibatch], learning_rate: float) -> StepResult:
        """An optimiser step on each minibatch in turn, `trainer.epochs` times; a loss is the mean over the minibatch.

        Refused when any rank meets a number that is not finite. What the trajectories bring is looked at before the
        first update, so a bad one leaves no trace in weights or optimiser; should the model itself overflow in a later
        minibatch, the updates before stay.
        """
        means = WeightedMeans()
        critic_outputs, refused = self._look_through(minibatches)
        updates = 0
        for minibatch in list(minibatches) * self._spec.trainer.epochs:
            refused = refused or self._update(minibatch, critic_outputs, learning_rate, means)
            if refused:
                return StepResult(refused=refused, updates=updates)
            updates += 1
        metrics = means.means(self._ranks.gather(means))
        return StepResult({**metrics, "learning_rate": learning_rate}, updates=updates)

    def _look_through(self, minibatches: Sequence[Minibatch]) -> tuple[CriticOutputs, str]:
        """The critic's opinion of every piece under the policy before the batch; why there can be none, or ""."""
        critic_outputs: CriticOutputs = {}
        if not self._critic and len(minibatches) * self._spec.trainer.epochs == 1:
            return critic_outputs, ""

        def evaluate(micro_batch: MicroBatch) -> None:
            if self._critic:
                with torch.no_grad():
                    batch = self._batch(micro_batch.rows)
                    critic_outputs[id(micro_batch)] = self._critic.evaluate(self._logprobs(batch), batch)

        micro_batches = [micro_batch for minibatch in minibatches for micro_batch in minibatch.micro_batches]
        refused = self._faults(micro_batches, lambda micro_batch: self._batch(micro_batch.rows)) or self._faults(
            micro_batches, evaluate
        )
        if self._critic and not refused:
            own = [critic_outputs[id(micro_batch)].moments() for micro_batch in micro_batches if not micro_batch.idle]
            critic_outputs = self._critic.normalised(
                critic_outputs, [each for found in self._ranks.gather(own) for each in found]
            )
        return critic_outputs, refused

    def _faults(self, micro_batches: Sequence[MicroBatch], look: Callable[[MicroBatch], object]) -> str:
        """What `look` finds wrong in any rank's pieces; each is looked at, since forwards gather from all ranks."""
        faults = []
        for micro_batch in micro_batches:
            try:
                look(micro_batch)
            except InvalidInput as error:
                faults.append(_naming_trajectories(error, micro_batch))
        return "; ".join(fault for found in self._ranks.gather(faults) for fault in found)

    def _update(
        self, minibatch: Minibatch, critic_outputs: CriticOutputs, learning_rate: float, means: WeightedMeans
    ) -> str:
        """One step of the policy, and of the critic if there is one; why nothing was updated, or ""."""
        critic = self._critic
        refused = self._accumulate(
            self.engine, minibatch, lambda micro_batch: self._loss(micro_batch, critic_outputs, means)
        )
        if critic and not refused:
            refused = self._accumulate(
                critic.engine,
                minibatch,
                lambda micro_batch: self._value_loss(critic, micro_batch, critic_outputs[id(micro_batch)], means),
            )
        if refused:
            self._discard_gradients()
            return refused
        if critic:
            value_norm = critic.step(learning_rate / self._spec.trainer.learning_rate)
            if value_norm is None:
                self._discard_gradients()
                return "the critic's gradient is not finite"
            means.add({"value_grad_norm": value_norm}, 1)
        norm = self.engine.step(learning_rate)
        if norm is None:
            return "the gradient is not finite"
        means.add({"grad_norm": norm}, 1)
        return ""

    def _accumulate(
        self,
        engine: DeepSpeedEngine,
        minibatch: Minibatch,
        loss_of: Callable[[MicroBatch], tuple[Tensor | None, str]],
    ) -> str:
        """Add up the gradients of all pieces; why a piece has no loss on some rank, or ""."""
        # DeepSpeed averages gradients over ranks, so a rank's losses add up to world_size times its part of the mean.
        scale = self._ranks.world_size / minibatch.size
        for number, micro_batch in enumerate(minibatch.micro_batches, start=1):
            loss, problem = loss_of(micro_batch)
            problems = [each for each in self._ranks.gather(problem) if each]
            if problems or loss is None:
                return "; ".join(problems)
            engine.backward(loss * (micro_batch.weight * scale), last=number == len(minibatch.micro_batches))
        return ""

    def _discard_gradients(self) -> None:
        self.engine.discard_gradients()
        if self._critic:
            self._critic.engine.discard_gradients()

    def _loss(
        self, micro_batch: MicroBatch, critic_outputs: CriticOutputs, means: WeightedMeans
    ) -> tuple[Tensor | None, str]:
        """The mean loss of a micro-batch, or why there is none."""
        try:
            batch = self._batch(micro_batch.rows)
            if id(micro_batch) in critic_outputs:
                batch = replace(batch, critic_advantage_BL=critic_outputs[id(micro_batch)].advantage_BL)
            logprobs_BL = self._logprobs(batch)
            beta = self._spec.algorithm.beta
            loss, parts = spo_loss(logprobs_BL, batch, self._terms, beta)
        except InvalidInput as error:
            return None, _naming_trajectories(error, micro_batch)
        if micro_batch.idle:
            return loss, ""
        diagnostics = batch_diagnostics(logprobs_BL.detach(), batch, beta)
        means.add({"loss": loss.item(), **parts, **named_diagnostics(diagnostics)}, micro_batch.weight)
        online_B = batch.source_B == SOURCE_ONLINE
        if online_B.any():
            # On samples of (nearly) the current policy the mean of -ln pi estimates its entropy per token.
            online = batch_diagnostics(logprobs_BL.detach()[online_B], batch.select(online_B), beta)
            of_online = {"entropy": online["token_nll_nats"], "log_ratio/online": online["log_ratio_nats"]}
            means.add(of_online, int(online_B.sum()))
        return loss, ""

    def _value_loss(
        self, critic: Critic, micro_batch: MicroBatch, critic_output: CriticOutput, means: WeightedMeans
    ) -> tuple[Tensor | None, str]:
        """The critic's mean loss on a micro-batch, or why there is none."""
        try:
            loss = critic.loss(self._batch(micro_batch.rows), critic_output)
        except InvalidInput as error:
            return None, _naming_trajectories(error, micro_batch)
        means.add({"value_loss": loss.item()}, micro_batch.weight)
        return loss, ""

    def _logprobs(self, batch: TokenBatch) -> Tensor:
        forward = packed_token_logprobs if self._spec.trainer.packing else token_logprobs
        return forward(self.engine.model, batch.input_ids_BL, batch.attention_mask_BL)

    def _batch(self, rows: Sequence[TrainingSample]) -> TokenBatch:
        batch = token_batch(rows, self._spec.algorithm.beta, self._spec.tasks.reward).to(self._ranks.device)
        foreign_BL = (batch.input_ids_BL < 0) | (batch.input_ids_BL >= self._vocabulary_size)
        if foreign_BL.any():
            rows_with_one = foreign_BL.any(dim=1).nonzero().flatten().tolist()
            raise InvalidInput(
                f"a token id is outside the vocabulary of {self._vocabulary_size}",
                code="token_out_of_range",
                violations=tuple(FieldViolation(f"/input_ids/{row}", "unknown token") for row in rows_with_one),
            )
        if self._reference is not None:
            with torch.no_grad():
                reference_BL = token_logprobs(self._reference, batch.input_ids_BL, batch.attention_mask_BL)
            batch = replace(batch, reference_logprobs_BL=reference_BL)
        return batch

    @property
    def stage(self) -> int:
        """The ZeRO stage; the critic's is the same."""
        return self.engine.stage

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's part of the training state, the critic's included."""
        tensors = self.engine.state_tensors()
        if self._critic:
            tensors |= {CRITIC + name: tensor for name, tensor in self._critic.engine.state_tensors().items()}
        return tensors

    def reshard_state_tensors(self, paths: Sequence[Path]) -> dict[str, Tensor]:
        """This rank's part of what another number of ranks wrote, one file each. Raises IntegrityError."""
        tensors = self.engine.reshard(paths, "", self._ranks)
        if self._critic:
            cut = self._critic.engine.reshard(paths, CRITIC, self._ranks)
            tensors |= {CRITIC + name: tensor for name, tensor in cut.items()}
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`. Raises IntegrityError on another model's."""
        critics = {name.removeprefix(CRITIC): each for name, each in tensors.items() if name.startswith(CRITIC)}
        self.engine.load_state_tensors({name: each for name, each in tensors.items() if not name.startswith(CRITIC)})
        if self._critic:
            self._critic.engine.load_state_tensors(critics)

    def close(self) -> None:
        """Free the models; the process goes on to the next job."""
        self._reference = None
        if self._critic:
            self._critic.close()
        self.engine.close()


def _naming_trajectories(error: InvalidInput, micro_batch: MicroBatch) -> str:
    """The error in words, with the ids of the trajectories that its pointers (/tensor/row) mean."""
    ids = [micro_batch.rows[int(row)].trajectory.trajectory_id for row in _rows_of(error)]
    return f"{error.message} ({', '.join(sorted(set(ids)))})" if ids else str(error)


def _rows_of(error: InvalidInput) -> list[str]:
    return [row for each in error.violations if (row := each.pointer.rpartition("/")[2]).isdigit()]
