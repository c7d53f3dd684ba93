"""The values of a job's prompts: asked for before training or taken from stored experience, how well they are known,
and their refresh.

Asking about pi0: an EstimateRequest per training prompt, then a PivotalRequest where the spec wants pivotal tokens.
Every request is published once, whatever restarts in between.

The refresh of the reference (section 6): a weight version becomes it once every prompt has its value under it.
While a job runs: a version of a new interval is published -> an EstimateRequest per prompt -> once all values are
there, event `reference`, of which the trainer learns with its next renewal. Until then the reference is the one before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from services.orchestrator.commit import Commit, Write
from services.orchestrator.datasets import TaskLibrary, prompt_of
from services.orchestrator.job_records import RecordFields, clear_fields, while_field_is, write_fields
from services.orchestrator.jobs import JobStore, seed_of
from services.orchestrator.versions import published_versions
from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput, NotReady
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import run_tenant
from spo.messaging.streams.entries import counted_append_words
from spo.spec.job_spec import JobSpec
from spo.spec.reward import qhat_0
from spo.spec.section import SAMPLED_SOURCES, TERMINAL, JobState, decode_state
from spo.tasks.load import ContaminationIndex
from spo.tasks.problem import Problem, TaskSets
from spo.v1.prompt_pb2 import Sampling
from spo.v1.value_pb2 import EstimateRequest, PivotalRequest, PromptValue

PROMPTS_PER_WRITE = 256

REMEMBERED = 64

CHUNK = 128
# A further solution beyond these says little more about what pi0 can do.
FURTHER_SOLUTIONS = 12

Position = Literal["estimates_published", "pivotal_published"]


def needs_estimates(spec: JobSpec) -> bool:
    """Whether value-estimation has anything to do for a job before it trains."""
    offline = spec.offline
    wants_programs = offline.human_solutions or offline.wrong_human_solutions
    return spec.value is not None or wants_programs or bool(offline.experience)


def require_stored(client: RedisClient, store: ExperienceStore, spec: JobSpec, tenant: str) -> None:
    """Refuse a spec that names a run nobody has stored, or another tenant has.

    Raises InvalidInput, with a pointer to every such source.
    """
    violations = []
    for index, wanted in enumerate(spec.offline.experience):
        if wanted.run is not None and not _is_there(client, store, wanted.run, tenant):
            message = f"there is no stored run or import {wanted.run}; `spo experience ls` shows what there is"
            violations.append(FieldViolation(f"/offline/experience/{index}/run", message))
    if violations:
        raise InvalidInput("stored experience is missing", code="unknown_experience", violations=tuple(violations))


def await_stored(client: RedisClient, spec: JobSpec) -> None:
    """Raise NotReady while an ended run that the job names is still on its way into the store."""
    for run_id in {wanted.run for wanted in spec.offline.experience if wanted.run}:
        with client.pipeline(transaction=False) as pipe:
            pipe.get(redis_keys.run_state(run_id))
            pipe.hget(redis_keys.replay_counters(run_id), "number")
            pipe.hget(redis_keys.replay_stored(run_id), "written")
            state, number, written = pipe.execute()
        if decode_state(state) in TERMINAL and int(written or 0) < int(number or 0):
            raise NotReady(f"the experience of {run_id} is being stored: {int(written or 0)} of {int(number)}")


def write_prompts(jobs: JobStore, job_id: str, problems: Sequence[Problem], spec: JobSpec) -> None:
    """Write the prompts to Redis, where the replay buffer reads them when it stores their trajectories."""
    key = redis_keys.run_prompts(job_id)
    for start in range(0, len(problems), PROMPTS_PER_WRITE):
        chunk = problems[start : start + PROMPTS_PER_WRITE]
        words = [(problem.problem_id, prompt_of(problem, spec).SerializeToString()) for problem in chunk]
        jobs.commit(Commit(job_id, writes=[("HSET", key, *(word for pair in words for word in pair))]), durable=False)


class Decontamination:
    """Keeps stored experience from training problems that copy a held-out one."""

    def __init__(self, tasks: TaskSets, spec: JobSpec) -> None:
        self.tasks = tasks
        self.spec = spec
        self.left_out = 0

    def may_import(self, problem: Problem) -> bool:
        """Whether this problem may use stored experience; counts those that may not."""
        if not self.spec.offline.experience:
            return False
        copies = self._index is not None and self._index.find_copy(problem) is not None
        self.left_out += copies
        return not copies

    @cached_property
    def _index(self) -> ContaminationIndex | None:
        if not (self.spec.offline.decontaminate and self.tasks.evaluation):
            return None
        tasks = self.spec.tasks
        instruction = tasks.huggingface.instruction if tasks.huggingface else ""
        return ContaminationIndex(self.tasks.evaluation, tasks.near_duplicate_similarity, instruction)


def _is_there(client: RedisClient, store: ExperienceStore, run: str, tenant: str) -> bool:
    owner = run_tenant(client, run)
    if owner is not None:
        return owner == tenant
    return any(file.origin.tenant == tenant for file in store.files(run))


def prompts_known(client: RedisClient, job_id: str) -> int:
    """Prompts whose value batches may read by now, provisional or final; one that becomes final in between counts."""
    with client.pipeline(transaction=True) as pipe:
        pipe.hlen(redis_keys.run_values(job_id))
        pipe.hlen(redis_keys.provisional_values(job_id))
        final, provisional = pipe.execute()
    return int(final) + int(provisional)


def prompts_before_training(spec: JobSpec, total: int) -> int:
    """Prompts that must have a value before a job trains: as many as a batch holds groups, all, or none."""
    value = spec.value
    if value is None or value.start == "all" or not spec.trainer.steps:
        return total
    if value.pivotal is not None and value.pivotal.when == "before_training":
        return total
    sources = {part.source for part in spec.replay.mix if part.share > 0}
    if not spec.reads_values and sources <= SAMPLED_SOURCES:
        return 0
    # Rounds reach every prompt soon, and rollouts set the pace. Elsewhere training would mostly see the first prompts.
    if value.start is None and (value.sequential is None or not sources & SAMPLED_SOURCES):
        return total
    groups = math.ceil(spec.trainer.batch_size / spec.rollout.samples_per_prompt)
    return min(total, max(groups, math.ceil(value.start_share * total)))


class ValueProgress:
    """Remembers each job's figures by how many values there are: they are only added, and jobs are looked at often."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self._known: OrderedDict[str, tuple[int, dict[str, Any]]] = OrderedDict()

    def of(self, job_id: str, spec: JobSpec, done: int) -> dict[str, Any]:
        """values_done, value_samples, and the mean interval width over prompts, reward units (None without any)."""
        known = self._known.get(job_id)
        if known and known[0] == done:
            return known[1]
        found = {"values_done": done, **self._summary(job_id, spec, done)}
        self._known[job_id] = (done, found)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found

    def _summary(self, job_id: str, spec: JobSpec, done: int) -> dict[str, Any]:
        stored = self.client.hvals(redis_keys.run_values(job_id)) if done else []
        values = [PromptValue.FromString(payload) for payload in stored]
        widths = [found.high - found.low for found in (qhat_0(value, spec) for value in values) if found]
        return {
            "value_samples": sum(value.samples for value in values),
            "value_interval_width": sum(widths) / len(widths) if widths else None,
        }


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


def reference_in_force(jobs: JobStore, job_id: str) -> int:
    """The weight version that is the reference; 0 is the job's model folder."""
    return jobs.record(job_id).reference_version


def reference_values(jobs: JobStore, job_id: str, version: int) -> dict[str, float]:
    """Qhat_0 of each prompt under a version, reward units; prompts that the job drops are left out."""
    spec = jobs.spec(job_id)
    stored = jobs.client.hvals(redis_keys.run_values_under(job_id, version))
    found = ((value.prompt_id, qhat_0(value, spec)) for value in map(PromptValue.FromString, stored))
    return {prompt_id: estimate.q for prompt_id, estimate in found if estimate}


def advance_reference(jobs: JobStore, library: TaskLibrary, job_id: str) -> None:
    """Begin, continue or complete the refresh of a running job, where its spec wants one.

    One refresh at a time per job; every step may be repeated after a crash.
    """
    spec, record = jobs.spec(job_id), jobs.record(job_id)
    if not spec.algorithm.refreshes_by_samples or record.is_trained:
        return
    current = record.reference_version
    asked, position = map(int, (record.reference_asked or "0:0").split(":"))
    if asked <= current:
        newest = _next_reference(jobs, job_id, spec, current)
        if newest is not None:
            _ask_for_values(jobs, library, job_id, newest, record.reference_asked, 0)
    elif record.reference_total is None:
        published = {int(version["version"]): version for version in published_versions(jobs, job_id)}
        _ask_for_values(jobs, library, job_id, published[asked], record.reference_asked, position)
    elif jobs.client.hlen(redis_keys.run_values_under(job_id, asked)) >= record.reference_total:
        _put_in_force(jobs, job_id, current, asked, record.reference_total)


def _next_reference(jobs: JobStore, job_id: str, spec: JobSpec, current: int) -> dict[str, Any] | None:
    """The newest version after the one in force that was published at the end of an interval."""
    assert spec.algorithm.reference_refresh is not None
    interval = spec.algorithm.reference_refresh.interval_steps
    later = [version for version in published_versions(jobs, job_id) if int(version["version"]) > current]
    return next((version for version in reversed(later) if int(version["step"]) % interval == 0), None)


def _ask_for_values(
    jobs: JobStore, library: TaskLibrary, job_id: str, version: dict[str, Any], asked: str, position: int
) -> None:
    """Ask for the values of all prompts that have one under pi0, a chunk at a time with the position beside it."""
    spec, known = jobs.spec(job_id), jobs.client.hkeys(redis_keys.run_values(job_id))
    valued = {prompt_id.decode() for prompt_id in known}
    problems = [problem for problem in library.load(spec.tasks).train if problem.problem_id in valued]
    while position < len(problems):
        chunk = problems[position : position + CHUNK]
        position += len(chunk)
        now = f"{version['version']}:{position}"
        is_last = position == len(problems)
        writes: list[Write] = [
            *_requests(job_id, spec, version, chunk),
            write_fields(job_id, reference_asked=now),
            write_fields(job_id, reference_total=position) if is_last else clear_fields(job_id, "reference_total"),
        ]
        guard = while_field_is(job_id, "reference_asked", asked)
        commit = Commit(job_id, (JobState.RUNNING,), guard=guard, writes=writes, needs_room=True)
        if not jobs.commit(commit).done:
            return
        asked = now


def _put_in_force(jobs: JobStore, job_id: str, before: int, version: int, prompts: int) -> None:
    guard = while_field_is(job_id, "reference_version", before)
    body = {"version": version, "prompts": prompts}
    jobs.once(job_id, guard, "reference", body, [write_fields(job_id, reference_version=version)])


def _requests(job_id: str, spec: JobSpec, version: dict[str, Any], problems: Sequence[Problem]) -> Iterator[Write]:
    refresh, value = spec.algorithm.reference_refresh, spec.value
    assert refresh is not None
    assert value is not None
    for problem in problems:
        request = EstimateRequest(
            run_id=job_id,
            prompt=prompt_of(problem, spec),
            reference_version=int(version["version"]),
            reference_hash=version["manifest_digest"],
            sampling=Sampling(
                samples=refresh.samples,
                temperature_min=value.temperature,
                temperature_max=value.temperature,
                top_p=value.top_p,
                max_tokens=spec.model.max_response_tokens,
                seed=seed_of(spec.seed, "reference", version["version"], problem.problem_id),
            ),
        )
        yield from counted_append_words(redis_keys.estimates(), request.SerializeToString(), job_id)
