"""The policy as value, asked of value-estimation."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from services.orchestrator import schemas
from services.orchestrator.datasets.library import prompt_of
from services.orchestrator.http.api.experience import TrajectoryId
from services.orchestrator.http.dependencies import ContextOf, JobId
from spo.v1 import value_service_pb2 as value

router = APIRouter(prefix="/v1/jobs", tags=["values"])

# A version may have to be loaded first; continuations have to be generated and judged.
VALUES_SECONDS = 120.0
CALIBRATION_SECONDS = 600.0

PolicyVersion = Annotated[int | None, Query(ge=0, le=2**53, description="Weight version; default: the newest, 0: pi0.")]


@router.get("/{job_id}/trajectories/{trajectory_id}/values")
def token_values(
    context: ContextOf, job_id: JobId, trajectory_id: TrajectoryId, policy_version: PolicyVersion = None
) -> schemas.TokenValues:
    """Q_t and advantage of each token of one trajectory, under a weight version of its job."""
    context.jobs.state(job_id)
    request = value.GetTokenValuesRequest(run_id=job_id, trajectory_ids=[trajectory_id], policy_version=policy_version)
    reply: value.GetTokenValuesResponse = context.values.call("GetTokenValues", request, VALUES_SECONDS)
    found = reply.trajectories[0]
    return schemas.TokenValues(
        trajectory_id=found.trajectory_id,
        policy_version=reply.policy_version,
        qhat_0=found.qhat_0,
        tokens=list(found.tokens),
        q=list(found.q),
        advantages=list(found.advantages),
    )


@router.get("/{job_id}/calibration")
def calibration(
    context: ContextOf,
    job_id: JobId,
    policy_version: PolicyVersion = None,
    trajectories: Annotated[int, Query(ge=1, le=2000)] = 256,
    positions: Annotated[int, Query(ge=1, le=64)] = 4,
    continuations: Annotated[
        int, Query(ge=0, le=64, description="Fresh continuations of pi0 per prefix; 0: its stored samples.")
    ] = 0,
    bins: Annotated[int, Query(ge=1, le=100)] = 10,
) -> schemas.Calibration:
    """Q_t's predicted success of pi0 against what pi0 did, by bin."""
    spec = context.jobs.spec(job_id)
    train = context.library.load(spec.tasks).train if continuations else ()
    stride = max(1, len(train) // trajectories)
    request = value.GetCalibrationRequest(
        run_id=job_id,
        policy_version=policy_version,
        trajectories=trajectories,
        positions=positions,
        continuations=continuations,
        bins=bins,
        prompts=[prompt_of(problem, spec) for problem in train[::stride][:trajectories]],
    )
    reply: value.GetCalibrationResponse = context.values.call("GetCalibration", request, CALIBRATION_SECONDS)
    return schemas.Calibration(
        policy_version=reply.policy_version,
        bins=[
            schemas.CalibrationBin(
                predicted=each.predicted, observed=each.observed, outcomes=each.outcomes, low=each.low, high=each.high
            )
            for each in reply.bins
        ],
        expected_calibration_error=reply.expected_calibration_error,
        brier_score=reply.brier_score,
        brier_score_of_qhat_0=reply.brier_score_of_qhat_0,
        prefixes=reply.prefixes,
    )
