"""What may be sampled of a run, mirrored in memory, how often each trajectory was sampled, and when that changes.

The indices in Redis grow at one end and lose what no window holds at the other, so each refresh reads only what is new.
The mirror belongs to one process and can be lost at any time: it is read again from the ledger.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import redis

from services.replay_buffer.windows import (
    Candidate,
    LiveCounts,
    LiveWindow,
    Memory,
    OfflineWindow,
    in_pairs,
    is_remembered,
    read_fact,
    rule_of,
)
from spo import redis_keys
from spo.algorithm.replay_sampling import (
    age_weights,
    aged_priority,
    draw_balanced,
    draw_pairs,
    draw_ranks,
    draw_weighted,
    value_spread,
)
from spo.errors import IntegrityError, NotFound
from spo.messaging.redis_client import RedisClient, RedisPipeline
from spo.observability import get_logger
from spo.spec import reward
from spo.spec.job_spec import JobSpec, SourceMix
from spo.spec.section import LIVE_SOURCES
from spo.v1.value_pb2 import PromptValue

log = get_logger("sampling_index")

BATCHES_PER_READ = 500
FORGOTTEN_AT_ONCE = 2000

FACTS_PER_READ = 5000
# Counter: the last insertion number of the followed run's ledger that this run has read.
FOLLOWED_POSITION = "followed"

# Pause per second that reading all values took: while they are estimated beside training, they change at every look.
PAUSE_PER_SECOND = 20.0
POLL_SECONDS = 0.1


class RunChanges:
    """The counters of the runs that somebody waits for, read in one thread that ends when nobody waits."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._waiting: Counter[str] = Counter()
        self._counters: dict[str, list[bytes | None]] = {}
        self._moves: Counter[str] = Counter()
        self._reader: threading.Thread | None = None

    @contextmanager
    def watched(self, run_id: str) -> Iterator[None]:
        """Read this run's counters while the body runs."""
        with self._changed:
            self._waiting[run_id] += 1
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="run-changes", daemon=True)
                self._reader.start()
        try:
            yield
        finally:
            with self._changed:
                self._waiting[run_id] -= 1
                if not self._waiting[run_id]:
                    del self._waiting[run_id], self._moves[run_id]
                    self._counters.pop(run_id, None)

    def moves(self, run_id: str) -> int:
        """How often the counters of a watched run were seen to change."""
        with self._changed:
            return self._moves[run_id]

    def wait_beyond(self, run_id: str, moves: int, timeout_seconds: float) -> None:
        """Return when a watched run's counters have changed more often than this, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._moves[run_id] != moves, timeout_seconds)

    def _read(self) -> None:
        while True:
            with self._changed:
                run_ids = list(self._waiting)
                if not run_ids:
                    self._reader = None
                    return
            try:
                with self._client.pipeline(transaction=False) as pipe:
                    for run_id in run_ids:
                        pipe.hmget(redis_keys.replay_counters(run_id), ["number", "drawn", "policy_version"])
                    self._note(dict(zip(run_ids, pipe.execute(), strict=True)))
            except redis.RedisError as error:
                # Those who wait ask again by themselves, and then meet the same error.
                log.debug("cannot read the counters of runs", reason=str(error)[:200])
            time.sleep(POLL_SECONDS)

    def _note(self, read: dict[str, list[bytes | None]]) -> None:
        with self._changed:
            for run_id, counters in read.items():
                if run_id in self._waiting and self._counters.get(run_id) != counters:
                    self._counters[run_id] = counters
                    self._moves[run_id] += 1
            self._changed.notify_all()


class SampleCounts:
    """The steps of each trajectory of a run, of batches that are on record; a refresh reads only what is new."""

    def __init__(self, client: RedisClient, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.batches_read = 0
        self._first = 1
        self._steps: dict[str, array[int]] = {}

    def refresh(self) -> None:
        """Read the batches that were recorded since the last refresh, by whichever process."""
        self._forget_with_redis()
        while True:
            steps = self.client.zrangebyscore(
                redis_keys.replay_batch_log(self.run_id),
                f"({self.batches_read}",
                "+inf",
                start=0,
                num=BATCHES_PER_READ,
                withscores=True,
            )
            if not steps and not self._is_ahead():
                return
            if not steps:
                self.batches_read, self._first = 0, 1
                self._steps.clear()
                continue
            batches = self.client.mget([redis_keys.replay_batch(self.run_id, int(step)) for step, _ in steps])
            for (step, _), ids in zip(steps, batches, strict=True):
                # One that is gone was forgotten since the log was read: nothing of it is served any more.
                for trajectory_id in ids.decode().split() if ids else ():
                    # What is learned again from memory is no turn of the window's.
                    if is_remembered(trajectory_id):
                        continue
                    self._steps.setdefault(trajectory_id, array("L")).append(int(step))
            self.batches_read = int(steps[-1][1])

    def _forget_with_redis(self) -> None:
        """Begin anew when most of what is held has been forgotten: memory follows what the log keeps."""
        oldest = self.client.zrange(redis_keys.replay_batch_log(self.run_id), 0, 0, withscores=True)
        first = int(oldest[0][1]) if oldest else self.batches_read + 1
        if first - self._first > FORGOTTEN_AT_ONCE:
            self._steps, self.batches_read, self._first = {}, first - 1, first

    def _is_ahead(self) -> bool:
        """Whether more was read than Redis has: it came back without the last batches, as after a failover."""
        newest = self.client.zrevrange(redis_keys.replay_batch_log(self.run_id), 0, 0, withscores=True)
        recorded, known = int(newest[0][1]) if newest else 0, self.batches_read
        if recorded < known:
            log.error(
                "Redis was set back: batches that it lost are not counted", run=self.run_id, lost=known - recorded
            )
        return recorded < known

    def steps_of(self, trajectory_id: str) -> Sequence[int]:
        """Steps in the order they were sampled; one twice where its batch holds the trajectory twice."""
        return self._steps.get(trajectory_id, ())

    def times(self, trajectory_id: str) -> int:
        """How often a trajectory was sampled."""
        return len(self.steps_of(trajectory_id))


class PromptFacts(NamedTuple):
    """Qhat_0 and its standard error in reward units; value_spread is sqrt(p (1 - p)), p the success rate of pi0."""

    qhat_0: float
    error: float
    value_spread: float


NO_VALUE = PromptFacts(0.0, 0.0, 0.0)


class SamplingIndex:
    """One run's candidates and counters; hold `lock` from `refresh` to the end of a draw."""

    def __init__(self, client: RedisClient, run_id: str, spec: JobSpec) -> None:
        self.client = client
        self.run_id = run_id
        self.spec = spec
        self.lock = threading.Lock()
        sources = [part.source for part in spec.replay.mix if part.share > 0]
        self._all_need_values = spec.reads_values and all(map(spec.reads_values_of, sources))
        self.counters: dict[str, int] = {}
        self._followed_version = 0
        self._clear()

    def refresh(self, sources: Sequence[str], step: int | None = None) -> list[str]:
        """Read what was inserted since the last refresh, of these sources; counters and values too. Raises NotFound.

        Returns the trajectory ids recorded for a step, [] when there are none yet: it takes no round trip of its own.
        """
        with self.client.pipeline(transaction=False) as pipe:
            pipe.exists(redis_keys.run_spec(self.run_id))
            pipe.zscore(redis_keys.replay_ids(self.run_id), self._newest[0])
            pipe.hgetall(redis_keys.replay_counters(self.run_id))
            pipe.hlen(redis_keys.run_values(self.run_id))
            pipe.hlen(redis_keys.provisional_values(self.run_id))
            # A run that follows none has its own version twice.
            followed = self.spec.rollout.follow or self.run_id
            pipe.hget(redis_keys.replay_counters(followed), "policy_version")
            # No step has the number -1.
            pipe.get(redis_keys.replay_batch(self.run_id, -1 if step is None else step))
            read = self._read_for(sources)
            for source in read:
                self._ask_new(pipe, source)
            exists, number, counters, values, provisional, followed_version, recorded, *news = pipe.execute()
        if not exists:
            raise NotFound(f"there is no run {self.run_id} any more: Redis was emptied", code="unknown_run")
        if self._newest[1] and number != self._newest[1]:
            # The ledger lets go of old ids itself: all of them once a run has ended.
            if int(counters.get(b"forgotten", 0)) < self._newest[1]:
                log.error(
                    "Redis was emptied or set back: what was acknowledged since must be made again",
                    run=self.run_id,
                    lost=f"trajectory {self._newest[0]}, number {self._newest[1]} of the ledger",
                    left=f"{int(counters.get(b'number', 0))} trajectories",
                )
            self._clear()
            return self.refresh(sources, step)
        self.counters = {name.decode(): int(count) for name, count in counters.items()}
        if followed_version:
            self._followed_version = int(followed_version)
        if (values != self._values_read or provisional) and time.monotonic() >= self._read_values_at:
            self._read_values()
        for source, entries in zip(read, news, strict=True):
            self._add(source, entries)
        if self.spec.replay.max_times_sampled is not None:
            self.sample_counts.refresh()
        return recorded.decode().split() if recorded else []

    def servable(self, rule: SourceMix) -> Sequence[Candidate]:
        """What a source's rule may draw now: in the window, with a value, fresh enough, not sampled too often."""
        oldest = self.oldest_version(rule) if rule.source in LIVE_SOURCES else 0
        # Most draws find what the one before found: only insertions, values, a new version or a batch change it.
        stamp = (self._read_to.get(rule.source, 0), self._values_changed, oldest, self.sample_counts.batches_read)
        known, found = self._filtered.get(rule, ((), []))
        if known != stamp:
            found = self._filter(rule, oldest)
            self._filtered[rule] = (stamp, found)
        return found

    def draw(self, rng: np.random.Generator, rule: SourceMix, count: int) -> list[Candidate]:
        """Draw `count` trajectories by a source's rule, in whole units; the generator's state decides."""
        if rule.source == "memory":
            return self.memory.draw(rng, count, self._remembered_with_value())
        candidates = self.servable(rule)
        units = count // self.unit_size(rule.source)
        if rule.sampler == "prioritised":
            ranks = draw_weighted(rng, [self._priority(candidate, rule) for candidate in candidates], units)
        elif rule.sampler == "per_prompt":
            ranks = draw_balanced(rng, [candidate.prompt_id for candidate in candidates], units)
        elif rule.sampler == "outcome_balanced":
            ranks = draw_balanced(rng, [candidate.correct for candidate in candidates], units)
        elif rule.sampler == "pairs":
            prompts, correct = zip(*((candidate.prompt_id, candidate.correct) for candidate in candidates), strict=True)
            ranks = draw_pairs(rng, prompts, correct, units // 2)
        elif rule.age_half_life is not None and rule.source in LIVE_SOURCES:
            newest = self.newest_version(rule.source)
            ages = [newest - candidate.version for candidate in candidates]
            ranks = draw_weighted(rng, age_weights(ages, rule.age_half_life), units)
        else:
            ranks = draw_ranks(rng, len(candidates), units)
        return [candidates[rank] for rank in ranks]

    def joining(self, rng: np.random.Generator, fresh: Iterable[Candidate], count: int) -> list[Candidate]:
        """What of memory's `count` places goes to fresh groups without contrast."""
        most = self.spec.replay.memory.contrast
        return self.memory.joining(rng, fresh, most, count // 2) if most else []

    def remembers(self) -> bool:
        """Whether memory holds an answer that may be drawn now."""
        prompts = self._remembered_with_value()
        return bool(self.memory.prompts() if prompts is None else prompts)

    def _remembered_with_value(self) -> list[str] | None:
        """The prompts of memory that have a value, where terms on memory read it; None for all."""
        if not self.spec.reads_values_of("memory"):
            return None
        return [prompt_id for prompt_id in self.memory.prompts() if prompt_id in self._values]

    def rule(self, source: str) -> SourceMix:
        """How the spec draws from a source."""
        return rule_of(self.spec, source)

    def newest_version(self, source: str) -> int:
        """The newest weight version of the run whose policy makes a live source's trajectories."""
        return self._followed_version if source == "shared" else self.counters.get("policy_version", 0)

    def oldest_version(self, rule: SourceMix) -> int:
        """The oldest weight version that may still be served by a live source's rule."""
        ages = (self.spec.replay.max_staleness, rule.max_age_versions)
        return self.newest_version(rule.source) - min(age for age in ages if age is not None)

    def live(self, rule: SourceMix) -> LiveCounts:
        """The counts of a live source, which the limiter weighs; what is left out for good counts as never inserted."""
        left_out = self.without_contrast(rule.source) if rule.contrast_only else 0
        return LiveCounts(
            inserted=self.counters.get(f"inserted:{rule.source}", 0) - left_out,
            sampled=self.counters.get(f"sampled:{rule.source}", 0),
            available=self.available(rule),
        )

    def without_contrast(self, source: str) -> int:
        """Trajectories of groups of a live source whose rewards are equal, those that have left Redis included."""
        return self._without_contrast.get(source, (0, 0))[1]

    def available(self, rule: SourceMix) -> int:
        """Trajectories of a source that may be drawn now."""
        if rule.source == "memory":
            return len(self.memory)
        return len(self.servable(rule)) * self.unit_size(rule.source)

    def window_start(self, source: str, resumed_version: int) -> int:
        """The insertion number below which no trajectory of a live source is ever served again.

        resumed_version: of the weights that a trainer may go back to, the oldest.
        """
        rule, window = self.rule(source), self._live[source]
        newest = self.newest_version(source)
        oldest = window.oldest(min(resumed_version, newest) - (newest - self.oldest_version(rule)))
        if oldest is None:
            return self._read_to.get(source, 0) + 1 if window.keeps_all else 0
        numbers = self.client.zmscore(redis_keys.replay_ids(self.run_id), list(oldest.trajectory_ids))
        return min((int(number) for number in numbers if number is not None), default=0)

    def read_to(self, source: str) -> int:
        """The last insertion number of a source that is mirrored here."""
        return self._read_to.get(source, 0)

    def groups_in_window(self, source: str) -> set[str]:
        """Ids of a live source's trajectories in groups of the window, whatever their insertion numbers are.

        Members that came apart, as after a crash between them, stand before other groups that end the window.
        """
        window = self._live[source]
        return window.members() if window.unit_size > 1 else set()

    def drop(self, gone: set[str]) -> None:
        """Draw no more what has left Redis."""
        for window in self._live.values():
            window.drop(gone)
        self.memory.drop(gone)
        self._filtered.clear()

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

    def require_values(self, prompt_ids: Iterable[str]) -> None:
        """Read the values again where one is not known yet: another process may have drawn by it."""
        if self.spec.reads_values and not all(prompt_id in self._values for prompt_id in prompt_ids):
            self._read_values()

    def value(self, prompt_id: str) -> PromptFacts:
        """The value of a prompt as it is known now; zeros where none is known and some source needs none.

        Raises IntegrityError when all sources need one.
        """
        if prompt_id not in self._values and self._all_need_values:
            raise IntegrityError(f"run {self.run_id} has no value for prompt {prompt_id}")
        return self._values.get(prompt_id, NO_VALUE)

    def _value_spread(self, prompt_id: str) -> float:
        """sqrt(p (1 - p)), p the success rate of pi0 on the prompt; 0 where the spec estimates no values."""
        return self._values[prompt_id].value_spread if prompt_id in self._values else 0.0

    def _priority(self, candidate: Candidate, rule: SourceMix) -> float:
        # What was made before training does not age.
        age = self.newest_version(rule.source) - candidate.version if rule.source in LIVE_SOURCES else 0
        if rule.priority == "value_spread":
            surprises = [self._value_spread(candidate.prompt_id)]
        else:
            qhat_0 = self.value(candidate.prompt_id).qhat_0
            surprises = [reward - qhat_0 for reward in candidate.rewards]
        return aged_priority(surprises, age, rule.priority_half_life)

    def _filter(self, rule: SourceMix, oldest: int) -> list[Candidate]:
        if rule.source in LIVE_SOURCES:
            found = self._live[rule.source].candidates(rule, oldest)
        else:
            found = self._offline[rule.source].candidates(rule) if rule.source in self._offline else []
        if self.spec.reads_values_of(rule.source):
            found = [candidate for candidate in found if candidate.prompt_id in self._values]
        if rule.min_value_spread:
            least = rule.min_value_spread
            found = [candidate for candidate in found if self._value_spread(candidate.prompt_id) >= least]
        if rule.contrast_only:
            found = [candidate for candidate in found if candidate.has_contrast]
        if rule.sampler == "pairs":
            found = in_pairs(found)
        limit = self.spec.replay.max_times_sampled
        if limit is not None and rule.source in LIVE_SOURCES:
            times = self.sample_counts.times
            found = [
                candidate for candidate in found if all(times(member) < limit for member in candidate.trajectory_ids)
            ]
        return found

    def _clear(self) -> None:
        self.counters = {}
        self._read_to: dict[str, int] = {}
        # Id and insertion number of the newest trajectory read: while it has that number, no other is gone either.
        self._newest: tuple[str, int] = ("", 0)
        self._values: dict[str, PromptFacts] = {}
        self._values_read = self._values_changed = 0
        self._payloads: dict[str, bytes] = {}
        self._read_values_at = 0.0
        self.sample_counts = SampleCounts(self.client, self.run_id)
        self._filtered: dict[SourceMix, tuple[tuple[int, ...], list[Candidate]]] = {}
        self._live: dict[str, LiveWindow] = {source: LiveWindow(self.spec, source) for source in LIVE_SOURCES}
        self.memory = Memory(self.spec)
        self._followed_version = 0
        self._offline: dict[str, OfflineWindow] = {}
        # Per live source: the insertion number up to which others had counted, and the trajectories so far.
        self._without_contrast: dict[str, tuple[int, int]] = {}

    def _read_for(self, sources: Sequence[str]) -> list[str]:
        """The sources to read, each once. Memory is made of others; it is read after them, since members move to it."""
        read = list(dict.fromkeys(sources))
        if not self.spec.replay.remembers or not {"online", "memory"} & set(read):
            return read
        others = ("online", *self.spec.replay.memory.also)
        return [*dict.fromkeys([*(source for source in read if source != "memory"), *others]), "memory"]

    def _ask_new(self, pipe: RedisPipeline, source: str) -> None:
        key = redis_keys.replay_source(self.run_id, source)
        live = self._live.get(source)
        if source == "memory":
            # What moved there before this mirror met it in the set of its source.
            pipe.zrangebyscore(key, f"({self._read_to.get('online', 0)}", "+inf", withscores=True)
        elif live and source not in self._read_to and not live.needs_all and not self.spec.replay.remembers:
            pipe.zrange(key, -self.spec.replay.online_capacity, -1, withscores=True)
        else:
            pipe.zrangebyscore(key, f"({self._read_to.get(source, 0)}", "+inf", withscores=True)

    def _add(self, source: str, entries: Sequence[tuple[bytes, float]]) -> None:
        for start in range(0, len(entries), FACTS_PER_READ):
            ids = [trajectory_id for trajectory_id, _ in entries[start : start + FACTS_PER_READ]]
            facts = self.client.hmget(redis_keys.replay_facts(self.run_id), ids)
            gone = [trajectory_id for trajectory_id, fact in zip(ids, facts, strict=True) if fact is None]
            # What has left the window since the source's set was read has left the set too.
            trimmed = self._absent(source, gone) if gone else set()
            numbers = [int(number) for _, number in entries[start : start + FACTS_PER_READ]]
            for trajectory_id, number, fact in zip(ids, numbers, facts, strict=True):
                if trajectory_id in trimmed:
                    continue
                if fact is None:
                    raise IntegrityError(f"run {self.run_id}: trajectory {trajectory_id.decode()} has no facts")
                self._mirror(source, *read_fact(trajectory_id.decode(), fact.decode()), number)
        if entries and source != "memory":
            self._read_to[source] = int(entries[-1][1])
            if self._read_to[source] > self._newest[1]:
                self._newest = (entries[-1][0].decode(), self._read_to[source])
        if source in LIVE_SOURCES and self._live[source].counts_equal:
            self._count_equal(source)

    def _mirror(self, source: str, candidate: Candidate, group: str, number: int) -> None:
        if self.spec.replay.remembers and source in ("memory", "online", *self.spec.replay.memory.also):
            self.memory.add(candidate, number)
        if source in LIVE_SOURCES:
            self._live[source].add(candidate, group, number)
        elif source != "memory":
            self._offline.setdefault(source, OfflineWindow(self.spec, source)).add(candidate)

    def _count_equal(self, source: str) -> None:
        """Count the groups without contrast that were read now, beside what had left Redis before."""
        numbers = self._live[source].take_equal()
        if source not in self._without_contrast:
            # After what is there was read: what leaves from now on is counted here already.
            key, names = redis_keys.replay_counters(self.run_id), ["equal_to", "equal"]
            before, count = (int(found or 0) for found in self.client.hmget(key, names))
            self._without_contrast[source] = before, count
        before, count = self._without_contrast[source]
        new = sum(number > before for number in numbers)
        self._without_contrast[source] = before, count + new * self._live[source].unit_size

    def _absent(self, source: str, trajectory_ids: list[bytes]) -> set[bytes]:
        numbers = self.client.zmscore(redis_keys.replay_source(self.run_id, source), trajectory_ids)
        return {trajectory_id for trajectory_id, number in zip(trajectory_ids, numbers, strict=True) if number is None}

    def _read_values(self) -> None:
        """Values so far, then final ones; only what changed is derived anew."""
        began = time.monotonic()
        so_far = self.client.hgetall(redis_keys.provisional_values(self.run_id))
        final = self.client.hgetall(redis_keys.run_values(self.run_id))
        stored = {prompt_id.decode(): payload for prompt_id, payload in (so_far | final).items()}
        if self.spec.value is not None:
            changed = {name: payload for name, payload in stored.items() if self._payloads.get(name) != payload}
            for prompt_id, payload in changed.items():
                self._values.pop(prompt_id, None)
                found = _facts_of(PromptValue.FromString(payload), self.spec)
                if found:
                    self._values[prompt_id] = found
            for prompt_id in self._payloads.keys() - stored.keys():
                self._values.pop(prompt_id, None)
            self._values_changed += bool(changed) or len(self._payloads) != len(stored)
        self._payloads = stored
        self._values_read = len(final)
        now = time.monotonic()
        self._read_values_at = now + PAUSE_PER_SECOND * (now - began)


def _facts_of(value: PromptValue, spec: JobSpec) -> PromptFacts | None:
    """None for prompts that are dropped, or have no samples: these are never served."""
    found = reward.qhat_0(value, spec)
    if found is None:
        return None
    return PromptFacts(found.q, found.standard_error, value_spread(value.successes / value.samples))
