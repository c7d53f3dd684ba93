"""Verdicts that are known: by digest in Redis, at most so many bytes of them, the oldest let go of first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import redis

from spo.observability import metrics
from spo.observability.logs import get_logger
from spo.v1.verdict_pb2 import Verdict

log = get_logger("verdict_cache")

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
        metrics.JUDGE_CACHE_HITS.inc(len(found))
        return found

    def put(self, key: str, verdict: Verdict) -> None:
        """Remember a verdict; one that cannot be written is judged again."""
        if not self._seconds:
            return
        serialized = verdict.SerializeToString()
        keys = key, self._order, self._held
        limits = len(serialized) + OVERHEAD_BYTES, self._seconds, self._max_bytes
        try:
            self._store.eval(_PUT, len(keys), *keys, serialized, *limits)
        except redis.RedisError as error:
            log.warning("verdict not cached", reason=str(error))
