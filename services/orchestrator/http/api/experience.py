"""Trajectories and prompts, asked of the replay buffer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from services.orchestrator import schemas
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextOf, JobId, Limit
from spo.spec.job_spec import SourceName
from spo.v1.replay_service_pb2 import (
    GetBatchRequest,
    GetBatchResponse,
    GetTrajectoryRequest,
    GetTrajectoryResponse,
)

router = APIRouter(prefix="/v1/jobs", tags=["experience"])

PromptId = Annotated[str, Path(pattern=r"^[0-9a-f]{1,128}$")]
TrajectoryId = Annotated[str, Path(pattern=r"^traj_[0-9A-Za-z]{1,64}$")]


@router.get("/{job_id}/trajectories")
def list_trajectories(
    context: ContextOf,
    job_id: JobId,
    prompt_id: Annotated[str, Query(pattern=r"^[0-9a-f]{0,128}$")] = "",
    source: SourceName | None = None,
    verdict: Annotated[str, Query(pattern=r"^[a-z_]{0,40}$")] = "",
    policy_version: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    limit: Limit = 50,
    cursor: Annotated[str, Query(max_length=200)] = "",
) -> schemas.TrajectoryPage:
    """Trajectories of a job, by prompt, source, verdict or weights; a page may hold fewer than asked for."""
    page = views.trajectories(context, job_id, prompt_id=prompt_id, source=source or "", limit=limit, cursor=cursor)
    page.items = [
        each
        for each in page.items
        if (not verdict or (each.verdict is not None and each.verdict.outcome == verdict))
        and (policy_version is None or each.policy_version_first <= policy_version <= each.policy_version_last)
    ]
    return page


@router.get("/{job_id}/trajectories/{trajectory_id}")
def get_trajectory(
    context: ContextOf,
    job_id: JobId,
    trajectory_id: TrajectoryId,
    steps_from: Annotated[int, Query(ge=0, le=2**32)] = 0,
    steps_limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> schemas.TrajectoryDetail:
    """One trajectory with its tokens, log-probs, every hop, and the training steps that used it (a page of them)."""
    context.jobs.state(job_id)
    request = GetTrajectoryRequest(
        run_id=job_id, trajectory_id=trajectory_id, steps_from=steps_from, steps_limit=steps_limit
    )
    reply: GetTrajectoryResponse = context.replay.call("GetTrajectory", request, views.REPLAY_SECONDS)
    return views.trajectory_detail(reply)


@router.get("/{job_id}/batches/{step}")
def get_batch(context: ContextOf, job_id: JobId, step: Annotated[int, Path(ge=0, lt=2**32)]) -> schemas.BatchView:
    """The trajectories that a training step got."""
    context.jobs.state(job_id)
    request = GetBatchRequest(run_id=job_id, step=step)
    reply: GetBatchResponse = context.replay.call("GetBatch", request, views.REPLAY_SECONDS)
    return schemas.BatchView(step=step, trajectory_ids=list(reply.trajectory_ids))


@router.get("/{job_id}/prompts/{prompt_id}")
def get_prompt(context: ContextOf, job_id: JobId, prompt_id: PromptId) -> schemas.PromptView:
    """A prompt, its Qhat_0 and its latest trajectories side by side."""
    return views.prompt(context, job_id, prompt_id)
