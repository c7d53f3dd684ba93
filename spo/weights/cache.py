"""Whole weight versions on this machine: one download for all its replicas, in memory (/dev/shm) where they fit.

    <root>/<store>/<run>/<version:08d>-<manifest digest>/*.safetensors

A folder is there once it is whole. Whoever uses one holds a shared lock on it, which ends with its process: only what
nobody holds is removed. Another lock makes one process of the machine fetch a version while the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spo import redis_keys
from spo.disk_space import told_when_full
from spo.errors import NotReady
from spo.manifest_folder import remove_folder
from spo.weights.lock_file import locked

SHARED_MEMORY = Path("/dev/shm")
# Room for this many copies must be free in shared memory: the one served, the next one, and some for everybody else.
COPIES = 3
KEPT = 2
FETCH_SECONDS = 1800.0
FORGOTTEN_SECONDS = 6 * 3600.0


class Pin:
    """A folder in use: it stays while this object lives."""

    def __init__(self, descriptor: int) -> None:
        self._release = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        self._release()


@dataclass(frozen=True)
class Cached:
    """Whole files in use; those of a shared folder are held by nobody."""

    path: Path
    hold: Pin | None


class WeightCache:
    """One store's versions on this machine; `root` "" takes shared memory or, for what does not fit, TMPDIR."""

    def __init__(self, root: str, store: str) -> None:
        named = f"spo-weights-{os.getuid()}"
        roots = [Path(root)] if root else [base / named for base in (SHARED_MEMORY, Path(tempfile.gettempdir()))]
        usable = roots if root else [base for base in roots if _is_ours(base)]
        self._roots = [base / redis_keys.digest(store)[:16] for base in usable]

    def find(self, run_id: str, version: int, digest: str) -> Cached | None:
        """The version with this manifest digest, if it is here; not verified."""
        for root in self._roots:
            path = root / run_id / _name(version, digest)
            hold = _held(path, fcntl.LOCK_SH)
            if hold:
                return Cached(path, hold)
        return None

    @contextlib.contextmanager
    def stage(self, run_id: str, name: str, size_bytes: int) -> Iterator[Path]:
        """A folder of that name to put a version together in, kept when the block raises so that a retry goes on there.

        One process at a time has it. Raises NotReady when another had it for FETCH_SECONDS, ResourceExhausted.
        """
        parent = self._root_for(size_bytes) / run_id
        with told_when_full(parent, size_bytes), self._alone(run_id, name):
            path = parent / f".stage-{name}"
            path.mkdir(parents=True, exist_ok=True)
            yield path
            shutil.rmtree(path, ignore_errors=True)

    def keep(self, staged: Path, run_id: str, version: int, digest: str) -> Cached:
        """Make a folder in a stage the cached version, and forget those before that nobody uses."""
        path = staged.parent.parent / _name(version, digest)
        with contextlib.suppress(OSError):  # It is there already.
            os.rename(staged, path)
        cached = self.find(run_id, version, digest)
        if cached is None:
            raise NotReady(f"the cached weights at {path} were removed by somebody else", code="cache_lost")
        os.utime(path)
        self._prune(run_id)
        return cached

    def drop(self, cached: Cached) -> None:
        """Remove a version that turned out to be damaged."""
        remove_folder(cached.path)

    def _root_for(self, size_bytes: int) -> Path:
        first = self._roots[0]
        first.mkdir(parents=True, exist_ok=True, mode=0o700)
        roomy = len(self._roots) == 1 or shutil.disk_usage(first).free >= COPIES * size_bytes
        return first if roomy else self._roots[1]

    @contextlib.contextmanager
    def _alone(self, run_id: str, name: str) -> Iterator[None]:
        folder = self._roots[0] / run_id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(folder / f".lock-{name}", FETCH_SECONDS):
            yield

    def _prune(self, run_id: str) -> None:
        for root in self._roots:
            for run in root.glob("*"):
                versions = sorted(path for path in run.glob("[0-9]*") if path.is_dir())
                forgotten = [path for path in versions if _age_seconds(path) > FORGOTTEN_SECONDS]
                for path in versions[:-KEPT] if run.name == run_id else forgotten:
                    hold = _held(path, fcntl.LOCK_EX)
                    if hold:
                        remove_folder(path)
                        hold.release()
                for lock in run.glob(".*"):
                    if _age_seconds(lock) > FORGOTTEN_SECONDS:
                        shutil.rmtree(lock, ignore_errors=True) if lock.is_dir() else lock.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put anything there: both parents are open to all users of the machine."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    except OSError:
        return False


def _name(version: int, digest: str) -> str:
    return f"{version:08d}-{digest[:32]}"


def _held(path: Path, kind: int) -> Pin | None:
    """A lock on a folder that is still there; None when it is not, or is in use and wanted alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    hold = Pin(descriptor)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        # Between the two it may have been removed.
        if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            return hold
    except (BlockingIOError, FileNotFoundError):
        pass
    hold.release()
    return None


def _age_seconds(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0
