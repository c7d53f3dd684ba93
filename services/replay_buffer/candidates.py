"""What may be sampled of a run, mirrored in memory.

The indices in Redis only grow, so each look reads only what is new. The mirror belongs to one process and can be lost
at any time; its truth is the ledger.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from services.replay_buffer.limiter import OnlineCounts
from services.replay_buffer.values import servable_values
from spo import redis_keys
from spo.errors import IntegrityError
from spo.job_spec import JobSpec
from spo.v1.value_pb2 import PromptValue

FACTS_PER_READ = 5000


class Candidate(NamedTuple):
    """What the choice of a trajectory depends on; version is the weight version of its first token."""

    trajectory_id: str
    prompt_id: str
    version: int
    correct: bool


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
            available=len(self.servable("online", correct_only)),
        )

    def describe(self, source: str) -> str:
        """A source's counts in words, for messages."""
        inserted, correct = (self.counters.get(f"{count}:{source}", 0) for count in ("inserted", "correct"))
        return f"{inserted} inserted, {correct} correct, {len(self.servable(source, False))} servable"

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
            found = [each for each in self._online if each.version >= oldest and (each.correct or not correct_only)]
        else:
            found = self._offline.get((source, correct_only), [])
        return [each for each in found if values is None or each.prompt_id in values]

    def _forget(self) -> None:
        self.counters = {}
        self._seen: dict[str, int] = {}
        self._values: dict[str, float] = {}
        self._values_read = 0
        self._filtered: dict[tuple[str, bool], tuple[tuple[int, ...], list[Candidate]]] = {}
        # The payloads of older ones stay in Redis: they are listed, and a repeated batch may name them.
        self._online: deque[Candidate] = deque(maxlen=self.spec.replay.online_capacity)
        self._offline: dict[tuple[str, bool], list[Candidate]] = {}
        self._kept: Counter[tuple[str, bool, str]] = Counter()

    def _ask_new(self, pipe: Any, source: str) -> None:
        key = redis_keys.replay_source(self.run_id, source)
        if source == "online" and source not in self._seen:
            pipe.zrange(key, -self.spec.replay.online_capacity, -1, withscores=True)
        else:
            pipe.zrangebyscore(key, f"({self._seen.get(source, 0)}", "+inf", withscores=True)

    def _take_in(self, source: str, entries: Sequence[tuple[bytes, float]]) -> None:
        for start in range(0, len(entries), FACTS_PER_READ):
            ids = [trajectory_id for trajectory_id, _ in entries[start : start + FACTS_PER_READ]]
            facts: Any = self.client.hmget(redis_keys.replay_facts(self.run_id), ids)
            for trajectory_id, fact in zip(ids, facts, strict=True):
                correct, version, prompt_id = fact.decode().split(":", 2)
                self._add(source, Candidate(trajectory_id.decode(), prompt_id, int(version), correct == "1"))
        if entries:
            self._seen[source] = int(entries[-1][1])

    def _add(self, source: str, candidate: Candidate) -> None:
        if source == "online":
            self._online.append(candidate)
            return
        for correct_only in (False, True) if candidate.correct else (False,):
            place = (source, correct_only, candidate.prompt_id)
            if self._kept[place] < self.spec.replay.offline_per_prompt:
                self._kept[place] += 1
                self._offline.setdefault((source, correct_only), []).append(candidate)

    def _read_values(self, count: int) -> None:
        if self.spec.value is not None:
            stored: Any = self.client.hvals(redis_keys.run_values(self.run_id))
            found = map(PromptValue.FromString, stored)
            self._values = servable_values(found, self.spec.algorithm, self.spec.value)
        self._values_read = count
