"""What is stored, as the documents that people read: jobs, replicas, weights, trajectories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.jobs.leases import now_ms
from services.orchestrator.lifecycle.monitor import waits
from services.orchestrator.replicas.weights import announcement_of, applied_by
from spo import redis_keys
from spo.errors import NotFound
from spo.spec.job_state import TERMINAL, JobState
from spo.spec.prompt_values import qhat_0
from spo.v1.prompt_pb2 import Source
from spo.v1.replay_service_pb2 import GetTrajectoryResponse, ListTrajectoriesRequest, ListTrajectoriesResponse
from spo.v1.trajectory_pb2 import FinishReason, Trajectory
from spo.v1.value_pb2 import PromptValue
from spo.v1.verdict_pb2 import Outcome

REPLAY_SECONDS = 10.0
UNKNOWN_RUN: dict[str, Any] = {"run_id": "", "policy_version": 0, "problem": ""}


def job_summary(context: AppContext, job_id: str) -> schemas.JobSummary:
    """A job in one line. Raises NotFound."""
    for summary in job_summaries(context, [job_id]):
        return summary
    raise NotFound(f"there is no job {job_id}", code="job_not_found")


def job_summaries(context: AppContext, job_ids: Sequence[str]) -> list[schemas.JobSummary]:
    """The jobs in one line each; those deleted meanwhile are left out."""
    with context.redis.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hgetall(redis_keys.job_record(job_id))
            pipe.get(redis_keys.run_state(job_id))
            pipe.zrange(redis_keys.job_metrics(job_id), -1, -1, withscores=True)
        replies = pipe.execute()
    found = zip(job_ids, replies[::3], replies[1::3], replies[2::3], strict=True)
    return [_summary(job_id, *stored) for job_id, *stored in found if stored[0] and stored[1]]


def _summary(
    job_id: str, fields: dict[bytes, bytes], state: bytes, newest: list[tuple[bytes, float]]
) -> schemas.JobSummary:
    record = {name.decode(): value.decode() for name, value in fields.items()}
    return schemas.JobSummary(
        id=job_id,
        name=record["name"],
        labels=json.loads(record["labels"]),
        state=JobState(state.decode()),
        step=int(newest[0][1]) if newest else 0,
        created_at=record["created_at"],
        updated_at=record.get("updated_at", record["created_at"]),
    )


def job(context: AppContext, job_id: str) -> schemas.Job:
    """A job with all that is known of its progress. Raises NotFound."""
    # One round trip for all of it: jobs are looked at often, and by many.
    with context.redis.pipeline(transaction=False) as pipe:
        pipe.hgetall(redis_keys.job_record(job_id))
        pipe.get(redis_keys.run_state(job_id))
        pipe.zrange(redis_keys.job_metrics(job_id), -1, -1, withscores=True)
        pipe.get(redis_keys.run_spec(job_id))
        pipe.hlen(redis_keys.run_values(job_id))
        pipe.hkeys(redis_keys.evaluations(job_id))
        pipe.xrevrange(redis_keys.weights(job_id), count=1)
        fields, state, newest, document, values, evaluated, announced = pipe.execute()
    if not fields or not state or document is None:
        raise NotFound(f"there is no job {job_id}", code="job_not_found")
    summary = _summary(job_id, fields, state, newest)
    record = {name.decode(): value.decode() for name, value in fields.items()}
    spec = context.jobs.parse_spec(document)
    latest = _evaluation(context, job_id, evaluated)
    total = record.get("prompts_total")
    failure = None
    if "failure_code" in record:
        failure = schemas.Failure(code=record["failure_code"], message=record["failure_message"])
    return schemas.Job(
        **vars(summary),
        progress=schemas.Progress(
            **context.value_progress.of(job_id, spec, values),
            values_total=int(total) if total else None,
            step=summary.step,
            steps=spec.trainer.steps,
            weight_version=announcement_of(announced[0]).version if announced else 0,
            evaluations=len(evaluated),
        ),
        latest_evaluation=brief(latest) if latest else None,
        failure=failure,
        waits=[] if summary.state in TERMINAL else _waits(context, job_id, summary.state),
        spec=spec.model_dump(mode="json"),
        lineage=json.loads(record["lineage"]) if "lineage" in record else None,
    )


def _waits(context: AppContext, job_id: str, state: JobState) -> list[str]:
    seen = waits(context.jobs, context.replicas, context.leases, context.assigner, job_id, state)
    return [*context.queue.reasons(job_id, state), *seen]


def _evaluation(context: AppContext, job_id: str, steps: list[bytes]) -> dict[str, Any] | None:
    """The latest of them; each can be large, so only that one is read."""
    raw = context.redis.hget(redis_keys.evaluations(job_id), max(steps, key=int).decode()) if steps else None
    return json.loads(raw) if raw else None


def brief(evaluation: dict[str, Any]) -> dict[str, Any]:
    """An evaluation without its list of problems."""
    return {name: value for name, value in evaluation.items() if name != "per_problem"}


def replicas(context: AppContext, tenant: str | None) -> list[schemas.Replica]:
    """Every live registered replica; of those that serve another tenant's run, not which run and how it fares."""
    now = now_ms()
    live = context.replicas.live()
    runs = {replica.run_id for replica in live} - {""}
    hidden = {run for run in runs if tenant is not None and not _owns(context, tenant, run)}
    return [
        schemas.Replica(
            **{name: value for name, value in vars(replica).items() if name != "last_seen_unix_ms"}
            | (UNKNOWN_RUN if replica.run_id in hidden else {}),
            last_seen_seconds_ago=max(0, now - replica.last_seen_unix_ms) / 1000,
        )
        for replica in live
    ]


def _owns(context: AppContext, tenant: str, run_id: str) -> bool:
    try:
        return context.jobs.tenant(run_id) == tenant
    except NotFound:
        return False


def weight_versions(context: AppContext, job_id: str) -> list[schemas.WeightVersion]:
    """Published versions with the replicas that serve them. Raises NotFound."""
    context.jobs.state(job_id)
    announced = context.weights.announced(job_id)
    live = context.replicas.live()
    return [
        schemas.WeightVersion.model_validate(
            version
            | {"announced": announced is not None and announced.version == version["version"]}
            | applied_by(live, job_id, version["version"])
        )
        for version in context.weights.versions(job_id)
    ]


def checkpoints(context: AppContext, job_id: str) -> list[schemas.Checkpoint]:
    """Checkpoints by step. Raises NotFound."""
    context.jobs.state(job_id)
    found = context.redis.hgetall(redis_keys.job_checkpoints(job_id))
    heads = sorted((json.loads(raw) for raw in found.values()), key=lambda head: int(head["step"]))
    parents = [None, *(int(head["step"]) for head in heads)]
    return [schemas.Checkpoint(**head, parent=parent) for head, parent in zip(heads, parents, strict=False)]


def trajectories(
    context: AppContext, job_id: str, *, prompt_id: str = "", source: str = "", limit: int = 50, cursor: str = ""
) -> schemas.TrajectoryPage:
    """Trajectories of a job as the replay buffer lists them. Raises NotFound, Unreachable."""
    context.jobs.state(job_id)
    request = ListTrajectoriesRequest(run_id=job_id, prompt_id=prompt_id, limit=limit, cursor=cursor)
    if source:
        request.source = Source.Value(f"SOURCE_{source.upper()}")
    reply: ListTrajectoriesResponse = context.replay.call("ListTrajectories", request, REPLAY_SECONDS)
    return schemas.TrajectoryPage(
        items=[trajectory(each) for each in reply.trajectories], next_cursor=reply.next_cursor or None
    )


def trajectory(found: Trajectory) -> schemas.Trajectory:
    """One trajectory without its tokens."""
    return schemas.Trajectory(**_trajectory_fields(found))


def trajectory_detail(reply: GetTrajectoryResponse) -> schemas.TrajectoryDetail:
    """One trajectory with tokens, log-probs and the steps that used it."""
    found = reply.trajectory
    return schemas.TrajectoryDetail(
        **_trajectory_fields(found),
        prompt_token_ids=list(found.prompt_token_ids),
        response_token_ids=list(found.response_token_ids),
        sampling_logprobs=list(found.sampling_logprobs),
        reference_logprobs=list(found.reference_logprobs),
        reference_hash=found.reference_hash,
        steps=list(reply.steps),
        times_sampled=reply.times_sampled,
        copies=reply.copies,
    )


def prompt(context: AppContext, job_id: str, prompt_id: str) -> schemas.PromptView:
    """A prompt's value and its latest trajectories. Raises NotFound (code "prompt_not_found")."""
    spec = context.jobs.spec(job_id)
    tasks = context.library.load(spec.tasks)
    problem = next((each for each in (*tasks.train, *tasks.evaluation) if each.problem_id == prompt_id), None)
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
        trajectories=trajectories(context, job_id, prompt_id=prompt_id).items,
    )


def _trajectory_fields(found: Trajectory) -> dict[str, Any]:
    judged = found.HasField("verdict")
    return {
        "trajectory_id": found.trajectory_id,
        "group_id": found.group_id,
        "prompt_id": found.prompt_id,
        "source": Source.Name(found.source).removeprefix("SOURCE_").lower(),
        "response_text": found.response_text,
        "response_tokens": len(found.response_token_ids),
        "policy_version_first": found.policy_version_first,
        "policy_version_last": found.policy_version_last,
        "temperature": round(found.temperature, 4),
        "top_p": round(found.top_p, 4),
        "finish_reason": FinishReason.Name(found.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "created_unix_ms": found.created_unix_ms,
        "reward": found.reward if found.HasField("reward") else None,
        "verdict": _verdict(found) if judged else None,
        "hops": [schemas.Hop(service=hop.service, at_unix_ms=hop.at_unix_ms) for hop in found.hops],
    }


def _verdict(found: Trajectory) -> schemas.Verdict:
    verdict = found.verdict
    return schemas.Verdict(
        outcome=Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower(),
        tests_passed=verdict.tests_passed,
        tests_total=verdict.tests_total,
        cpu_seconds=verdict.cpu_seconds,
        detail=verdict.detail,
        cached=verdict.cached,
        isolation=verdict.isolation,
        judge_version=verdict.judge_version,
    )
