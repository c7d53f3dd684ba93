"""Jobs as people read them: in one line each, or one with its progress, failure, waits and spec."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from services.orchestrator import redis_keys as own_keys
from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.jobs.record import JobRecord
from services.orchestrator.replicas.weights import announcement_of
from spo import redis_keys
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import TERMINAL, JobState

# Of the newest step, beside pass@k of the newest evaluation.
LISTED_METRICS = ("reward", "loss", "kl_to_reference", "entropy")


def job_summary(context: AppContext, job_id: str) -> schemas.JobSummary:
    """A job in one line. Raises NotFound."""
    for summary in job_summaries(context, [job_id]):
        return summary
    raise context.jobs.absent(job_id)


def job_summaries(context: AppContext, job_ids: Sequence[str]) -> list[schemas.JobSummary]:
    """The jobs in one line each; those deleted meanwhile are left out."""
    with context.redis.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hgetall(redis_keys.job_record(job_id))
            pipe.get(redis_keys.run_state(job_id))
            pipe.zrange(own_keys.job_metrics(job_id), -1, -1, withscores=True)
        replies = pipe.execute()
    found = zip(job_ids, replies[::3], replies[1::3], replies[2::3], strict=True)
    return [
        _summary(job_id, JobRecord.from_redis(fields), state, newest)
        for job_id, fields, state, newest in found
        if fields and state
    ]


def job(context: AppContext, job_id: str) -> schemas.Job:
    """A job with all that is known of its progress. Raises NotFound."""
    # One round trip for all of it: jobs are looked at often, and by many.
    with context.redis.pipeline(transaction=False) as pipe:
        pipe.hgetall(redis_keys.job_record(job_id))
        pipe.get(redis_keys.run_state(job_id))
        pipe.zrange(own_keys.job_metrics(job_id), -1, -1, withscores=True)
        pipe.get(redis_keys.run_spec(job_id))
        pipe.hlen(redis_keys.run_values(job_id))
        pipe.hlen(redis_keys.provisional_values(job_id))
        pipe.hkeys(own_keys.evaluations(job_id))
        pipe.xrevrange(redis_keys.weights(job_id), count=1)
        fields, state, newest, document, values, provisional, evaluated, announced = pipe.execute()
    if not fields or not state or document is None:
        raise context.jobs.absent(job_id)
    record = JobRecord.from_redis(fields)
    summary = _summary(job_id, record, state, newest)
    spec = context.jobs.parse_spec(document)
    latest = _newest_evaluation(context, job_id, evaluated)
    failure = None
    if record.failure_code:
        failure = schemas.Failure(code=record.failure_code, message=record.failure_message)
    return schemas.Job(
        **vars(summary),
        progress=schemas.Progress(
            **context.value_progress.of(job_id, spec, values),
            values_total=record.prompts_total,
            values_provisional=provisional,
            values_pending=record.estimates_pending,
            solved=_solved(context, job_id, spec),
            step=summary.step,
            steps=spec.trainer.steps,
            weight_version=announcement_of(announced[0]).version if announced else 0,
            evaluations=len(evaluated),
        ),
        latest_evaluation=evaluation_brief(latest) if latest else None,
        failure=failure,
        waits=[] if summary.state in TERMINAL else waits(context, job_id, summary.state),
        spec=spec.model_dump(mode="json"),
        missing_evaluations=[
            schemas.MissingEvaluation(
                step=failed.step, version=failed.version, code=failed.code, message=failed.message
            )
            for failed in context.evaluations.schedule.given_up(job_id)
        ],
        lineage=schemas.Lineage(**asdict(record.lineage)) if record.lineage else None,
        warnings=[] if summary.state in TERMINAL else spec_warnings(context, spec, _mean_tokens(newest)),
    )


def _solved(context: AppContext, job_id: str, spec: JobSpec) -> schemas.SolvedPrompts | None:
    """Of how many prompts rollouts found a right answer; None for a job that does not count them."""
    if not spec.counts_outcomes:
        return None
    found = context.redis.hvals(redis_keys.replay_outcomes(job_id))
    outcomes = [tuple(map(int, outcome.split(b":"))) for outcome in found]
    tried = [(right, wrong_since) for rollouts, right, wrong_since in outcomes if rollouts]
    return schemas.SolvedPrompts(
        tried=len(tried),
        never=sum(not right for right, _ in tried),
        once=sum(right == 1 for right, _ in tried),
        lately=sum(right > 0 and wrong_since < spec.rollout.samples_per_prompt for right, wrong_since in tried),
    )


def spec_warnings(context: AppContext, spec: JobSpec, mean_tokens: float | None = None) -> list[schemas.SpecWarning]:
    """What speaks against a spec, on the replicas that live now and with the length of its responses, once known."""
    return [schemas.SpecWarning(**asdict(found)) for found in context.plan_warnings.of(spec, mean_tokens)]


def _mean_tokens(newest: Sequence[tuple[bytes, float]]) -> float | None:
    """The mean response of the newest reported batch, in trained tokens."""
    point = json.loads(newest[0][0]) if newest else {}
    return point.get("response_length")


def evaluation_brief(evaluation: Mapping[str, object]) -> dict[str, object]:
    """An evaluation without its list of problems."""
    return {name: value for name, value in evaluation.items() if name != "per_problem"}


def _summary(job_id: str, record: JobRecord, state: bytes, newest: list[tuple[bytes, float]]) -> schemas.JobSummary:
    return schemas.JobSummary(
        id=job_id,
        name=record.name,
        labels=record.labels,
        state=JobState(state.decode()),
        step=int(newest[0][1]) if newest else 0,
        created_at=record.created_at,
        updated_at=record.updated_at or record.created_at,
        metrics=_metrics(record, newest),
    )


def _metrics(record: JobRecord, newest: list[tuple[bytes, float]]) -> dict[str, float]:
    """What a list shows of a job's curves; what is not finite is left out, as JSON has no such number."""
    scalars = json.loads(newest[0][0]) if newest else {}
    shown = {name: float(scalars[name]) for name in LISTED_METRICS if scalars.get(name) is not None}
    return {name: value for name, value in (shown | record.scores).items() if math.isfinite(value)}


def waits(context: AppContext, job_id: str, state: JobState) -> list[str]:
    """What a job that has not ended waits for, in words."""
    reasons = [*context.queue.reasons(job_id, state), *context.monitor.waits(job_id, state)]
    return context.monitor.named(job_id, state, reasons)


def _newest_evaluation(context: AppContext, job_id: str, steps: list[bytes]) -> dict[str, object] | None:
    """The latest of them; each can be large, so only that one is read."""
    raw = context.redis.hget(own_keys.evaluations(job_id), max(steps, key=int).decode()) if steps else None
    return json.loads(raw) if raw else None
