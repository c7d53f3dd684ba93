"""The refresh of the reference (section 6): a weight version becomes it once every prompt has its value under it.

running: a version of a new interval -> an EstimateRequest per prompt -> all values there -> event `reference`, of which
the trainer hears with its next renewal. Training goes on meanwhile, with the reference before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from services.orchestrator.datasets.library import TaskLibrary, prompt_of
from services.orchestrator.jobs.commit import Commit, Precondition, Write
from services.orchestrator.jobs.seeds import seed_of
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.weights import REFERENCE_VERSION, WeightAnnouncements
from spo import redis_keys
from spo.messaging.streams import counted_append_words
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import JobState
from spo.spec.prompt_values import qhat_0
from spo.tasks.problem import Problem
from spo.v1.prompt_pb2 import Sampling
from spo.v1.value_pb2 import EstimateRequest, PromptValue

CHUNK = 128
# Fields of the job's record: the version asked about with the position of its last request, how many prompts were asked
# about in all, and the version in force.
_ASKED, _TOTAL, _IN_FORCE = "reference_asked", "reference_total", "reference_version"


class ReferenceRefresh:
    """One refresh at a time per job; every step may be repeated after a crash."""

    def __init__(self, jobs: JobStore, library: TaskLibrary, weights: WeightAnnouncements) -> None:
        self.jobs = jobs
        self.library = library
        self.weights = weights

    def in_force(self, job_id: str) -> int:
        """The weight version that is the reference; 0 is the job's model folder."""
        stored = self.jobs.client.hget(redis_keys.job_record(job_id), _IN_FORCE)
        return int(stored or REFERENCE_VERSION)

    def values(self, job_id: str, version: int) -> dict[str, float]:
        """Qhat_0 of each prompt under a version, reward units; prompts that the job drops are left out."""
        spec = self.jobs.spec(job_id)
        stored = self.jobs.client.hvals(redis_keys.run_values_under(job_id, version))
        found = ((each.prompt_id, qhat_0(each, spec)) for each in map(PromptValue.FromString, stored))
        return {prompt_id: estimate.q for prompt_id, estimate in found if estimate}

    def advance(self, job_id: str) -> None:
        """Begin, continue or complete the refresh of a running job, where its spec wants one."""
        spec, record = self.jobs.spec(job_id), self.jobs.record(job_id)
        if spec.algorithm.reference_refresh is None or "trained_steps" in record:
            return
        current = self.in_force(job_id)
        asked, position = map(int, record.get(_ASKED, "0:0").split(":"))
        if asked <= current:
            newest = self._next(job_id, spec.algorithm.reference_refresh.interval_steps, current)
            if newest is not None:
                self._ask(job_id, spec, newest, record.get(_ASKED, ""), 0)
        elif _TOTAL not in record:
            published = {int(each["version"]): each for each in self.weights.versions(job_id)}
            self._ask(job_id, spec, published[asked], record[_ASKED], position)
        elif self.jobs.client.hlen(redis_keys.run_values_under(job_id, asked)) >= int(record[_TOTAL]):
            self._put_in_force(job_id, current, asked, int(record[_TOTAL]))

    def _next(self, job_id: str, interval: int, current: int) -> dict[str, Any] | None:
        """The newest version after the one in force that was published at the end of an interval."""
        later = [each for each in self.weights.versions(job_id) if int(each["version"]) > current]
        return next((each for each in reversed(later) if int(each["step"]) % interval == 0), None)

    def _ask(self, job_id: str, spec: JobSpec, version: dict[str, Any], asked: str, position: int) -> None:
        """Ask for the values of all prompts that have one under pi0, a chunk at a time with the position beside it."""
        known = self.jobs.client.hkeys(redis_keys.run_values(job_id))
        valued = {prompt_id.decode() for prompt_id in known}
        problems = [each for each in self.library.load(spec.tasks).train if each.problem_id in valued]
        key = redis_keys.job_record(job_id)
        while position < len(problems):
            chunk = problems[position : position + CHUNK]
            position += len(chunk)
            now = f"{version['version']}:{position}"
            writes: list[Write] = [*_requests(job_id, spec, version, chunk), ("HSET", key, _ASKED, now)]
            writes.append(("HSET", key, _TOTAL, position) if position == len(problems) else ("HDEL", key, _TOTAL))
            commit = Commit(job_id, (JobState.RUNNING,), guard=Precondition(key, _ASKED, asked), writes=writes)
            if not commit.run(self.jobs.client, self.jobs.durable).done:
                return
            asked = now

    def _put_in_force(self, job_id: str, before: int, version: int, prompts: int) -> None:
        key = redis_keys.job_record(job_id)
        guard = Precondition(key, _IN_FORCE, str(before) if before else "")
        body = {"version": version, "prompts": prompts}
        self.jobs.once(job_id, guard, "reference", body, [("HSET", key, _IN_FORCE, version)])


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
