"""Models that forks made, for services that share no folder: stored in a bucket, fetched to the path that jobs name.

The path is models/<job> in the state path, which is the same on all machines. Files are safetensors, JSON or a
tokenizer's, compared by digest; a folder is whole or absent.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from spo.disk_space import remove_tree, told_when_full
from spo.errors import IntegrityError, NotFound, NotReady
from spo.observability.logs import get_logger
from spo.weights.backends import WeightBackend
from spo.weights.lock_file import locked
from spo.weights.store import backend_at

log = get_logger("models")

FOLDER = "models"
# Each has one: what a fork starts from never changes.
ONLY = 1
LOCK = ".lock-"
FETCH_SECONDS = 1800.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.(safetensors|json|model|jinja|txt)")


class MadeModels:
    """`state_place` is a folder, which other services see or not, or the URL of a bucket."""

    def __init__(self, state_place: str, state_path: Path) -> None:
        self.root = state_path.absolute() / FOLDER
        in_bucket = "://" in state_place
        self._bucket: WeightBackend | None = backend_at(f"{state_place}/{FOLDER}") if in_bucket else None
        self._lock = threading.Lock()
        self._coming: dict[Path, Future[Path]] = {}

    @property
    def in_bucket(self) -> bool:
        return self._bucket is not None

    def store(self, job_id: str) -> None:
        """Keep the folder that was made of a job for good. Raises Unreachable."""
        if self._bucket:
            self._bucket.seal(job_id, ONLY, self.root / job_id, {"version": ONLY, "epoch": 0})
            self._lock_of(job_id).touch()

    def here(self, path: str | Path) -> Path:
        """A model's folder, which is fetched where it is one of these and not on this machine.

        One that is nowhere stays absent: whoever reads it says so. Raises Unreachable, IntegrityError, NotReady.
        """
        folder = Path(path)
        if self._bucket and folder.parent == self.root and not folder.exists():
            self._fetch(self._bucket, folder)
        return folder

    def expected(self, path: str | Path) -> Path:
        """As `here` for who must not wait: raises NotReady while the folder is fetched in a thread."""
        folder = Path(path)
        if self._bucket is None or folder.parent != self.root or folder.exists():
            return folder
        with self._lock:
            coming = self._coming.get(folder)
            if coming is None:
                threads = ThreadPoolExecutor(1, thread_name_prefix="model fetch")
                coming = self._coming[folder] = threads.submit(self.here, folder)
                threads.shutdown(wait=False)
            if not coming.done():
                raise NotReady(f"the model at {folder} is being fetched from the bucket")
            del self._coming[folder]
        return coming.result()

    def _fetch(self, bucket: WeightBackend, folder: Path) -> None:
        try:
            manifest = bucket.manifest(folder.name, ONLY)
        except NotFound:
            return
        entries = manifest["files"]
        if wrong := [entry["name"] for entry in entries if not _NAME.fullmatch(str(entry["name"]))]:
            raise IntegrityError(f"the model of {folder.name} in the bucket has {wrong[0]!r}, which nothing here loads")
        self.root.mkdir(parents=True, exist_ok=True)
        size_bytes = sum(int(entry["size_bytes"]) for entry in entries)
        with told_when_full(self.root, size_bytes), locked(self._lock_of(folder.name), FETCH_SECONDS):
            if folder.exists():
                return
            self._forget(bucket)
            staging = Path(tempfile.mkdtemp(prefix=f".fetched-{folder.name}-", dir=self.root))
            try:
                for entry in entries:
                    bucket.fetch(folder.name, ONLY, entry, staging / entry["name"])
                staging.chmod(0o755)
                staging.rename(folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        log.info("a model is fetched", model=str(folder), size_bytes=size_bytes)

    def _forget(self, bucket: WeightBackend) -> None:
        """Those of deleted jobs take no room here.

        Only what has been in the bucket: a model that a fork is making, or made before there was a bucket, has not.
        """
        for lock in self.root.glob(f"{LOCK}*"):
            folder = self.root / lock.name.removeprefix(LOCK)
            if folder.is_dir() and not bucket.versions(folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def _lock_of(self, job_id: str) -> Path:
        """A file that is here once the model was in the bucket; who fetches it holds its lock."""
        return self.root / f"{LOCK}{job_id}"

    def remove(self, job_id: str) -> None:
        """Here and in the bucket. Raises OSError, Unreachable."""
        remove_tree(self.root / job_id)
        if self._bucket:
            self._bucket.remove_run(job_id)
