"""Tokens as a page colours them: nine steps of advantage, and where the chance of success turned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.orchestrator import schemas
from spo.algorithm.pivotal_tokens import PivotalToken, pivotal_tokens
from spo.model.segments import action_mask
from spo.v1.trajectory_pb2 import Annotation, Trajectory

STEPS = 4


@dataclass(frozen=True)
class ColouredToken:
    """shade is from -4 (the most harmful token of this response) to 4 (the most helpful one).

    is_said: an environment wrote it, so that it is neither.
    """

    text: str
    q: float
    advantage: float
    shade: int
    pivotal: PivotalToken | None
    is_said: bool


def coloured(values: schemas.TokenValues, trajectory: Trajectory, threshold: float | None) -> list[ColouredToken]:
    """Each token with its shade, relative to the largest advantage in this response; threshold None: none is pivotal.

    values are of this trajectory.
    """
    largest = max((abs(advantage) for advantage in values.advantages), default=0.0)
    found = pivotal_of(trajectory.annotations, threshold) if threshold is not None else ()
    pivotal = {token.index: token for token in found}
    trained = action_mask(trajectory.segments, len(values.tokens))
    return [
        ColouredToken(
            text,
            q,
            advantage,
            round(STEPS * advantage / largest) if largest else 0,
            pivotal.get(index),
            is_said=not trained[index],
        )
        for index, (text, q, advantage) in enumerate(zip(values.tokens, values.q, values.advantages, strict=True))
    ]


def pivotal_of(annotations: Iterable[Annotation], threshold: float) -> tuple[PivotalToken, ...]:
    """The tokens that moved pi0's success rate by more than the threshold, from the rollouts of their prefixes."""
    rates = {prefix.position: prefix.successes / prefix.rollouts for prefix in annotations if prefix.rollouts}
    return pivotal_tokens(rates, threshold=threshold)
