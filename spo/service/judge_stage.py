"""The judges' stage of the pipeline: rollout groups in, verdicts and rewards out; test sets and known verdicts in
Redis.

Every pool of judges is one; it names the stream that it reads and who decides.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from blake3 import blake3

from spo import observability, redis_keys
from spo.errors import IntegrityError, NotFound, NotReady
from spo.messaging.redis_client import unless_away
from spo.messaging.run_specs import RunSpecs
from spo.messaging.streams.entries import Entry, decoded
from spo.messaging.streams.stage import Consumer, StageRunner
from spo.observability import get_logger
from spo.spec.job_spec import RewardSpec
from spo.spec.reward import needs_all_tests, reward_of
from spo.tasks.problem import has_verdict, program_of
from spo.v1.judge_service_pb2 import Priority
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.verdict_pb2 import TestSet, Verdict

_KEPT_BYTES = 64 << 20
# How often somebody who waits for verdicts looks whether the process stops.
_LOOK_SECONDS = 0.5
# Of each run, so that one call has who decides busy while the other waits for its slowest program or service.
CALLS_AT_ONCE = 2

log = get_logger("judge_stage")

# What Redis spends on a verdict besides its bytes: the key, its expiry, the place in the order. Measured.
OVERHEAD_BYTES = 450

# KEYS: 1 verdict, 2 order (list: `size:key` of the verdicts, the oldest first), 3 bytes of all in the list.
# ARGV: 1 verdict, 2 its size with overhead, 3 life in seconds, 4 the most bytes.
# A verdict that has expired is in the order until its turn comes, so the sum is never too low.
_PUT = """#!lua
if not redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3], 'NX') then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[2] .. ':' .. KEYS[1])
local held = redis.call('INCRBY', KEYS[3], ARGV[2])
while held > tonumber(ARGV[4]) do
  local oldest = redis.call('LPOP', KEYS[2])
  if not oldest then break end
  local size, key = string.match(oldest, '^(%d+):(.*)$')
  redis.call('UNLINK', key)
  held = redis.call('DECRBY', KEYS[3], size)
end
return 1
"""


class KeptBytes(Protocol):
    """Where test sets are kept by key: Redis, or memory in a process that serves one command."""

    def get(self, name: str, /) -> bytes | None: ...

    def set(self, name: str, value: bytes, /) -> object: ...


class StoredTestSets:
    """The uploaded test sets of a pool of judges; at most _KEPT_BYTES of them stay in memory.

    key: the store's key of a digest; require_usable raises InvalidInput on what the pool cannot judge by.
    """

    def __init__(self, store: KeptBytes, key: Callable[[str], str], require_usable: Callable[[TestSet], None]) -> None:
        self._store = store
        self._key = key
        self._require_usable = require_usable
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[int, TestSet]] = OrderedDict()
        self._kept_bytes = 0

    def upload(self, test_set: TestSet) -> str:
        """Store a test set; returns its digest. Raises InvalidInput."""
        self._require_usable(test_set)
        serialized = test_set.SerializeToString(deterministic=True)
        digest = blake3(serialized).hexdigest()
        self._store.set(self._key(digest), serialized)
        return digest

    def get(self, digest: str) -> TestSet:
        """The test set of a digest. Raises NotFound, IntegrityError or InvalidInput."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest][1]
        serialized = self._store.get(self._key(digest))
        if serialized is None:
            raise NotFound(f"no test set {digest!r}; upload it first", code="tests_not_found")
        if blake3(serialized).hexdigest() != digest:
            raise IntegrityError(f"test set {digest!r} does not match its digest")
        test_set = TestSet.FromString(serialized)
        self._require_usable(test_set)
        self._keep(digest, len(serialized), test_set)
        return test_set

    def _keep(self, digest: str, size_bytes: int, test_set: TestSet) -> None:
        with self._lock:
            if digest in self._kept or size_bytes > _KEPT_BYTES:
                return
            self._kept[digest] = (size_bytes, test_set)
            self._kept_bytes += size_bytes
            while self._kept_bytes > _KEPT_BYTES:
                _, (freed, _) = self._kept.popitem(last=False)
                self._kept_bytes -= freed


class VerdictStore(Protocol):
    """The commands of Redis that the cache needs."""

    def mget(self, keys: list[str], /) -> list[bytes | None]: ...

    def eval(self, script: str, numkeys: int, /, *keys_and_args: str | bytes | int) -> object: ...


class VerdictCache:
    """Verdicts by key, shared by a pool of judges; `max_bytes` holds for all of them together.

    order, held: the pool's keys of the verdicts in the order of their ages, and of the bytes that they take.
    """

    def __init__(self, store: VerdictStore, seconds: int, max_bytes: int, *, order: str, held: str) -> None:
        self._store = store
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._order = order
        self._held = held

    def find(self, keys: Mapping[str, str]) -> dict[str, Verdict]:
        """The known verdicts, by program. keys: program -> key."""
        if not keys or not self._seconds:
            return {}
        stored = self._store.mget(list(keys.values()))
        found = {}
        for program, serialized in zip(keys, stored, strict=True):
            if serialized is not None:
                found[program] = Verdict.FromString(serialized)
                found[program].cached = True
        observability.JUDGE_CACHE_HITS.inc(len(found))
        return found

    def put(self, key: str, verdict: Verdict) -> None:
        """Remember a verdict; one that cannot be written is judged again."""
        if not self._seconds:
            return
        serialized = verdict.SerializeToString()
        keys = key, self._order, self._held
        limits = len(serialized) + OVERHEAD_BYTES, self._seconds, self._max_bytes
        with unless_away("verdict not cached"):
            self._store.eval(_PUT, len(keys), *keys, serialized, *limits)


class AwaitedVerdicts(Protocol):
    """The verdicts on the programs of one request, once they are there."""

    def verdicts(self, timeout_seconds: float | None = None) -> list[Verdict]: ...

    def pending(self) -> Sequence[Future[Any]]: ...

    def cancel(self) -> None: ...


class NoVerdicts:
    """What awaits nothing, since an environment has decided about every response."""

    def verdicts(self, timeout_seconds: float | None = None) -> list[Verdict]:
        """None."""
        return []

    def pending(self) -> Sequence[Future[Any]]:
        """Nothing."""
        return []

    def cancel(self) -> None:
        """There is nothing to be cancelled."""


class Deciding(Protocol):
    """Who decides about programs: a scheduler with its queue."""

    def submit(
        self,
        programs: Sequence[str],
        language: str,
        tests_digest: str,
        priority: Priority.ValueType,
        *,
        want_details: bool = False,
        run_id: str = "",
    ) -> AwaitedVerdicts: ...


@dataclass(frozen=True)
class JudgedEntry:
    """A stream entry and the verdicts on its programs."""

    entry: Entry
    group: RolloutGroup
    batch: AwaitedVerdicts
    span: observability.Span


class JudgeStage:
    """Judges rollout groups from a stream; call it with a stop event. `service` is the hop's name.

    groups_at_once: of one run and call; a run whose programs are slow holds up no other. drain_seconds: how long after
    a stop the verdicts on groups that are held are waited for; then the groups are released.
    """

    def __init__(
        self, service: str, consumer: Consumer, scheduler: Deciding, groups_at_once: int, drain_seconds: float
    ) -> None:
        self.service = service
        self.consumer = consumer
        self.scheduler = scheduler
        self.groups_at_once = groups_at_once
        # So that its threads have ended when the process does.
        self.drain_seconds = max(0.0, drain_seconds - 2 * _LOOK_SECONDS)
        self.specs = RunSpecs(consumer.client)
        self._stop = threading.Event()
        self._stop_seen_at: float | None = None

    def __call__(self, stop: threading.Event) -> None:
        self._stop = stop
        StageRunner(self.consumer, self._judge, threads=CALLS_AT_ONCE, count=self.groups_at_once).run(stop)

    def _judge(self, entries: list[Entry]) -> None:
        """Judge the groups of these entries side by side; what goes wrong with one holds up no other."""
        judged: list[JudgedEntry] = []
        for entry in entries:
            with self.consumer.isolated(entry):
                judged.append(self._begin(entry))
        for one in judged:
            with self.consumer.isolated(one.entry):
                self._forward(one)

    def _begin(self, entry: Entry) -> JudgedEntry:
        group = decoded(RolloutGroup, entry)
        batch, request = self._submit(group), group.request
        span = entry.span("judge", run=request.run_id, group=request.group_id, programs=len(group.trajectories))
        return JudgedEntry(entry, group, batch, span)

    def _await(self, batch: AwaitedVerdicts) -> list[Verdict]:
        """The verdicts, however long they take. Raises what judging raised, NotReady where the process stops first."""
        while wait(batch.pending(), _LOOK_SECONDS).not_done:
            if not self._stop.is_set():
                continue
            self._stop_seen_at = self._stop_seen_at or time.monotonic()
            if time.monotonic() - self._stop_seen_at >= self.drain_seconds:
                batch.cancel()
                raise NotReady("this judge stops before the group is judged; another takes it")
        return batch.verdicts()

    def _forward(self, judged: JudgedEntry) -> None:
        self._set_verdicts(judged.group, judged.batch)
        payload = judged.group.SerializeToString()
        self.consumer.forward(judged.entry, redis_keys.verdicts(), payload, judged.span.header)
        judged.span.end()

    def _submit(self, group: RolloutGroup) -> AwaitedVerdicts:
        prompt = group.request.prompt
        programs = [program_of(trajectory, prompt.response_format, prompt.language) for trajectory in _undecided(group)]
        if not programs:
            return NoVerdicts()
        return self._decide(group, programs)

    def _decide(self, group: RolloutGroup, programs: Sequence[str]) -> AwaitedVerdicts:
        prompt = group.request.prompt
        return self.scheduler.submit(
            programs,
            prompt.language,
            prompt.tests_digest,
            Priority.PRIORITY_TRAINING,
            want_details=needs_all_tests(self._reward(group)),
            run_id=group.request.run_id,
        )

    def _set_verdicts(self, group: RolloutGroup, batch: AwaitedVerdicts) -> None:
        reward = self._reward(group)
        for trajectory, verdict in zip(_undecided(group), self._await(batch), strict=True):
            trajectory.verdict.CopyFrom(verdict)
        for trajectory in group.trajectories:
            # The counts are enough; a trajectory stays small.
            del trajectory.verdict.tests[:]
            trajectory.reward = reward_of(trajectory.verdict, reward)
            trajectory.hops.add(service=self.service, at_unix_ms=int(time.time() * 1000))

    def _reward(self, group: RolloutGroup) -> RewardSpec:
        return self.specs.of(group.request.run_id).tasks.reward


def _undecided(group: RolloutGroup) -> list[Trajectory]:
    """The trajectories about which no environment has decided."""
    return [trajectory for trajectory in group.trajectories if not has_verdict(trajectory)]
