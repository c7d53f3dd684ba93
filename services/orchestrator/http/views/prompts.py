"""Prompts as people read them: their value under pi0 and their latest trajectories."""

from __future__ import annotations

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.http.views.trajectories import TrajectoryFilter, trajectories
from spo import redis_keys
from spo.errors import NotFound
from spo.spec.prompt_values import qhat_0
from spo.v1.value_pb2 import PromptValue


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
