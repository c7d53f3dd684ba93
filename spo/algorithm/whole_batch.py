"""Numbers of a whole batch that a part of it cannot know: sums that are added up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from spo.algorithm.baselines.surrogate import advantage_moments, mean_and_deviation, raw_advantages
from spo.algorithm.registry import LossTerm
from spo.algorithm.token_batch import TokenBatch


@dataclass(frozen=True)
class BatchTotals:
    """Sums over the trajectories that terms learn from which need them.

    moments: number, sum and sum of squares of the advantages of their tokens.
    """

    trajectories: int
    tokens: int
    moments: tuple[float, float, float]

    @classmethod
    def of(cls, batch: TokenBatch, terms: Sequence[LossTerm], beta: float) -> BatchTotals:
        """Of a part of a batch. The advantages are those of the one term that divides by them, on its sources."""
        found = torch.zeros(3, dtype=torch.float64)
        learned_B = torch.zeros_like(batch.reward_B, dtype=torch.bool)
        for term in terms:
            if not term.needs("batch"):
                continue
            rows_B = batch.learned_from(term.sources, in_groups=term.needs("groups"))
            learned_B |= rows_B
            if term.surrogate.normalise == "batch" and rows_B.any():
                part = batch.select(rows_B)
                advantage_BL = raw_advantages(part, term.surrogate, beta)
                found += advantage_moments(advantage_BL, part.response_mask_BL).cpu()
        count, total, squares = found.tolist()
        return cls(int(learned_B.sum()), int(batch.response_lengths[learned_B].sum()), (count, total, squares))

    @classmethod
    def added(cls, parts: Sequence[BatchTotals]) -> BatchTotals:
        """The totals of all parts together."""
        count, total, squares = (sum(part.moments[index] for part in parts) for index in range(3))
        trajectories = sum(part.trajectories for part in parts)
        return cls(trajectories, sum(part.tokens for part in parts), (count, total, squares))

    def told_to(self, batch: TokenBatch) -> TokenBatch:
        """The part with the whole batch's numbers in each row."""
        mean, deviation = mean_and_deviation(*self.moments)
        return replace(
            batch,
            mean_tokens_B=torch.full_like(batch.reward_B, self.tokens / max(self.trajectories, 1)),
            advantage_mean_B=torch.full_like(batch.reward_B, mean),
            advantage_deviation_B=torch.full_like(batch.reward_B, deviation),
        )
