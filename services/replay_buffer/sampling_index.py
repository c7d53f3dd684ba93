"""What may be sampled of a run, mirrored in memory.

The indices in Redis only grow, so each look reads only what is new. The mirror belongs to one process and can be lost
at any time; its truth is the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import redis

from services.replay_buffer.batch_log import SampleCounts
from services.replay_buffer.limiter import LiveCounts
from services.replay_buffer.prompt_facts import PromptFacts, facts_of_prompts
from services.replay_buffer.windows import Candidate, LiveWindow, OfflineWindow, read_fact, rule_of
from spo import redis_keys
from spo.errors import IntegrityError, NotFound
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec, SourceMix
from spo.spec.section import LIVE_SOURCES
from spo.v1.value_pb2 import PromptValue

log = get_logger("sampling_index")

FACTS_PER_READ = 5000


class SamplingIndex:
    """One run's candidates; hold `lock` from `refresh` to the end of a draw."""

    def __init__(self, client: redis.Redis, run_id: str, spec: JobSpec) -> None:
        self.client = client
        self.run_id = run_id
        self.spec = spec
        self.lock = threading.Lock()
        self.counters: dict[str, int] = {}
        self._followed_version = 0
        self._forget()

    def refresh(self, sources: Sequence[str]) -> None:
        """Take in what has come since the last look, of these sources."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.exists(redis_keys.run_spec(self.run_id))
            pipe.zscore(redis_keys.replay_ids(self.run_id), self._newest[0])
            pipe.hgetall(redis_keys.replay_counters(self.run_id))
            pipe.hlen(redis_keys.run_values(self.run_id))
            # A run that follows none has its own version twice.
            followed = self.spec.rollout.follow or self.run_id
            pipe.hget(redis_keys.replay_counters(followed), "policy_version")
            for source in sources:
                self._ask_new(pipe, source)
            exists, number, counters, values, followed_version, *news = pipe.execute()
        if not exists:
            raise NotFound(f"there is no run {self.run_id} any more: Redis was emptied", code="unknown_run")
        if self._newest[1] and number != self._newest[1]:
            log.error(
                "Redis was emptied or set back: what was acknowledged since must be made again",
                run=self.run_id,
                lost=f"trajectory {self._newest[0]}, number {self._newest[1]} of the ledger",
                left=f"{int(counters.get(b'number', 0))} trajectories",
            )
            self._forget()
            return self.refresh(sources)
        self.counters = {name.decode(): int(count) for name, count in counters.items()}
        if followed_version:
            self._followed_version = int(followed_version)
        if values != self._values_read:
            self._read_values(values)
        for source, entries in zip(sources, news, strict=True):
            self._take_in(source, entries)
        if self.spec.replay.max_times_sampled is not None:
            self.counts.refresh()
        return None

    def servable(self, rule: SourceMix) -> Sequence[Candidate]:
        """What may be drawn now by a source's rule: with a value, fresh enough, not drawn too often, in the window."""
        oldest = self.oldest_version(rule) if rule.source in LIVE_SOURCES else 0
        # Most draws find what the one before found: only news, values, a higher version or a count change it.
        stamp = (self._seen.get(rule.source, 0), self._values_read, oldest, self.counts.draws_read)
        known, found = self._filtered.get(rule, ((), []))
        if known != stamp:
            found = self._filter(rule, oldest)
            self._filtered[rule] = (stamp, found)
        return found

    def rule(self, source: str) -> SourceMix:
        """How the spec draws from a source."""
        return rule_of(self.spec, source)

    def newest_version(self, source: str) -> int:
        """The newest weight version of the run that samples a live source."""
        return self._followed_version if source == "shared" else self.counters.get("policy_version", 0)

    def oldest_version(self, rule: SourceMix) -> int:
        """The oldest weight version that may still be served by a live source's rule."""
        ages = (self.spec.replay.max_staleness, rule.max_age_versions)
        return self.newest_version(rule.source) - min(age for age in ages if age is not None)

    def live(self, rule: SourceMix) -> LiveCounts:
        """The counts of a live source, which the limiter weighs."""
        return LiveCounts(
            inserted=self.counters.get(f"inserted:{rule.source}", 0),
            sampled=self.counters.get(f"sampled:{rule.source}", 0),
            available=self.available(rule),
        )

    def available(self, rule: SourceMix) -> int:
        """Trajectories of a source that may be drawn now."""
        return len(self.servable(rule)) * self.unit_size(rule.source)

    def unit_size(self, source: str) -> int:
        """Trajectories of a source that are drawn together."""
        return self._live[source].unit_size if source in LIVE_SOURCES else 1

    def describe(self, rule: SourceMix) -> str:
        """A source's counts in words, for messages."""
        inserted, correct = (self.counters.get(f"{count}:{rule.source}", 0) for count in ("inserted", "correct"))
        said = f"{inserted} inserted, {correct} correct, {self.available(rule)} servable"
        if self.unit_size(rule.source) == 1:
            return said
        incomplete = self._live[rule.source].incomplete()
        return f"{said} in groups of {self.unit_size(rule.source)}, {incomplete} in incomplete groups"

    def qhat_0(self, prompt_id: str) -> float:
        """Qhat_0 in reward units, 0 where the spec estimates no values. Raises IntegrityError when it has no value."""
        if self.spec.value is None:
            return 0.0
        if prompt_id not in self._values:
            raise IntegrityError(f"run {self.run_id} has no value for prompt {prompt_id}")
        return self._values[prompt_id].qhat_0

    def value_spread(self, prompt_id: str) -> float:
        """sqrt(p (1 - p)), p the success rate of pi0 on the prompt; 0 where the spec estimates no values."""
        return self._values[prompt_id].value_spread if prompt_id in self._values else 0.0

    def _filter(self, rule: SourceMix, oldest: int) -> list[Candidate]:
        if rule.source in LIVE_SOURCES:
            found = self._live[rule.source].index(rule, oldest)
        else:
            found = self._offline[rule.source].index(rule) if rule.source in self._offline else []
        if self.spec.value is not None:
            found = [each for each in found if each.prompt_id in self._values]
        if rule.min_value_spread:
            found = [each for each in found if self.value_spread(each.prompt_id) >= rule.min_value_spread]
        limit = self.spec.replay.max_times_sampled
        if limit is not None and rule.source in LIVE_SOURCES:
            found = [each for each in found if all(self.counts.times(member) < limit for member in each.trajectory_ids)]
        return found

    def _forget(self) -> None:
        self.counters = {}
        self._seen: dict[str, int] = {}
        # Id and insertion number of the newest trajectory seen: while it has that number, no other is gone either.
        self._newest: tuple[str, int] = ("", 0)
        self._values: dict[str, PromptFacts] = {}
        self._values_read = 0
        self.counts = SampleCounts(self.client, self.run_id)
        self._filtered: dict[SourceMix, tuple[tuple[int, ...], list[Candidate]]] = {}
        # The payloads of older ones stay in Redis: they are listed, and a repeated batch may name them.
        self._live: dict[str, LiveWindow] = {source: LiveWindow(self.spec, source) for source in LIVE_SOURCES}
        self._followed_version = 0
        self._offline: dict[str, OfflineWindow] = {}

    def _ask_new(self, pipe: Any, source: str) -> None:
        key = redis_keys.replay_source(self.run_id, source)
        live = self._live.get(source)
        if live and source not in self._seen and not live.needs_all:
            pipe.zrange(key, -self.spec.replay.online_capacity, -1, withscores=True)
        else:
            pipe.zrangebyscore(key, f"({self._seen.get(source, 0)}", "+inf", withscores=True)

    def _take_in(self, source: str, entries: Sequence[tuple[bytes, float]]) -> None:
        for start in range(0, len(entries), FACTS_PER_READ):
            ids = [trajectory_id for trajectory_id, _ in entries[start : start + FACTS_PER_READ]]
            facts: Any = self.client.hmget(redis_keys.replay_facts(self.run_id), ids)
            for trajectory_id, fact in zip(ids, facts, strict=True):
                candidate, group = read_fact(trajectory_id.decode(), fact.decode())
                if source in LIVE_SOURCES:
                    self._live[source].add(candidate, group)
                else:
                    self._offline.setdefault(source, OfflineWindow(self.spec, source)).add(candidate)
        if entries:
            self._seen[source] = int(entries[-1][1])
            if self._seen[source] > self._newest[1]:
                self._newest = (entries[-1][0].decode(), self._seen[source])

    def _read_values(self, count: int) -> None:
        if self.spec.value is not None:
            stored: Any = self.client.hvals(redis_keys.run_values(self.run_id))
            found = map(PromptValue.FromString, stored)
            self._values = facts_of_prompts(found, self.spec)
        self._values_read = count
