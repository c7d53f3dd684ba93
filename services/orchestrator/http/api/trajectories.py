"""Trajectories and prompts, asked of the replay buffer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from services.orchestrator import schemas
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, JobId, Limit, PromptId, TrajectoryId
from spo.spec.job_spec import SourceName
from spo.v1.replay_service_pb2 import GetBatchRequest, GetBatchResponse

router = APIRouter(prefix="/v1/jobs", tags=["experience"])


class TrajectoryQuery(BaseModel):
    prompt_id: str = Field("", pattern=r"^[0-9a-f]{0,128}$")
    source: SourceName | None = None
    verdict: str = Field("", pattern=r"^[a-z_]{0,40}$")
    policy_version: int | None = Field(None, ge=0, le=2**53)
    limit: int = Field(50, ge=1, le=1000)
    cursor: str = Field("", max_length=200)


@router.get("/{job_id}/trajectories")
def list_trajectories(
    context: ContextDep, job_id: JobId, query: Annotated[TrajectoryQuery, Query()]
) -> schemas.TrajectoryPage:
    """Trajectories of a job, by prompt, source, verdict or weights; a page may hold fewer than asked for."""
    wanted = views.TrajectoryFilter(query.prompt_id, query.source or "", query.verdict, query.policy_version)
    return views.trajectories(context, job_id, wanted, limit=query.limit, cursor=query.cursor)


@router.get("/{job_id}/trajectories/{trajectory_id}")
def get_trajectory(
    context: ContextDep,
    job_id: JobId,
    trajectory_id: TrajectoryId,
    steps_from: Annotated[int, Query(ge=0, le=2**32)] = 0,
    steps_limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> schemas.TrajectoryDetail:
    """One trajectory with its tokens, log-probs, every hop, and the training steps that used it (a page of them)."""
    context.jobs.state(job_id)
    return views.trajectory_detail(
        views.get_trajectory(context, job_id, trajectory_id, steps_from=steps_from, steps_limit=steps_limit)
    )


@router.get("/{job_id}/batches/{step}")
def get_batch(context: ContextDep, job_id: JobId, step: Annotated[int, Path(ge=0, lt=2**32)]) -> schemas.BatchView:
    """The trajectories that a training step got."""
    context.jobs.state(job_id)
    request = GetBatchRequest(run_id=job_id, step=step)
    reply: GetBatchResponse = context.replay.call("GetBatch", request, views.REPLAY_SECONDS)
    return schemas.BatchView(step=step, trajectory_ids=list(reply.trajectory_ids))


@router.get("/{job_id}/prompts")
def list_prompts(
    context: ContextDep,
    job_id: JobId,
    limit: Limit = 100,
    cursor: Annotated[str, Query(pattern=r"^[0-9]{0,9}$")] = "",
) -> schemas.PromptPage:
    """The training prompts of a job in their order, with how pi0 did on each."""
    return views.prompts(context, job_id, int(cursor or 0), limit)


@router.get("/{job_id}/prompts/{prompt_id}")
def get_prompt(context: ContextDep, job_id: JobId, prompt_id: PromptId) -> schemas.PromptView:
    """A prompt, its Qhat_0 and its latest trajectories side by side."""
    return views.prompt(context, job_id, prompt_id)
