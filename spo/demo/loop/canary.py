"""Where texts are kept that nobody agreed to have kept: every place that a platform writes to is looked through."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import redis

from spo.experience.store import ExperienceStore
from spo.messaging.redis_url import open_server

READ_BYTES = 1 << 20


def places_of(texts: Sequence[str], redis_url: str, state_path: Path, logs_path: Path) -> list[str]:
    """Redis keys, stored experience and files that hold one of the texts; [] is what one hopes for.

    Files are read as they are, the experience store row by row, since Parquet packs what it holds.
    """
    wanted = re.compile(b"|".join(re.escape(text.encode()) for text in texts))
    longest = max(map(len, texts))
    # Not the platform's own view of Redis: all that is there counts, whoever wrote it.
    with open_server(redis_url) as client:
        found = [f"redis key {key.decode()}" for key in client.scan_iter() if _holds(client, key, wanted)]
    store = ExperienceStore(str(state_path / "experience"))
    for file in store.files():
        rows = (row for batch in store.batches(file) for row in batch)
        said = (message for row in rows for message in (row.trajectory, row.prompt))
        if any(wanted.search(message.SerializeToString()) for message in said):
            found.append(f"stored experience {file.path}")
    folders = (state_path, logs_path)
    files = (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file())
    return found + [f"file {path}" for path in files if any(map(wanted.search, _parts(path, longest)))]


def _holds(client: redis.Redis, key: bytes, wanted: re.Pattern[bytes]) -> bool:
    readers: dict[object, Callable[[], object]] = {
        b"string": lambda: client.get(key),
        b"hash": lambda: client.hgetall(key),
        b"list": lambda: client.lrange(key, 0, -1),
        b"set": lambda: client.smembers(key),
        b"zset": lambda: client.zrange(key, 0, -1),
        b"stream": lambda: client.xrange(key),
    }
    return bool(wanted.search(key)) or _says(readers[client.type(key)](), wanted)


def _says(value: object, wanted: re.Pattern[bytes]) -> bool:
    if isinstance(value, bytes):
        return bool(wanted.search(value))
    if isinstance(value, dict):
        return any(_says(part, wanted) for pair in value.items() for part in pair)
    return isinstance(value, list | tuple | set) and any(_says(part, wanted) for part in value)


def _parts(path: Path, length: int) -> Iterator[bytes]:
    """The file in parts that overlap by the length, so that nothing is cut in two."""
    before = b""
    try:
        with path.open("rb") as file:
            while part := file.read(READ_BYTES):
                yield before + part
                before = part[-length:]
    except FileNotFoundError:
        # Gone since it was listed, as files of a running platform may be.
        return
