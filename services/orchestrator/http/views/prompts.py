"""Prompts as people read them: their value under pi0, their latest trajectories, all of them side by side."""

from __future__ import annotations

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.http.views.trajectories import TrajectoryFilter, trajectories
from spo import redis_keys
from spo.errors import NotFound
from spo.spec.prompt_values import qhat_0
from spo.spec.tasks import RewardSpec
from spo.tasks.problem import Problem
from spo.v1.value_pb2 import PromptValue

SHOWN_CHARACTERS = 200


def prompt(context: AppContext, job_id: str, prompt_id: str) -> schemas.PromptView:
    """A prompt's value and its latest trajectories. Raises NotFound (code "prompt_not_found")."""
    spec = context.jobs.spec(job_id)
    tasks = context.library.load(spec.tasks)
    problem = next((known for known in (*tasks.train, *tasks.evaluation) if known.problem_id == prompt_id), None)
    if problem is None:
        raise NotFound(f"job {job_id} has no prompt {prompt_id}", code="prompt_not_found")
    raw = context.redis.hget(redis_keys.run_values(job_id), prompt_id)
    value = PromptValue.FromString(raw) if raw else None
    estimate = qhat_0(value, spec) if value else None
    return schemas.PromptView(
        prompt_id=prompt_id,
        text=problem.statement,
        samples=value.samples if value else None,
        successes=value.successes if value else None,
        qhat_0=estimate.q if estimate else None,
        qhat_0_low=estimate.low if estimate else None,
        qhat_0_high=estimate.high if estimate else None,
        trajectories=trajectories(context, job_id, TrajectoryFilter(prompt_id)).items,
    )


def prompts(context: AppContext, job_id: str, start: int, limit: int) -> schemas.PromptPage:
    """Training prompts from place `start` on, in their order, with how pi0 did."""
    spec = context.jobs.spec(job_id)
    train = context.library.load(spec.tasks).train
    shown = train[start : start + limit]
    ids = [problem.problem_id for problem in shown]
    stored = context.redis.hmget(redis_keys.run_values(job_id), ids) if ids else []
    items = [_success(problem, raw, spec.tasks.reward) for problem, raw in zip(shown, stored, strict=True)]
    return schemas.PromptPage(items=items, next_cursor=str(start + limit) if start + limit < len(train) else None)


def _success(problem: Problem, raw: bytes | None, reward: RewardSpec) -> schemas.PromptSuccess:
    value = PromptValue.FromString(raw) if raw else None
    # Where there are only right and wrong, they are not stored one by one.
    known = [reward.best] * (value.successes > 0) + [reward.shift] * (value.successes < value.samples) if value else []
    rewards = list(value.rewards) if value and value.rewards else known
    return schemas.PromptSuccess(
        prompt_id=problem.problem_id,
        text=problem.statement[:SHOWN_CHARACTERS],
        difficulty=problem.difficulty,
        samples=value.samples if value else None,
        successes=value.successes if value else None,
        lowest_reward=min(rewards, default=None),
        highest_reward=max(rewards, default=None),
        with_solutions=bool(problem.human_solutions),
    )
