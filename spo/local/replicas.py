"""Replicas of a local platform: started and drained while it runs, as PUT /v1/scale asks."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis

from spo import redis_keys
from spo.local.child import Child
from spo.messaging.connection import open_client
from spo.observability.logs import get_logger

log = get_logger("replicas")

LOOK_SECONDS = 1.0


class LocalReplicas:
    """Changes the launcher's list of children; call `follow` from the thread that starts them.

    The first replica of a pool is where others call it. Further ones take work from the streams alone, so nobody needs
    to be told their address.
    """

    def __init__(
        self, children: list[Child], build: Callable[[str, str], Child], redis_url: str, drain_seconds: float
    ) -> None:
        self._children = children
        self._build = build
        self._client = open_client(redis_url, operation_seconds=1, connect_seconds=1)
        self._drain_seconds = drain_seconds
        self._deadlines: dict[str, float] = {}
        self._next_look = 0.0
        self.leaving: list[Child] = []

    def follow(self) -> None:
        """Start and drain replicas until each pool has as many as are desired."""
        for child in list(self.leaving):
            if not child.is_running() or time.monotonic() > self._deadlines[child.name]:
                child.stop_by(time.monotonic())
                self.leaving.remove(child)
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        for pool, wanted in self._desired().items():
            members = [child for child in self._children if child.name == pool or child.name.startswith(f"{pool}-")]
            taken = {child.name for child in [*members, *self.leaving]}
            free = (f"{pool}-{number}" for number in range(2, len(taken) + wanted + 2))
            for name in [name for name in free if name not in taken][: max(0, wanted - len(members))]:
                replica = self._build(name, pool)
                self._children.append(replica)
                replica.start()
                log.info("replica started", replica=name, pid=replica.pid)
            for child in members[max(1, wanted) :]:
                self._children.remove(child)
                child.ask_to_stop()
                self.leaving.append(child)
                self._deadlines[child.name] = time.monotonic() + self._drain_seconds
                log.info("replica drains", replica=child.name, pid=child.pid)

    def _desired(self) -> dict[str, int]:
        try:
            stored = self._client.hgetall(redis_keys.scale())
        except redis.RedisError:
            return {}
        return {pool.decode(): int(count) for pool, count in stored.items()}
