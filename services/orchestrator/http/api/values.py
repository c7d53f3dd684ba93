"""The policy as value, asked of value-estimation."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from services.orchestrator import schemas
from services.orchestrator.datasets.library import prompt_of
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, JobId, PolicyVersion, TrajectoryId
from services.orchestrator.http.threads import lasting
from spo.v1 import value_service_pb2 as value

router = APIRouter(prefix="/v1/jobs", tags=["values"])

# Continuations have to be generated and judged.
CALIBRATION_SECONDS = 600.0


class CalibrationQuery(BaseModel):
    policy_version: int | None = Field(None, ge=0, le=2**53, description="Weight version; default: the newest, 0: pi0.")
    trajectories: int = Field(256, ge=1, le=2000)
    positions: int = Field(4, ge=1, le=64)
    continuations: int = Field(
        0, ge=0, le=64, description="Fresh continuations of pi0 per prefix; 0: its stored samples."
    )
    bins: int = Field(10, ge=1, le=100)


@router.get("/{job_id}/trajectories/{trajectory_id}/values")
@lasting
def token_values(
    context: ContextDep, job_id: JobId, trajectory_id: TrajectoryId, policy_version: PolicyVersion = None
) -> schemas.TokenValues:
    """Q_t and advantage of each token of one trajectory, under a weight version of its job."""
    return views.token_values(context, job_id, trajectory_id, policy_version)


@router.get("/{job_id}/calibration")
@lasting
def calibration(context: ContextDep, job_id: JobId, query: Annotated[CalibrationQuery, Query()]) -> schemas.Calibration:
    """Q_t's predicted success of pi0 against what pi0 did, by bin."""
    spec = context.jobs.spec(job_id)
    train = context.library.load(spec.tasks).train if query.continuations else ()
    stride = max(1, len(train) // query.trajectories)
    request = value.GetCalibrationRequest(
        run_id=job_id,
        policy_version=query.policy_version,
        trajectories=query.trajectories,
        positions=query.positions,
        continuations=query.continuations,
        bins=query.bins,
        prompts=[prompt_of(problem, spec) for problem in train[::stride][: query.trajectories]],
    )
    reply: value.GetCalibrationResponse = context.values.call("GetCalibration", request, CALIBRATION_SECONDS)
    return schemas.Calibration(
        policy_version=reply.policy_version,
        bins=[
            schemas.CalibrationBin(
                predicted=bucket.predicted,
                observed=bucket.observed,
                outcomes=bucket.outcomes,
                low=bucket.low,
                high=bucket.high,
            )
            for bucket in reply.bins
        ],
        expected_calibration_error=reply.expected_calibration_error,
        brier_score=reply.brier_score,
        brier_score_of_qhat_0=reply.brier_score_of_qhat_0,
        prefixes=reply.prefixes,
    )
