"""The one way in which tests and benchmarks wait for something that another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(holds: Callable[[], Found], what: str, seconds: float = 60, poll_seconds: float = 0.02) -> Found:
    """Poll until `holds` returns something true, and return that. Raises TimeoutError saying what did not happen."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(poll_seconds)
    return found
