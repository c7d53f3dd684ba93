"""One rank's share of a training step: log-probs, loss, gradients, update.

Axes: B trajectory, L padded position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from services.trainer.batches import Row, token_batch
from services.trainer.deepspeed_engine import DeepSpeedEngine
from services.trainer.ranks import Ranks
from services.trainer.shares import Piece
from services.trainer.step_metrics import WeightedMeans
from spo.algorithm.diagnostics import batch_diagnostics
from spo.algorithm.losses import spo_loss
from spo.algorithm.q_values import check_starts_at_reference
from spo.algorithm.types import LossTerm, TokenBatch
from spo.errors import InvalidInput, SpoError
from spo.job_spec import JobSpec
from spo.policy_model import load_policy, token_logprobs
from spo.v1.prompt_pb2 import SOURCE_ONLINE


@dataclass(frozen=True)
class Learned:
    """What a step did: its metrics, or why it changed nothing (the same on every rank)."""

    metrics: dict[str, float] = field(default_factory=dict)
    refused: str = ""


class Learner:
    """The policy of one run on this rank. Every rank calls every method alike."""

    def __init__(self, ranks: Ranks, spec: JobSpec) -> None:
        self._ranks = ranks
        self._spec = spec
        self._terms = [LossTerm(**term.model_dump()) for term in spec.algorithm.losses]
        share, rest = divmod(spec.trainer.batch_size, ranks.world_size)
        if rest:
            raise InvalidInput(
                f"a batch of {spec.trainer.batch_size} cannot be split evenly over {ranks.world_size} ranks",
                code="batch_not_divisible",
            )
        policy = self._load()
        self._vocabulary_size = policy.get_input_embeddings().num_embeddings
        self._reference = self._load().requires_grad_(False) if spec.trainer.reference == "in_trainer" else None
        self.engine = DeepSpeedEngine(policy, spec.trainer, micro_batches=-(-share // spec.trainer.micro_batch_size))

    def _load(self) -> Any:
        try:
            policy: Any = load_policy(self._spec.model.path, self._spec.model.dtype)
            return policy.to(self._ranks.device)
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidInput(
                f"the model at {self._spec.model.path} cannot be loaded: {error}", code="model_not_loadable"
            ) from error

    def check_reference(self, pieces: Sequence[Piece], tolerance: float) -> None:
        """Raise InvalidInput (code "reference_mismatch") unless Q_t = Qhat_0 for every t, as it must before any step.

        Raised on every rank when it holds on any.
        """
        problem: SpoError | None = None
        try:
            for piece in pieces:
                batch = self._batch(piece.rows)
                with torch.no_grad():
                    logprobs_BL = self._logprobs(batch)
                check_starts_at_reference(logprobs_BL, batch, self._spec.algorithm.beta, tolerance)
        except InvalidInput as error:
            problem = error
        for found in self._ranks.gather(problem):
            if found:
                raise found

    def learn(self, pieces: Sequence[Piece], learning_rate: float) -> Learned:
        """One optimiser step on this rank's pieces of the batch; the loss is the mean over the whole batch.

        Refused, without a trace in weights or optimiser, when any rank meets a number that is not finite.
        """
        means = WeightedMeans()
        # DeepSpeed averages gradients over ranks, so a rank's losses add up to world_size times its part of the mean.
        scale = self._ranks.world_size / self._spec.trainer.batch_size
        for number, piece in enumerate(pieces, start=1):
            loss, problem = self._loss(piece, means)
            problems = [each for each in self._ranks.gather(problem) if each]
            if problems or loss is None:
                self.engine.discard_gradients()
                return Learned(refused="; ".join(problems))
            self.engine.backward(loss * (piece.weight * scale), last=number == len(pieces))
        grad_norm = self.engine.step(learning_rate)
        if grad_norm is None:
            return Learned(refused="the gradient is not finite")
        metrics = means.means(self._ranks.gather(means))
        return Learned({**metrics, "grad_norm": grad_norm, "learning_rate": learning_rate})

    def _loss(self, piece: Piece, means: WeightedMeans) -> tuple[Tensor | None, str]:
        """The mean loss of a micro-batch, or why there is none."""
        try:
            batch = self._batch(piece.rows)
            logprobs_BL = self._logprobs(batch)
            beta = self._spec.algorithm.beta
            loss, parts = spo_loss(logprobs_BL, batch, self._terms, beta)
        except InvalidInput as error:
            return None, str(error)
        if piece.idle:
            return loss, ""
        diagnostics = batch_diagnostics(logprobs_BL.detach(), batch, beta)
        means.add({"loss": loss.item(), **parts, **_named(diagnostics)}, piece.weight)
        online_B = batch.source_B == SOURCE_ONLINE
        if online_B.any():
            # On samples of (nearly) the current policy the mean of -ln pi estimates its entropy per token.
            online = batch_diagnostics(logprobs_BL.detach()[online_B], batch.select(online_B), beta)
            means.add({"entropy": online["token_nll_nats"]}, int(online_B.sum()))
        return loss, ""

    def _logprobs(self, batch: TokenBatch) -> Tensor:
        return token_logprobs(self.engine.model, batch.input_ids_BL, batch.attention_mask_BL)

    def _batch(self, rows: Sequence[Row]) -> TokenBatch:
        batch = token_batch(rows, self._spec.algorithm.beta, self._spec.tasks.reward).to(self._ranks.device)
        if not 0 <= int(batch.input_ids_BL.min()) <= int(batch.input_ids_BL.max()) < self._vocabulary_size:
            raise InvalidInput(
                f"a token id is outside the vocabulary of {self._vocabulary_size}", code="token_out_of_range"
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


def _named(diagnostics: dict[str, float]) -> dict[str, float]:
    """The diagnostics under the names of the curves; the reward is counted from the whole batch already."""
    renamed = {
        "kl_to_reference_nats": "kl_to_reference",
        "log_ratio_nats": "log_ratio",
        "response_tokens": "response_length",
    }
    return {renamed.get(name, name): value for name, value in diagnostics.items() if name != "reward"}
