"""Asking about pi0: an EstimateRequest per training prompt, then a PivotalRequest where the spec wants pivotal tokens.

Every request is published once, whatever restarts in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from services.orchestrator.datasets.library import prompt_of
from services.orchestrator.experience.availability import Decontamination
from services.orchestrator.jobs.commit import Commit, Write
from services.orchestrator.jobs.record import RecordFields, while_field_is, write_fields
from services.orchestrator.jobs.seeds import seed_of
from services.orchestrator.jobs.store import JobStore
from spo import redis_keys
from spo.messaging.streams import counted_append_words
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import JobState
from spo.tasks.problem import Problem, TaskSets
from spo.v1.prompt_pb2 import Sampling
from spo.v1.value_pb2 import EstimateRequest, PivotalRequest

CHUNK = 128
# A further solution beyond these says little more about what pi0 can do.
FURTHER_SOLUTIONS = 12

Position = Literal["estimates_published", "pivotal_published"]


def publish_estimates(jobs: JobStore, job_id: str, tasks: TaskSets) -> None:
    """Put the prompts without a value on the stream `estimates`."""
    spec = jobs.spec(job_id)
    clean = Decontamination(tasks, spec)

    def writes_of(problem: Problem) -> Sequence[Write]:
        request = _request(job_id, spec, problem)
        request.import_experience = clean.may_import(problem)
        return counted_append_words(redis_keys.estimates(), request.SerializeToString(), job_id)

    done_key = redis_keys.run_values(job_id)
    _publish(jobs, job_id, tasks.train, position_field="estimates_published", done_key=done_key, writes_of=writes_of)
    if clean.left_out:
        body = {"prompts_left_out": clean.left_out, "reason": "they copy held-out problems"}
        jobs.append(job_id, "experience", body)


def publish_pivotal(jobs: JobStore, job_id: str, problems: Sequence[Problem]) -> None:
    """Put the prompts whose correct trajectories are not yet searched for pivotal tokens on the stream `pivotal`."""
    spec = jobs.spec(job_id)

    def writes_of(problem: Problem) -> Sequence[Write]:
        request = PivotalRequest(run_id=job_id, prompt=prompt_of(problem, spec))
        return counted_append_words(redis_keys.pivotal(), request.SerializeToString(), job_id)

    done_key = redis_keys.run_pivotal(job_id)
    _publish(jobs, job_id, problems, position_field="pivotal_published", done_key=done_key, writes_of=writes_of)


def _publish(
    jobs: JobStore,
    job_id: str,
    problems: Sequence[Problem],
    *,
    position_field: Position,
    done_key: str,
    writes_of: Callable[[Problem], Sequence[Write]],
) -> None:
    """Continue where an earlier process stopped.

    The position moves in the same atomic step as the entries, so no prompt is asked for twice or forgotten.
    """
    record = jobs.record(job_id)
    position = record.estimates_published if position_field == "estimates_published" else record.pivotal_published
    while position < len(problems):
        chunk = problems[position : position + CHUNK]
        known = jobs.client.hmget(done_key, [problem.problem_id for problem in chunk])
        asked = (problem for problem, done in zip(chunk, known, strict=True) if done is None)
        writes = [write for problem in asked for write in writes_of(problem)]
        outcome = jobs.commit(
            Commit(
                job_id,
                (JobState.ESTIMATING, JobState.RUNNING),
                guard=while_field_is(job_id, position_field, position),
                writes=[*writes, write_fields(job_id, **_at(position_field, position + len(chunk)))],
                needs_room=True,
            )
        )
        if not outcome.done:
            # Cancelled meanwhile, or another orchestrator is at it: its position decides.
            return
        position += len(chunk)


def _at(position_field: Position, position: int) -> RecordFields:
    return (
        {"estimates_published": position}
        if position_field == "estimates_published"
        else {"pivotal_published": position}
    )


def _request(job_id: str, spec: JobSpec, problem: Problem) -> EstimateRequest:
    request = EstimateRequest(run_id=job_id, prompt=prompt_of(problem, spec))
    if spec.offline.human_solutions:
        request.human_solutions.extend(problem.human_solutions[: spec.offline.human_solutions_per_problem])
        if spec.value and spec.value.sequential:
            further = problem.human_solutions[spec.offline.human_solutions_per_problem :]
            request.further_solutions.extend(further[:FURTHER_SOLUTIONS])
    if spec.offline.wrong_human_solutions:
        request.wrong_solutions.extend(problem.wrong_solutions[: spec.offline.human_solutions_per_problem])
    if spec.value is not None:
        value = spec.value
        limit = spec.model.max_response_tokens
        request.sampling.CopyFrom(
            Sampling(
                samples=value.samples,
                temperature_min=value.temperature,
                temperature_max=value.temperature,
                top_p=value.top_p,
                max_tokens=limit,
                seed=seed_of(spec.seed, "estimate", problem.problem_id),
            )
        )
        request.extra_sampling.CopyFrom(
            Sampling(
                samples=value.extra_samples,
                temperature_min=value.extra_temperature[0],
                temperature_max=value.extra_temperature[1],
                top_p=value.extra_top_p,
                max_tokens=limit,
                seed=seed_of(spec.seed, "extra", problem.problem_id),
            )
        )
    return request
