"""Where the orchestrator keeps its files: a folder on disk, or a bucket; the names in it are the same.

A file is whole or absent. In a bucket each has a key of its own, a write is one PUT, and what was written is read by
the next call. A bucket that does not answer in time is an Unreachable with the code storage_unavailable.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spo.disk_space import remove_tree
from spo.errors import InvalidInput, Unreachable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Of one request, and from when on none is tried again.
REQUEST_SECONDS = 15
CONNECT_SECONDS = 3
RETRIES = 3
RETRY_SECONDS = 10
# A bucket that was away is asked again after so long: meanwhile nobody waits for it.
AWAY_SECONDS = 3.0
PART_BYTES = 5 << 20


class StatePlace(Protocol):
    """Files by names such as jobs/ID.json. All calls raise OSError, or Unreachable for a bucket that is away."""

    def read(self, name: str) -> bytes | None:
        """What a file holds; None where there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file; it is safe when this returns."""

    def put(self, name: str, source: Path) -> None:
        """As `write`, of what a file of this machine holds."""

    def fetch(self, name: str, destination: Path) -> None:
        """Bring a file to this machine. Raises FileNotFoundError."""

    def names(self, folder: str) -> list[str]:
        """The names of all files below a folder, sorted."""

    def remove(self, name: str) -> None:
        """One that is not there is removed."""

    def remove_folder(self, folder: str) -> None:
        """All files below it."""


class StateFolder:
    """A folder of this machine, or one that is mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".writing-{os.getpid()}-{path.name}")
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def put(self, name: str, source: Path) -> None:
        self.write(name, source.read_bytes())

    def fetch(self, name: str, destination: Path) -> None:
        destination.write_bytes((self._root / name).read_bytes())

    def names(self, folder: str) -> list[str]:
        found = (path for path in (self._root / folder).rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self._root)) for path in found if not path.name.startswith(".writing-"))

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        remove_tree(self._root / folder)


class StateBucket:
    """A bucket, or a part of one; credentials and endpoint come from the usual AWS_* variables."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store = _opened(self.url)
        self._lock = threading.Lock()
        self._away: tuple[float, str] = (float("-inf"), "")

    def read(self, name: str) -> bytes | None:
        import obstore

        try:
            with self._reaching():
                return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        import obstore

        with self._writing():
            obstore.put(self._store, name, content, use_multipart=False)

    def put(self, name: str, source: Path) -> None:
        import obstore

        with self._writing():
            obstore.put(self._store, name, source, chunk_size=PART_BYTES)

    def fetch(self, name: str, destination: Path) -> None:
        import obstore

        with self._reaching(), destination.open("wb") as file:
            for part in obstore.get(self._store, name).stream(min_chunk_size=PART_BYTES):
                file.write(part)

    def names(self, folder: str) -> list[str]:
        import obstore

        with self._reaching():
            pages = obstore.list(self._store, prefix=f"{folder}/")
            return sorted(entry["path"] for page in pages for entry in page)

    def remove(self, name: str) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError), self._reaching():
            obstore.delete(self._store, name)

    def remove_folder(self, folder: str) -> None:
        for name in self.names(folder):
            self.remove(name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        from obstore.exceptions import NotFoundError

        with self._reaching():
            try:
                yield
            except NotFoundError as error:
                raise self._unavailable(_first_line(error)) from None

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        from obstore.exceptions import BaseError, NotFoundError

        with self._lock:
            since, why = self._away
        if time.monotonic() - since < AWAY_SECONDS:
            raise self._unavailable(why)
        try:
            yield
        except NotFoundError as error:
            raise FileNotFoundError(str(error)) from None
        except BaseError as error:
            why = _first_line(error)
            with self._lock:
                self._away = (time.monotonic(), why)
            raise self._unavailable(why) from None

    def _unavailable(self, why: str) -> Unreachable:
        return Unreachable(f"the bucket {self.url} does not answer: {why}", code="storage_unavailable")


def _first_line(error: Exception) -> str:
    # What follows is the library's own state.
    return str(error).strip().split("\n", 1)[0][:300]


def state_at(place: str | Path) -> StatePlace:
    """The place named by a path or a URL. Raises InvalidInput when it is none."""
    return StateBucket(str(place)) if "://" in str(place) else StateFolder(Path(place))


def _opened(url: str) -> ObjectStore:
    try:
        import obstore
        from obstore.exceptions import BaseError
    except ImportError:
        raise InvalidInput(f"what is kept at {url} needs the package obstore", code="state_store_url") from None
    try:
        store: ObjectStore = obstore.store.from_url(
            url,
            client_options={
                "allow_http": True,
                "timeout": f"{REQUEST_SECONDS}s",
                "connect_timeout": f"{CONNECT_SECONDS}s",
            },
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
    except (BaseError, ValueError) as error:
        raise InvalidInput(f"nothing can be kept at {url}: {error}", code="state_store_url") from None
    return store
