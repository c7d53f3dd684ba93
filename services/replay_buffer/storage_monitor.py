"""Whether Redis can take more: nothing is evicted, so a full server must stop the feeder before it refuses writes."""

from __future__ import annotations

import threading
import time

from spo.messaging.redis_client import RedisClient
from spo.observability import metrics
from spo.observability.logs import get_logger

log = get_logger("storage-watch")

LOOK_SECONDS = 1.0
SAY_SECONDS = 30.0


class StorageMonitor:
    """Looks at the server at most once a second; what is on the belt already still fits above `stop_share`."""

    def __init__(self, client: RedisClient, stop_share: float) -> None:
        self.client = client
        self.stop_share = stop_share
        self._lock = threading.Lock()
        self._found = ""
        self._look_next = 0.0
        self._say_next = 0.0

    def pressure(self) -> str:
        """Why nothing more should be fed, '' while there is room."""
        with self._lock:
            if time.monotonic() >= self._look_next:
                self._found = self._look()
                self._look_next = time.monotonic() + LOOK_SECONDS
                if self._found and time.monotonic() >= self._say_next:
                    self._say_next = time.monotonic() + SAY_SECONDS
                    log.error("the feeder is stopped", reason=self._found)
            return self._found

    def _look(self) -> str:
        found = self.client.info("memory", "persistence")
        used, limit = found["used_memory"], found["maxmemory"]
        share = used / limit if limit else 0.0
        metrics.REPLAY_MEMORY_SHARE.set(share)
        if found.get("aof_last_write_status", "ok") != "ok":
            return "Redis cannot write its append-only file: is its disk full?"
        if share >= self.stop_share:
            return f"Redis holds {used:,} of at most {limit:,} bytes (maxmemory) and evicts nothing: raise it"
        return ""
