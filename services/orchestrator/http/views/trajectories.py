"""Trajectories as people read them: listed and read by the replay buffer, their tokens valued by value-estimation."""

from __future__ import annotations

from dataclasses import dataclass

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from spo.model.segments import turns
from spo.spec.wire_enums import wire_name
from spo.v1 import value_service_pb2 as value
from spo.v1.prompt_pb2 import Source
from spo.v1.replay_service_pb2 import (
    GetTrajectoryRequest,
    GetTrajectoryResponse,
    ListTrajectoriesRequest,
    ListTrajectoriesResponse,
)
from spo.v1.trajectory_pb2 import FinishReason, SegmentKind, Trajectory
from spo.v1.verdict_pb2 import Outcome

REPLAY_SECONDS = 10.0
# A version may have to be loaded first.
VALUES_SECONDS = 120.0


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which trajectories of a job are wanted; empty fields ask nothing. Outcomes and sources in lower case."""

    prompt_id: str = ""
    source: str = ""
    verdict: str = ""
    policy_version: int | None = None

    def takes(self, trajectory: schemas.Trajectory) -> bool:
        """Whether verdict and weights fit; the replay buffer looks at prompt and source."""
        outcome = trajectory.verdict.outcome if trajectory.verdict else None
        first, last = trajectory.policy_version_first, trajectory.policy_version_last
        return self.verdict in ("", outcome) and (self.policy_version is None or first <= self.policy_version <= last)


ALL = TrajectoryFilter()


def trajectories(
    context: AppContext, job_id: str, wanted: TrajectoryFilter = ALL, *, limit: int = 50, cursor: str = ""
) -> schemas.TrajectoryPage:
    """A page of a job's trajectories, newest first; the filter may leave fewer than `limit`.

    Raises NotFound, Unreachable.
    """
    context.jobs.state(job_id)
    request = ListTrajectoriesRequest(run_id=job_id, prompt_id=wanted.prompt_id, limit=limit, cursor=cursor)
    if wanted.source:
        request.source = Source.Value(f"SOURCE_{wanted.source.upper()}")
    reply: ListTrajectoriesResponse = context.replay.call("ListTrajectories", request, REPLAY_SECONDS)
    found = (schemas.Trajectory.model_validate(_trajectory_fields(listed)) for listed in reply.trajectories)
    return schemas.TrajectoryPage(
        items=[trajectory for trajectory in found if wanted.takes(trajectory)], next_cursor=reply.next_cursor or None
    )


def get_trajectory(
    context: AppContext, job_id: str, trajectory_id: str, *, steps_from: int = 0, steps_limit: int = 0
) -> GetTrajectoryResponse:
    """One trajectory as the replay buffer has it. Raises NotFound, Unreachable."""
    request = GetTrajectoryRequest(
        run_id=job_id, trajectory_id=trajectory_id, steps_from=steps_from, steps_limit=steps_limit
    )
    reply: GetTrajectoryResponse = context.replay.call("GetTrajectory", request, REPLAY_SECONDS)
    return reply


def trajectory_detail(reply: GetTrajectoryResponse) -> schemas.TrajectoryDetail:
    """One trajectory with tokens, log-probs and the steps that used it."""
    found = reply.trajectory
    tokens = {
        "prompt_token_ids": list(found.prompt_token_ids),
        "response_token_ids": list(found.response_token_ids),
        "segments": _segments(found),
        "sampling_logprobs": list(found.sampling_logprobs),
        "reference_logprobs": list(found.reference_logprobs),
        "reference_hash": found.reference_hash,
        "anchor_version": found.anchor.policy_version if found.HasField("anchor") else None,
        "steps": list(reply.steps),
        "times_sampled": reply.times_sampled,
        "copies": reply.copies,
    }
    return schemas.TrajectoryDetail.model_validate({**_trajectory_fields(found), **tokens})


def token_values(
    context: AppContext, job_id: str, trajectory_id: str, policy_version: int | None
) -> schemas.TokenValues:
    """Q_t and advantage of each token under a weight version of the job (None: the newest). Raises NotFound."""
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


def _trajectory_fields(found: Trajectory) -> dict[str, object]:
    judged = found.HasField("verdict")
    return {
        "trajectory_id": found.trajectory_id,
        "group_id": found.group_id,
        "prompt_id": found.prompt_id,
        "source": wire_name(Source, found.source),
        "response_text": found.response_text,
        "response_tokens": len(found.response_token_ids),
        "policy_version_first": found.policy_version_first,
        "policy_version_last": found.policy_version_last,
        "temperature": round(found.temperature, 4),
        "top_p": round(found.top_p, 4),
        "finish_reason": wire_name(FinishReason, found.finish_reason),
        "created_unix_ms": found.created_unix_ms,
        "reward": found.reward if found.HasField("reward") else None,
        "verdict": _verdict(found) if judged else None,
        "hops": [schemas.Hop(service=hop.service, at_unix_ms=hop.at_unix_ms) for hop in found.hops],
    }


def _segments(found: Trajectory) -> list[schemas.ResponseSegment]:
    return [
        schemas.ResponseSegment(
            kind=wire_name(SegmentKind, turn.segment.kind),
            label=turn.segment.label,
            text=turn.text,
            tokens=turn.segment.tokens,
            score=turn.segment.score if turn.segment.HasField("score") else None,
        )
        for turn in turns(found)
    ]


def _verdict(found: Trajectory) -> schemas.Verdict:
    verdict = found.verdict
    return schemas.Verdict(
        outcome=wire_name(Outcome, verdict.outcome),
        tests_passed=verdict.tests_passed,
        tests_total=verdict.tests_total,
        cpu_seconds=verdict.cpu_seconds,
        detail=verdict.detail,
        cached=verdict.cached,
        isolation=verdict.isolation,
        judge_version=verdict.judge_version,
    )
