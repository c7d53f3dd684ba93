"""What may be sampled of a run, mirrored in memory.

The indices in Redis only grow, so each look reads only what is new. The mirror belongs to one process and can be lost
at any time; its truth is the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import redis

from services.replay_buffer.limiter import OnlineCounts
from services.replay_buffer.values import servable_values
from services.replay_buffer.windows import Candidate, OfflineWindow, OnlineWindow, read_fact
from spo import redis_keys
from spo.errors import IntegrityError
from spo.job_spec import JobSpec
from spo.v1.value_pb2 import PromptValue

FACTS_PER_READ = 5000


class Candidates:
    """One run's candidates; hold `lock` from `refresh` to the end of a draw."""

    def __init__(self, client: redis.Redis, run_id: str, spec: JobSpec) -> None:
        self.client = client
        self.run_id = run_id
        self.spec = spec
        self.lock = threading.Lock()
        self.counters: dict[str, int] = {}
        self._forget()

    def refresh(self, sources: Sequence[str]) -> None:
        """Take in what has come since the last look, of these sources."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hgetall(redis_keys.replay_counters(self.run_id))
            pipe.hlen(redis_keys.run_values(self.run_id))
            for source in sources:
                self._ask_new(pipe, source)
            counters, values, *news = pipe.execute()
        if int(counters.get(b"number", 0)) < max(self._seen.values(), default=0):
            # Redis was emptied under us: nothing that is remembered is there any more.
            self._forget()
            return self.refresh(sources)
        self.counters = {name.decode(): int(count) for name, count in counters.items()}
        if values != self._values_read:
            self._read_values(values)
        for source, entries in zip(sources, news, strict=True):
            self._take_in(source, entries)
        return None

    def servable(self, source: str, correct_only: bool) -> Sequence[Candidate]:
        """What may be drawn of a source now: with a value, not too stale, correct if wanted, capped per prompt."""
        oldest = self.counters.get("policy_version", 0) - self.spec.replay.max_staleness if source == "online" else 0
        # Most draws find what the one before found: only news, values or a higher version change it.
        stamp = (self._seen.get(source, 0), self._values_read, oldest)
        known, found = self._filtered.get((source, correct_only), ((), []))
        if known != stamp:
            found = self._filter(source, correct_only, oldest)
            self._filtered[source, correct_only] = (stamp, found)
        return found

    def online(self, correct_only: bool) -> OnlineCounts:
        """The counts that the limiter weighs."""
        return OnlineCounts(
            inserted=self.counters.get("inserted:online", 0),
            sampled=self.counters.get("sampled:online", 0),
            available=self.available("online", correct_only),
        )

    def available(self, source: str, correct_only: bool) -> int:
        """Trajectories of a source that may be drawn now."""
        return len(self.servable(source, correct_only)) * self.unit_size(source)

    def unit_size(self, source: str) -> int:
        """Trajectories of a source that are drawn together."""
        return self._online.unit_size if source == "online" else 1

    def describe(self, source: str) -> str:
        """A source's counts in words, for messages."""
        inserted, correct = (self.counters.get(f"{count}:{source}", 0) for count in ("inserted", "correct"))
        said = f"{inserted} inserted, {correct} correct, {self.available(source, False)} servable"
        if self.unit_size(source) == 1:
            return said
        return f"{said} in groups of {self.unit_size(source)}, {self._online.incomplete()} in incomplete groups"

    def qhat_0(self, prompt_id: str) -> float:
        """Qhat_0 in reward units, 0 where the spec estimates no values. Raises IntegrityError when it has no value."""
        if self.spec.value is None:
            return 0.0
        if prompt_id not in self._values:
            raise IntegrityError(f"run {self.run_id} has no value for prompt {prompt_id}")
        return self._values[prompt_id]

    def _filter(self, source: str, correct_only: bool, oldest: int) -> list[Candidate]:
        values = self._values if self.spec.value else None
        if source == "online":
            found = self._online.candidates(correct_only, oldest)
        else:
            found = self._offline[source].candidates(correct_only) if source in self._offline else []
        return [each for each in found if values is None or each.prompt_id in values]

    def _forget(self) -> None:
        self.counters = {}
        self._seen: dict[str, int] = {}
        self._values: dict[str, float] = {}
        self._values_read = 0
        self._filtered: dict[tuple[str, bool], tuple[tuple[int, ...], list[Candidate]]] = {}
        # The payloads of older ones stay in Redis: they are listed, and a repeated batch may name them.
        self._online = OnlineWindow(self.spec)
        self._offline: dict[str, OfflineWindow] = {}

    def _ask_new(self, pipe: Any, source: str) -> None:
        key = redis_keys.replay_source(self.run_id, source)
        # Which groups are whole is only known of those that were read from their first member on.
        if source == "online" and source not in self._seen and self.spec.replay.unit == "trajectory":
            pipe.zrange(key, -self.spec.replay.online_capacity, -1, withscores=True)
        else:
            pipe.zrangebyscore(key, f"({self._seen.get(source, 0)}", "+inf", withscores=True)

    def _take_in(self, source: str, entries: Sequence[tuple[bytes, float]]) -> None:
        for start in range(0, len(entries), FACTS_PER_READ):
            ids = [trajectory_id for trajectory_id, _ in entries[start : start + FACTS_PER_READ]]
            facts: Any = self.client.hmget(redis_keys.replay_facts(self.run_id), ids)
            for trajectory_id, fact in zip(ids, facts, strict=True):
                candidate, group = read_fact(trajectory_id.decode(), fact.decode())
                if source == "online":
                    self._online.add(candidate, group)
                else:
                    self._offline.setdefault(source, OfflineWindow(self.spec)).add(candidate)
        if entries:
            self._seen[source] = int(entries[-1][1])

    def _read_values(self, count: int) -> None:
        if self.spec.value is not None:
            stored: Any = self.client.hvals(redis_keys.run_values(self.run_id))
            found = map(PromptValue.FromString, stored)
            self._values = servable_values(found, self.spec.algorithm, self.spec.value)
        self._values_read = count
