"""One large file in parts, several at a time, that goes on where an earlier try, or an earlier process, stopped.

Beside the file lies a journal of the parts that are there; both are gone or whole when the caller's digest has been
checked. One downloader per file: who calls holds a lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from obstore.exceptions import BaseError, NotFoundError

from spo.errors import IntegrityError
from spo.observability.logs import get_logger

log = get_logger("download")

PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
TRIES = 5
PAUSE_SECONDS = 0.5
_NUMBER_BYTES = 4

# (start, length) -> bytes
Read = Callable[[int, int], bytes]


def download(read: Read, size_bytes: int, destination: Path) -> None:
    """Fill `destination` by ranged reads; a part that fails is tried again, then its error is raised."""
    part, journal = destination.with_name(destination.name + ".part"), destination.with_name(destination.name + ".got")
    there = _numbers(journal) if part.is_file() and part.stat().st_size == size_bytes else set()
    missing = [number for number in range(-(-size_bytes // PART_BYTES)) if number not in there]
    if there:
        log.info("a download goes on", file=destination.name, parts=len(missing), of=len(missing) + len(there))
    else:
        journal.unlink(missing_ok=True)
    with part.open("r+b" if there else "w+b") as file, journal.open("ab", buffering=0) as got:
        file.truncate(size_bytes)

        def fetch(number: int) -> None:
            start = number * PART_BYTES
            content = _persistently(read, start, min(PART_BYTES, size_bytes - start))
            os.pwrite(file.fileno(), content, start)
            got.write(number.to_bytes(_NUMBER_BYTES, "little"))

        with ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            # Read to the end: a part's error is raised here, after the others have been tried.
            list(threads.map(fetch, missing))
    part.replace(destination)
    journal.unlink()


def _persistently(read: Read, start: int, length: int) -> bytes:
    for left in reversed(range(TRIES)):
        try:
            content = read(start, length)
            if len(content) == length:
                return content
            problem: Exception = IntegrityError(f"{len(content)} bytes at {start} instead of {length}")
        except NotFoundError:
            raise
        except (BaseError, OSError) as error:
            problem = error
        if not left:
            raise problem
        time.sleep(PAUSE_SECONDS)
    raise AssertionError("unreachable")


def _numbers(journal: Path) -> set[int]:
    if not journal.is_file():
        return set()
    raw = journal.read_bytes()
    whole = len(raw) - len(raw) % _NUMBER_BYTES
    return {int.from_bytes(raw[at : at + _NUMBER_BYTES], "little") for at in range(0, whole, _NUMBER_BYTES)}
