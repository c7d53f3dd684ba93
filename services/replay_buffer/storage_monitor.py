"""Whether Redis can store more: nothing is evicted, so dispatching must stop before a full server refuses writes."""

from __future__ import annotations

import threading
import time

from spo.messaging.redis_client import RedisClient
from spo.observability import metrics
from spo.observability.logs import get_logger

log = get_logger("storage-monitor")

CHECK_SECONDS = 1.0
LOG_SECONDS = 30.0


class StorageMonitor:
    """Checks the server every check_seconds at most; `stop_share` leaves room for what is already dispatched."""

    def __init__(self, client: RedisClient, stop_share: float, check_seconds: float = CHECK_SECONDS) -> None:
        self.client = client
        self.stop_share = stop_share
        self.check_seconds = check_seconds
        self._lock = threading.Lock()
        self._found = ""
        self._check_next = 0.0
        self._log_next = 0.0

    def pressure(self) -> str:
        """Why no more prompts should be dispatched, '' while there is room."""
        with self._lock:
            if time.monotonic() >= self._check_next:
                self._found = self._check()
                self._check_next = time.monotonic() + self.check_seconds
                if self._found and time.monotonic() >= self._log_next:
                    self._log_next = time.monotonic() + LOG_SECONDS
                    log.error("dispatching is stopped", reason=self._found)
            return self._found

    def _check(self) -> str:
        found = self.client.info("memory", "persistence")
        used, limit = found["used_memory"], found["maxmemory"]
        share = used / limit if limit else 0.0
        metrics.REPLAY_MEMORY_SHARE.set(share)
        if found.get("aof_last_write_status", "ok") != "ok":
            return "Redis cannot write its append-only file: is its disk full?"
        if share >= self.stop_share:
            return f"Redis holds {used:,} of at most {limit:,} bytes (maxmemory) and evicts nothing: raise it"
        return ""
