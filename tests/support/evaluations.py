"""Evaluations as a job's orchestrator writes them and the SDK reads them."""

from __future__ import annotations

from collections.abc import Mapping

from spo.client.models import PassAtK, ProblemScore, StepEvaluation


def step_evaluation(step: int, scores: Mapping[str, float], distinct: float = 1.0) -> StepEvaluation:
    """The evaluation after a step with pass@k by k, on one problem."""
    problem = ProblemScore(
        prompt_id="a", samples=20, correct=1, distinct=1, public_only=0, hard_coded=0, entropy=0.5, response_tokens=9.0
    )
    return StepEvaluation(
        step=step,
        version=step // 10,
        pass_at_k={k: PassAtK(value=value, low=value - 0.05, high=value + 0.05) for k, value in scores.items()},
        distinct_solutions=distinct,
        entropy=0.5,
        response_tokens=9.0,
        public_only_rate=0.0,
        hard_coded_rate=0.0,
        problems=1,
        samples=20,
        per_problem=[problem],
        seconds=1.5,
        at="2026-01-01T00:00:00Z",
    )
