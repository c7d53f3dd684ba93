"""What one process of a machine does at a time: the others wait for the lock of a file, which ends with its holder."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from spo.errors import NotReady

POLL_SECONDS = 0.05


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Holds the lock of a file, which is made. Raises NotReady where another process has held it for `seconds`."""
    deadline = time.monotonic() + seconds
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NotReady(f"another process has held {path} for {seconds:g} s") from None
                time.sleep(POLL_SECONDS)
        yield
