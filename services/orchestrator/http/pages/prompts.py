"""Prompts: what each is worth under pi0, how sure that is, its responses side by side, where they turned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, JobId, PromptId
from services.orchestrator.http.pages.rendering import is_part, show
from services.orchestrator.http.pages.tokens import pivotal_of
from spo import redis_keys
from spo.errors import SpoError
from spo.spec.job_spec import JobSpec
from spo.spec.prompt_values import qhat_0
from spo.tasks.learnability import MOST_PROBED, learnability
from spo.tasks.problem import Problem
from spo.v1.replay_service_pb2 import ListTrajectoriesRequest, ListTrajectoriesResponse
from spo.v1.value_pb2 import PromptValue

router = APIRouter(prefix="/jobs/{job_id}/prompts")

PAGE_LENGTH = 50
# Pivotal tokens are searched in a few correct trajectories of pi0 and people only.
SEARCHED = 200
SHOWN_TURNS = 30


@router.get("")
def show_prompts(
    request: Request,
    context: ContextDep,
    job_id: JobId,
    q: Annotated[str, Query(max_length=200)] = "",
    cursor: Annotated[str, Query(pattern=r"^[0-9]{0,9}$")] = "",
) -> Response:
    """The training problems in their order, with their values."""
    spec = context.jobs.spec(job_id)
    train = context.library.load(spec.tasks).train
    words = q.strip().casefold()
    wanted = [
        problem for problem in train if words in problem.statement.casefold() or problem.problem_id.startswith(words)
    ]
    start = int(cursor or 0)
    shown = wanted[start : start + PAGE_LENGTH]
    more = start + PAGE_LENGTH < len(wanted)
    facts = {
        "job": views.job(context, job_id),
        "prompts": _with_values(context, job_id, spec, shown),
        "total": len(wanted),
        "start": start,
        "q": q,
        "reward": spec.tasks.reward,
        "following": urlencode({"q": q, "cursor": start + PAGE_LENGTH}) if more else "",
        "preceding": urlencode({"q": q, "cursor": max(0, start - PAGE_LENGTH)}) if start else "",
    }
    if is_part(request):
        return show(request, "prompts/table.html", **facts)
    probed = learnability(views.prompts(context, job_id, 0, MOST_PROBED).items)
    return show(request, "prompts/list.html", tab="prompts", probed=probed, **facts)


@router.get("/{prompt_id}")
def show_prompt(request: Request, context: ContextDep, job_id: JobId, prompt_id: PromptId) -> Response:
    """One prompt: its value with the interval, its latest responses side by side, its pivotal tokens."""
    job = views.job(context, job_id)
    spec = context.jobs.spec(job_id)
    found = views.prompt(context, job_id, prompt_id)
    facts = {
        "job": job,
        "prompt": found,
        "reward": spec.tasks.reward,
        "groups": _groups(found.trajectories),
        "pivotal": _pivotal(context, job_id, prompt_id, spec),
    }
    return show(request, "prompts/prompt.html", tab="prompts", **facts)


def _with_values(
    context: AppContext, job_id: str, spec: JobSpec, problems: Sequence[Problem]
) -> list[Mapping[str, object]]:
    ids = [problem.problem_id for problem in problems]
    stored = context.redis.hmget(redis_keys.run_values(job_id), ids) if ids else []
    rows: list[Mapping[str, object]] = []
    for problem, raw in zip(problems, stored, strict=True):
        value = PromptValue.FromString(raw) if raw else None
        rows.append({"problem": problem, "value": value, "estimate": qhat_0(value, spec) if value else None})
    return rows


def _groups(trajectories: Sequence[schemas.Trajectory]) -> list[tuple[str, list[schemas.Trajectory]]]:
    """Responses by the group they were sampled in, latest group first."""
    groups: dict[str, list[schemas.Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return list(groups.items())


def _pivotal(context: AppContext, job_id: str, prompt_id: str, spec: JobSpec) -> list[Mapping[str, object]]:
    """The turning points that Pivotal Token Search found in this prompt's trajectories."""
    search = spec.value.pivotal if spec.value else None
    if search is None:
        return []
    request = ListTrajectoriesRequest(run_id=job_id, prompt_id=prompt_id, limit=SEARCHED)
    try:
        reply: ListTrajectoriesResponse = context.replay.call("ListTrajectories", request, views.REPLAY_SECONDS)
    except SpoError:
        # Said once already: the page has no trajectories then either.
        return []
    found: list[Mapping[str, object]] = [
        {"trajectory_id": trajectory.trajectory_id, "turn": turn}
        for trajectory in reply.trajectories
        for turn in pivotal_of(trajectory.annotations, search.threshold)
    ]
    return found[:SHOWN_TURNS]
