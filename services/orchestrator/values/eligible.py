"""Which training prompts rollouts may be sampled for now: those with a value that the job's mix takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.orchestrator.jobs.store import JobStore
from spo import redis_keys
from spo.algorithm.replay_sampling import value_spread
from spo.spec.job_spec import JobSpec
from spo.tasks.problem import Problem
from spo.v1.value_pb2 import PromptValue

# Pause per second that reading all values took: while they come in, they change at every look.
PAUSE_PER_SECOND = 20.0


@dataclass(frozen=True)
class KnownValues:
    """What was eligible when there were so many values, and when it is worth another look."""

    stamp: tuple[int, int]
    prompt_ids: frozenset[str]
    look_again_at: float


class EligiblePrompts:
    """Remembers each running job's eligible prompts; values are only added and refined."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs
        self._known: dict[str, KnownValues] = {}

    def of(self, job_id: str, spec: JobSpec, problems: Sequence[Problem]) -> frozenset[str]:
        """Ids of the prompts with a value, less those that the spec leaves out: unsolved, or with too little spread.

        Of a job that reads no values all prompts.
        """
        known = self._known.get(job_id)
        if not spec.reads_values:
            if known is None:
                known = KnownValues((0, 0), frozenset(problem.problem_id for problem in problems), 0.0)
                self._known[job_id] = known
            return known.prompt_ids
        began = time.monotonic()
        client = self.jobs.client
        stamp = client.hlen(redis_keys.run_values(job_id)), client.hlen(redis_keys.provisional_values(job_id))
        # A prompt that is refined counts in both and may become solved without moving either: looked at again, too.
        if known and (began < known.look_again_at or (known.stamp == stamp and not stamp[1])):
            return known.prompt_ids
        found = frozenset(_eligible(self._stored(job_id), spec))
        now = time.monotonic()
        self._known[job_id] = KnownValues(stamp, found, now + PAUSE_PER_SECOND * (now - began))
        return found

    def forget(self, running: Iterable[str]) -> None:
        """Drop what is remembered of jobs that run no more."""
        for ended in frozenset(tuple(self._known)) - set(running):
            self._known.pop(ended, None)

    def _stored(self, job_id: str) -> dict[str, list[PromptValue]]:
        """By prompt its value so far and its final one, as far as they are there."""
        found: dict[str, list[PromptValue]] = defaultdict(list)
        for key in (redis_keys.provisional_values(job_id), redis_keys.run_values(job_id)):
            for prompt_id, raw in self.jobs.client.hgetall(key).items():
                found[prompt_id.decode()].append(PromptValue.FromString(raw))
        return found


def _eligible(values: Mapping[str, Sequence[PromptValue]], spec: JobSpec) -> Iterable[str]:
    drops = spec.value is not None and spec.value.unsolved == "drop"
    least_spread = max((part.min_value_spread for part in spec.replay.mix if part.source == "online"), default=0.0)
    return (
        prompt_id
        for prompt_id, found in values.items()
        if any(not (drops and value.successes == 0) and _spread(value) >= least_spread for value in found)
    )


def _spread(value: PromptValue) -> float:
    return value_spread(value.successes / value.samples) if value.samples else 0.0
