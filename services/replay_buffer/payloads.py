"""Serialized trajectories: chunks that one script call may carry, and a memory of those that were seen last."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from spo import redis_keys

# A script holds up every other client while it runs.
CHUNK_TRAJECTORIES = 256
CHUNK_BYTES = 2 << 20


def chunks(payloads: Sequence[bytes]) -> Iterator[slice]:
    """Consecutive slices, each of at most so many payloads and, unless a single one is larger, bytes."""
    start = held = 0
    for at, payload in enumerate(payloads):
        if at > start and (at - start >= CHUNK_TRAJECTORIES or held + len(payload) > CHUNK_BYTES):
            yield slice(start, at)
            start, held = at, 0
        held += len(payload)
    if payloads:
        yield slice(start, len(payloads))


class Payloads:
    """Payloads by id; they never change, so what is in memory need not be asked of Redis again."""

    def __init__(self, client: redis.Redis, memory_bytes: int) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._memory_bytes = memory_bytes
        self._held_bytes = 0
        self._seen: dict[tuple[str, str], bytes] = {}

    def remember(self, run_id: str, trajectory_id: str, payload: bytes) -> None:
        """Keep a payload in memory; the first to come gives way, as the newest experience is what is drawn."""
        with self._lock:
            if self._seen.setdefault((run_id, trajectory_id), payload) is payload:
                self._held_bytes += len(payload)
            while self._held_bytes > self._memory_bytes:
                self._held_bytes -= len(self._seen.pop(next(iter(self._seen))))

    def get(self, run_id: str, trajectory_ids: Sequence[str]) -> list[bytes | None]:
        """Payloads by id, None where absent."""
        found = {each: self._seen.get((run_id, each)) for each in trajectory_ids}
        missing = [each for each, payload in found.items() if payload is None]
        if missing:
            keys = [redis_keys.replay_trajectory(run_id, each) for each in missing]
            stored: Any = self.client.mget(keys)
            for each, payload in zip(missing, stored, strict=True):
                if payload is not None:
                    found[each] = payload
                    self.remember(run_id, each, payload)
        return [found[each] for each in trajectory_ids]
