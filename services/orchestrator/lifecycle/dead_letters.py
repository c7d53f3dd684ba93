"""Entries that were given up on: how many of a job, told as events, and when there are too many to go on."""

from __future__ import annotations

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Commit, Precondition
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.pipeline import SHARED_STREAMS
from spo import redis_keys
from spo.errors import PreconditionFailed
from spo.messaging.streams.dead_letters import DeadLetterCount, counts_of

MIN_DEAD_LETTERS = 3


def streams_of(run_id: str) -> dict[str, str]:
    """The streams on which entries of the run travel, by their names in messages."""
    return {"prompts": redis_keys.prompts(run_id)} | {name: stream for name, (stream, _) in SHARED_STREAMS.items()}


class DeadLetterWatch:
    """Reads the counts of jobs, each kept by whoever gives an entry up; no payload is ever read for it."""

    def __init__(self, jobs: JobStore, max_share: float) -> None:
        self.jobs = jobs
        self.max_share = max_share

    def given_up(self, job_id: str, name: str, total: int) -> int:
        """Entries of the job that were given up on at a stream.

        Raises PreconditionFailed (code "too_many_dead_letters") when they are more than the allowed share of total.
        """
        return self._checked(job_id, total, name)[name]

    def check_groups(self, job_id: str, dispatched: int) -> None:
        """Raises PreconditionFailed (code "too_many_dead_letters") when too many of a run's groups are lost."""
        self._checked(job_id, dispatched, "prompts", "rollouts", "verifier_rollouts", "verdicts")

    def _checked(self, job_id: str, total: int, *names: str) -> dict[str, int]:
        counts = counts_of(self.jobs.client, job_id)
        streams = streams_of(job_id)
        found = {name: counts.get(streams[name], DeadLetterCount(streams[name], 0, "")) for name in names}
        for name, letters in found.items():
            self._announce(job_id, name, letters)
        for name, letters in found.items():
            if letters.count >= MIN_DEAD_LETTERS and letters.count > self.max_share * total:
                raise PreconditionFailed(
                    f"{letters.count} of {total} entries of the stream {name} were given up on; "
                    f"the last one: {letters.last_reason}",
                    code="too_many_dead_letters",
                )
        return {name: letters.count for name, letters in found.items()}

    def _announce(self, job_id: str, name: str, letters: DeadLetterCount) -> None:
        """Add an event when there are more than the job's events tell of; those that were redriven are told again."""
        key = own_keys.job_dead_letters_told(job_id)
        told = self.jobs.client.hget(key, name)
        if letters.count == int(told or 0):
            return
        write = ("HSET", key, name, letters.count)
        if letters.count > int(told or 0):
            body = {"stream": name, "count": letters.count, "reason": letters.last_reason}
            guard = Precondition(key, name, told.decode() if told else "")
            self.jobs.once(job_id, guard, "dead_letters", body, [write], durable=False)
        else:
            self.jobs.commit(Commit(job_id, writes=[write]), durable=False)
