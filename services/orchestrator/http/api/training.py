"""What training leaves behind: curves, evaluations, weight versions, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from services.orchestrator import schemas
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, JobId
from services.orchestrator.http.downloads import weights_as_members
from services.orchestrator.http.threads import lasting
from services.orchestrator.jobs.series import evaluation_results, platform_series, training_series
from spo.errors import NotFound
from spo.weights.tar_stream import tar_bytes, tar_pieces

router = APIRouter(prefix="/v1/jobs", tags=["training"])


@router.get("/{job_id}/metrics")
def metrics(
    context: ContextDep,
    job_id: JobId,
    kind: Literal["training", "platform"] = "training",
    from_step: Annotated[int, Query(ge=0, le=2**53)] = 0,
    to_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    max_points: Annotated[int, Query(ge=1, le=100_000)] = 1000,
) -> schemas.MetricSeries:
    """Named scalars as columns: `training` over steps, `platform` (queue depths, replicas) over unix milliseconds."""
    context.jobs.state(job_id)
    if kind == "platform":
        found = platform_series(context.redis, job_id, max_points)
        return schemas.MetricSeries(axis="unix_ms", steps=found.steps, series=found.columns)
    found = training_series(context.redis, job_id, from_step, to_step, max_points)
    return schemas.MetricSeries(axis="step", steps=found.steps, series=found.columns)


@router.get("/{job_id}/evaluations")
def evaluations(context: ContextDep, job_id: JobId) -> schemas.Evaluations:
    """pass@k with intervals, diversity and each problem's counts, in order of steps."""
    context.jobs.state(job_id)
    return schemas.Evaluations(items=evaluation_results(context.redis, job_id))


@router.get("/{job_id}/weights")
def weights(context: ContextDep, job_id: JobId) -> schemas.WeightVersions:
    """Published versions and which replicas serve them, do not yet, or could not."""
    return schemas.WeightVersions(items=views.weight_versions(context, job_id))


# A number, so that the verbs beside it stay verbs.
@router.get("/{job_id}/weights/{version:int}")
def weight_version(
    context: ContextDep, job_id: JobId, version: Annotated[int, Path(ge=1, le=2**53)]
) -> schemas.WeightVersion:
    """One published version and which replicas serve it."""
    for found in views.weight_versions(context, job_id):
        if found.version == version:
            return found
    raise NotFound(f"job {job_id} has no weight version {version}", code="weight_version_not_found")


@router.get(
    "/{job_id}/weights/{version:int}/download",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}},
)
@lasting
def download_weights(
    context: ContextDep,
    job_id: JobId,
    version: Annotated[int, Path(ge=1, le=2**53)],
    *,
    merge: Annotated[bool, Query(description="An adapter: a whole model, the adapter in its weights.")] = False,
) -> StreamingResponse:
    """A published version as a model folder in a tar archive, or as peft's folder where the job trains an adapter."""
    members = weights_as_members(context, job_id, version, merge=merge)
    headers = {
        "Content-Length": str(tar_bytes(members)),
        "Content-Disposition": f'attachment; filename="{job_id}-{version}.tar"',
    }
    return StreamingResponse(tar_pieces(members), media_type="application/x-tar", headers=headers)


@router.get("/{job_id}/checkpoints")
def checkpoints(context: ContextDep, job_id: JobId) -> schemas.Checkpoints:
    """Checkpoints by step."""
    return schemas.Checkpoints(items=views.checkpoints(context, job_id))
