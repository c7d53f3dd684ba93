"""Uploaded task sets: appended part by part, checked row by row, then usable by jobs.

uploading -> validating -> ready | invalid
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import redis
from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.datasets.check import FileReport, broken_report, report_on
from services.orchestrator.datasets.files import DatasetFiles
from services.orchestrator.jobs.commit import timestamp
from services.orchestrator.jobs.store import JobStore
from spo.errors import Conflict, FieldViolation, IntegrityError, InvalidInput, NotFound, NotReady, ResourceExhausted
from spo.observability.logs import get_logger
from spo.spec.job_spec import TasksSpec
from spo.spec.stored import record_from_json

log = get_logger("datasets")

State = Literal["uploading", "validating", "ready", "invalid"]
TaskFormat = Literal["jsonl", "code_contests", "taco"]
FileFormat = Literal["jsonl", "parquet"]

LOOK_SECONDS = 1.0
MAX_UPLOADS = 20
# An upload that got no part for so long is removed.
ABANDONED_SECONDS = 86_400.0


@dataclass(frozen=True)
class Dataset:
    """What is known of an uploaded task set; digest is the blake3 of the whole file, parts its objects in a bucket."""

    id: str
    tenant: str
    name: str
    task_format: TaskFormat
    file_format: FileFormat
    size_bytes: int
    uploaded_bytes: int = 0
    state: State = "uploading"
    created_at: str = ""
    touched_at: float = 0.0
    digest: str = ""
    report: FileReport | None = None
    parts: list[str] = field(default_factory=list)


class Datasets:
    """Files in the state place, records in Redis; a record counts a part only when its bytes are kept."""

    def __init__(self, jobs: JobStore, files: DatasetFiles, max_bytes: int) -> None:
        self.jobs = jobs
        self.client = jobs.client
        self.files = files
        self.max_bytes = max_bytes
        self._lock = threading.Lock()

    def create(self, name: str, task_format: TaskFormat, file_format: FileFormat, size: int, tenant: str) -> Dataset:
        """Begin an upload of so many bytes. Raises InvalidInput, ResourceExhausted (too many unfinished ones)."""
        if size > self.max_bytes:
            message = f"at most {self.max_bytes} bytes are taken"
            raise InvalidInput(
                "the dataset is too large",
                code="dataset_too_large",
                violations=(FieldViolation("/size_bytes", message),),
            )
        open_uploads = [upload for upload in self._all(tenant) if upload.state == "uploading"]
        if len(open_uploads) >= MAX_UPLOADS:
            raise ResourceExhausted(f"{MAX_UPLOADS} uploads are unfinished; finish them first", code="too_many_uploads")
        made = Dataset(
            f"ds_{ULID()}", tenant, name, task_format, file_format, size, created_at=timestamp(), touched_at=time.time()
        )
        self.files.begin(made.id)
        self._store(made)
        return made

    def get(self, dataset_id: str, tenant: str | None = None) -> Dataset:
        """The dataset, if it is the tenant's (None: anybody's). Raises NotFound."""
        stored = self.client.hget(own_keys.datasets(), dataset_id)
        found = _decode(stored) if stored else None
        if found is None or tenant not in (None, found.tenant):
            raise NotFound(f"there is no dataset {dataset_id}", code="dataset_not_found")
        return found

    def page(self, tenant: str | None, cursor: str, limit: int) -> tuple[list[Dataset], str | None]:
        """Datasets of the tenant, newest first, and the cursor of the next page."""
        before = f"({cursor}" if cursor else "+"
        key = own_keys.dataset_index(tenant)
        ids = self.client.zrevrangebylex(key, before, "-", start=0, num=limit + 1)
        stored = self.client.hmget(own_keys.datasets(), ids[:limit]) if ids else []
        found = [_decode(raw) for raw in stored if raw]
        return found, found[-1].id if len(ids) > limit else None

    def begin_part(self, dataset_id: str, tenant: str | None, offset: int) -> Path:
        """The path of a new file for a part that begins at `offset`. Raises NotFound, Conflict."""
        self._check_offset(self.get(dataset_id, tenant), offset)
        return self.files.new_part(dataset_id)

    def add_part(self, dataset_id: str, offset: int, part: Path) -> Dataset:
        """Append a part, for good; of two with the same offset the first counts. Raises Conflict."""
        with self._lock:
            dataset = self.get(dataset_id)
            self._check_offset(dataset, offset)
            size = part.stat().st_size
            if offset + size > dataset.size_bytes:
                raise Conflict(f"more than the {dataset.size_bytes} bytes announced", code="upload_overflow")
            self._require_lead()
            stored = self.files.append(self._file(dataset), offset, part)
            done = offset + size == dataset.size_bytes
            state: State = "validating" if done else "uploading"
            parts = [*dataset.parts, stored] if stored else dataset.parts
            grown = replace(dataset, uploaded_bytes=offset + size, touched_at=time.time(), state=state, parts=parts)
            self._store(grown)
            return grown

    def delete(self, dataset_id: str, tenant: str | None, users_of: Callable[[str], Sequence[str]]) -> None:
        """Remove it for good unless jobs use it; `users_of` names the jobs that use an id.

        Raises NotFound, also for another tenant's (None: anybody's); Conflict (code "dataset_in_use").
        """
        with self._lock:
            dataset = self.get(dataset_id, tenant)
            if dataset.state == "validating":
                raise Conflict("its rows are being checked; wait for the report", code="dataset_in_use")
            if users := users_of(dataset_id):
                # They may be other tenants' jobs, whose ids are not for everybody to see.
                named = f", such as {users[0]}" if tenant is None else ""
                raise Conflict(f"unfinished jobs use the dataset: {len(users)}{named}", code="dataset_in_use")
            self._remove(dataset)
            log.info("dataset deleted", dataset=dataset.id)

    def file_of(self, dataset: Dataset) -> Path:
        """The path of its file on this machine; readers know the format by the suffix.

        Raises IntegrityError, Unreachable, ResourceExhausted where it has to be fetched from a bucket.
        """
        return self.files.here(self._file(dataset), dataset.size_bytes, dataset.digest, dataset.parts)

    def _file(self, dataset: Dataset) -> Path:
        return (self.files.root / dataset.id / f"tasks.{dataset.file_format}").absolute()

    def resolve(self, tasks: TasksSpec) -> TasksSpec:
        """The tasks with a dataset's file in place of its id. Raises InvalidInput (pointer /tasks/id)."""
        if tasks.kind != "dataset":
            return tasks
        dataset = self._usable(tasks, None)
        update = {"kind": dataset.task_format, "path": str(self.file_of(dataset)), "id": None}
        return tasks.model_copy(update=update)

    def require_usable(self, tasks: TasksSpec | None, tenant: str | None) -> None:
        """Refuse a dataset that is not the tenant's, or not ready. Raises InvalidInput (pointer /tasks/id)."""
        if tasks is not None and tasks.kind == "dataset":
            self._usable(tasks, tenant)

    def run(self, stop: threading.Event) -> None:
        """Report on uploaded files until stop; what a dead process left unfinished is done again."""
        while not stop.is_set():
            try:
                ids = self.client.smembers(own_keys.open_datasets())
                stored = self.client.hmget(own_keys.datasets(), list(ids)) if ids else []
                for dataset in sorted(map(_decode, filter(None, stored)), key=lambda dataset: dataset.touched_at):
                    if stop.is_set():
                        return
                    self._advance_alone(dataset)
            except (redis.RedisError, NotReady) as error:
                log.warning("datasets wait", reason=str(error))
            stop.wait(LOOK_SECONDS)

    def _advance_alone(self, dataset: Dataset) -> None:
        """Advance one; its errors delay no other, and a bug makes it invalid instead of ending the process."""
        try:
            self._advance(dataset)
        except (redis.RedisError, NotReady):
            raise
        except (OSError, ResourceExhausted) as error:
            # A full disk, where its file has to be fetched from a bucket.
            log.warning("a dataset waits", dataset=dataset.id, reason=str(error))
        except Exception:
            log.exception("a dataset could not be checked", dataset=dataset.id)
            report = broken_report("it could not be checked; the log of the orchestrator has the reason")
            self._store(replace(dataset, state="invalid", report=report))

    def _advance(self, dataset: Dataset) -> None:
        if dataset.state == "validating" and not self._is_whole(dataset):
            report = broken_report("the file has not the size that was uploaded; upload it again")
            self._store(replace(dataset, state="invalid", report=report))
        elif dataset.state == "validating":
            report, digest = report_on(self.file_of(dataset), dataset.task_format)
            state: State = "ready" if report["problems"] and not report["faults_total"] else "invalid"
            self._store(replace(dataset, state=state, report=report, digest=digest))
            log.info("dataset checked", dataset=dataset.id, state=state, problems=report["problems"])
        elif time.time() - dataset.touched_at > ABANDONED_SECONDS:
            log.info("an abandoned upload is removed", dataset=dataset.id)
            self._remove(dataset)

    def _is_whole(self, dataset: Dataset) -> bool:
        try:
            return self.file_of(dataset).stat().st_size == dataset.size_bytes
        except IntegrityError:
            return False

    def _usable(self, tasks: TasksSpec, tenant: str | None) -> Dataset:
        message = f"there is no dataset {tasks.id}"
        try:
            dataset = self.get(tasks.id or "", tenant)
            if dataset.state == "ready":
                return dataset
            message = f"the dataset is {dataset.state}; `spo dataset show {tasks.id}` has its report"
        except NotFound:
            pass
        violation = FieldViolation("/tasks/id", message)
        raise InvalidInput("the dataset cannot be used", code="dataset_unusable", violations=(violation,))

    def _check_offset(self, dataset: Dataset, offset: int) -> None:
        if dataset.state != "uploading":
            raise Conflict(f"the dataset is {dataset.state}; it takes no part", code="upload_complete")
        if offset != dataset.uploaded_bytes:
            raise Conflict(
                f"the next part begins at byte {dataset.uploaded_bytes}, not {offset}", code="upload_offset_mismatch"
            )

    def _require_lead(self) -> None:
        """Before files change: they carry no epoch, so a process that was stopped asks whether it still leads."""
        self.jobs.write(("EXISTS", own_keys.open_datasets()))

    def _all(self, tenant: str) -> list[Dataset]:
        ids = self.client.smembers(own_keys.open_datasets())
        return [dataset for dataset in (self.get(raw.decode()) for raw in ids) if dataset.tenant == tenant]

    def _store(self, dataset: Dataset) -> None:
        open_ones = own_keys.open_datasets()
        self.jobs.write(
            ("HSET", own_keys.datasets(), dataset.id, json.dumps(asdict(dataset))),
            *(("ZADD", key, 0, dataset.id) for key in _indexes(dataset)),
            ("SADD" if dataset.state in ("uploading", "validating") else "SREM", open_ones, dataset.id),
        )

    def _remove(self, dataset: Dataset) -> None:
        self._require_lead()
        try:
            self.files.remove(dataset.id)
        except OSError as error:
            reason = f"the files of dataset {dataset.id} cannot be removed: {error}"
            raise NotReady(reason, code="files_not_removed") from None
        self.jobs.write(
            *(("ZREM", key, dataset.id) for key in _indexes(dataset)),
            ("SREM", own_keys.open_datasets(), dataset.id),
            ("HDEL", own_keys.datasets(), dataset.id),
        )


def _indexes(dataset: Dataset) -> tuple[str, str]:
    return own_keys.dataset_index(None), own_keys.dataset_index(dataset.tenant)


def _decode(raw: bytes) -> Dataset:
    return record_from_json(Dataset, raw)
