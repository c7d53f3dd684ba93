"""How much of serving a tenant may have: completions under way at once, and tokens in a minute."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from spo.errors import ResourceExhausted


class ServingQuota:
    """Counted in this process, since one orchestrator leads. Safe from several threads."""

    def __init__(self, streams: int, streams_per_tenant: int, tokens_per_minute: int) -> None:
        self._streams = streams
        self._streams_per_tenant = streams_per_tenant
        self._tokens = RateLimitItemPerMinute(tokens_per_minute) if tokens_per_minute else None
        self._limiter = FixedWindowRateLimiter(MemoryStorage())
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def completion(self, tenant: str) -> Iterator[None]:
        """Hold a place while the body runs. Raises ResourceExhausted (code "rate_limited") where none is left."""
        if self._tokens and not self._limiter.test(self._tokens, tenant):
            raise ResourceExhausted("the tokens of this minute are used up; try again", code="rate_limited")
        with self._lock:
            if self._under_way[tenant] >= self._streams_per_tenant or self._under_way.total() >= self._streams:
                message = f"{self._under_way[tenant]} completions of yours are under way; try again"
                raise ResourceExhausted(message, code="rate_limited")
            self._under_way[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[tenant] -= 1
                if not self._under_way[tenant]:
                    del self._under_way[tenant]

    def spend(self, tenant: str, tokens: int) -> None:
        """Count tokens that were read or written."""
        if self._tokens and tokens:
            self._limiter.hit(self._tokens, tenant, cost=tokens)
