"""The refresh of the reference (section 6): a weight version becomes it once every prompt has its value under it.

While a job runs: a version of a new interval is published -> an EstimateRequest per prompt -> once all values are
there, event `reference`, of which the trainer learns with its next renewal. Until then the reference is the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from services.orchestrator.datasets.library import TaskLibrary, prompt_of
from services.orchestrator.jobs.commit import Commit, Write
from services.orchestrator.jobs.record import clear_fields, while_field_is, write_fields
from services.orchestrator.jobs.seeds import seed_of
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.weights import WeightAnnouncements
from spo import redis_keys
from spo.messaging.streams import counted_append_words
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import JobState
from spo.spec.prompt_values import qhat_0
from spo.tasks.problem import Problem
from spo.v1.prompt_pb2 import Sampling
from spo.v1.value_pb2 import EstimateRequest, PromptValue

CHUNK = 128


class ReferenceRefresh:
    """One refresh at a time per job; every step may be repeated after a crash."""

    def __init__(self, jobs: JobStore, library: TaskLibrary, weights: WeightAnnouncements) -> None:
        self.jobs = jobs
        self.library = library
        self.weights = weights

    def in_force(self, job_id: str) -> int:
        """The weight version that is the reference; 0 is the job's model folder."""
        return self.jobs.record(job_id).reference_version

    def values(self, job_id: str, version: int) -> dict[str, float]:
        """Qhat_0 of each prompt under a version, reward units; prompts that the job drops are left out."""
        spec = self.jobs.spec(job_id)
        stored = self.jobs.client.hvals(redis_keys.run_values_under(job_id, version))
        found = ((value.prompt_id, qhat_0(value, spec)) for value in map(PromptValue.FromString, stored))
        return {prompt_id: estimate.q for prompt_id, estimate in found if estimate}

    def advance(self, job_id: str) -> None:
        """Begin, continue or complete the refresh of a running job, where its spec wants one."""
        spec, record = self.jobs.spec(job_id), self.jobs.record(job_id)
        if not spec.algorithm.refreshes_by_samples or record.is_trained:
            return
        current = record.reference_version
        asked, position = map(int, (record.reference_asked or "0:0").split(":"))
        if asked <= current:
            newest = self._next(job_id, spec, current)
            if newest is not None:
                self._ask(job_id, spec, newest, record.reference_asked, 0)
        elif record.reference_total is None:
            published = {int(version["version"]): version for version in self.weights.versions(job_id)}
            self._ask(job_id, spec, published[asked], record.reference_asked, position)
        elif self.jobs.client.hlen(redis_keys.run_values_under(job_id, asked)) >= record.reference_total:
            self._put_in_force(job_id, current, asked, record.reference_total)

    def _next(self, job_id: str, spec: JobSpec, current: int) -> dict[str, Any] | None:
        """The newest version after the one in force that was published at the end of an interval."""
        assert spec.algorithm.reference_refresh is not None
        interval = spec.algorithm.reference_refresh.interval_steps
        later = [version for version in self.weights.versions(job_id) if int(version["version"]) > current]
        return next((version for version in reversed(later) if int(version["step"]) % interval == 0), None)

    def _ask(self, job_id: str, spec: JobSpec, version: dict[str, Any], asked: str, position: int) -> None:
        """Ask for the values of all prompts that have one under pi0, a chunk at a time with the position beside it."""
        known = self.jobs.client.hkeys(redis_keys.run_values(job_id))
        valued = {prompt_id.decode() for prompt_id in known}
        problems = [problem for problem in self.library.load(spec.tasks).train if problem.problem_id in valued]
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
            if not self.jobs.commit(commit).done:
                return
            asked = now

    def _put_in_force(self, job_id: str, before: int, version: int, prompts: int) -> None:
        guard = while_field_is(job_id, "reference_version", before)
        body = {"version": version, "prompts": prompts}
        self.jobs.once(job_id, guard, "reference", body, [write_fields(job_id, reference_version=version)])


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
