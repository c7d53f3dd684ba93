"""Task sets: uploaded part by part, checked in a confined process, and the problems of a job, loaded once.

Uploaded task sets: appended part by part, checked row by row, then usable by jobs.
uploading -> validating -> ready | invalid
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NotRequired, TypedDict

import redis
from blake3 import blake3
from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import timestamp
from services.orchestrator.jobs import JobStore
from spo import errors
from spo.api import DatasetState, FileFormat, TaskFormat
from spo.manifest_folder import file_digest, remove_tree
from spo.observability import get_logger
from spo.service.process import in_rounds
from spo.service.state import StateBucket, StatePlace
from spo.spec.job_spec import JobSpec, TasksSpec
from spo.spec.section import record_from_json
from spo.spec.tasks import verifiers_in
from spo.tasks.load import load_tasks
from spo.tasks.problem import Problem, TaskSets
from spo.tasks.verifier import pool_of
from spo.v1.prompt_pb2 import Prompt

CHECK_SECONDS = 3600
INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")

FOLDER = "datasets"
PART = "part-"
COPIED_AT_ONCE = 1 << 20

log = get_logger("datasets")

LOOK_SECONDS = 1.0
MAX_UPLOADS = 20
# An upload that got no part for so long is removed.
ABANDONED_SECONDS = 86_400.0

MOST_BYTES = 512 << 20
# Of a problem without its texts: objects, digests, its message.
PROBLEM_BYTES = 2048

_Key = tuple[object, ...]


class FileFault(TypedDict):
    """What is wrong where; places are lines or rows, counted from 1."""

    place: str
    message: str


class FileReport(TypedDict):
    """What `spo.tasks.load` prints; a file that could not be read has only the required counts."""

    rows: int
    problems: int
    faults_total: int
    faults: list[FileFault]
    left_out: NotRequired[int]
    duplicates: NotRequired[int]
    tests: NotRequired[int]
    answers: NotRequired[int]
    with_solutions: NotRequired[int]
    difficulties: NotRequired[dict[str, int]]
    notes: NotRequired[list[str]]


def report_on(file: Path, task_format: str) -> tuple[FileReport, str]:
    """The report of `spo.tasks.load` and the file's blake3."""
    digest = file_digest(file)
    command = [sys.executable, "-m", "spo.tasks.load", str(file), task_format]
    # Without our secrets.
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=CHECK_SECONDS, check=False
        )
        report: FileReport = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        report = broken_report(f"it could not be read in {CHECK_SECONDS} s")
    except ValueError:
        report = broken_report("it unpacks to too much, or broke its reader")
    return report, digest


def broken_report(reason: str) -> FileReport:
    """The report on a file that could not be read at all."""
    return {"rows": 0, "problems": 0, "faults_total": 1, "faults": [{"place": "the file", "message": reason}]}


class DatasetFiles:
    """`datasets/<id>/tasks.*` in the state path; with a bucket it is a copy of the parts, made where one is needed."""

    def __init__(self, place: StatePlace, state_path: Path) -> None:
        self._bucket = place if isinstance(place, StateBucket) else None
        self.root = state_path / FOLDER
        self._fetching = threading.Lock()

    def begin(self, dataset_id: str) -> None:
        """Make room for a new one. Raises ResourceExhausted, OSError."""
        with errors.storage_faults_named(self.root):
            (self.root / dataset_id).mkdir(parents=True)

    def new_part(self, dataset_id: str) -> Path:
        """Where to write a part on this machine."""
        if self._bucket:
            # Another machine may have begun the upload.
            with errors.storage_faults_named(self.root):
                (self.root / dataset_id).mkdir(parents=True, exist_ok=True)
        return self.root / dataset_id / f"{PART}{ULID()}"

    def append(self, file: Path, offset: int, part: Path) -> str:
        """Keep a part for good, and return the name of its object; "" where it is in the file."""
        if self._bucket:
            self._bucket.put(f"{FOLDER}/{file.parent.name}/{part.name}", part)
            return part.name
        with errors.storage_faults_named(file.parent, part.stat().st_size):
            file.touch()
            _copy_to(file, offset, part)
        return ""

    def here(self, file: Path, size_bytes: int, digest: str, parts: Sequence[str]) -> Path:
        """The file on this machine, fetched if it must be; digest "" is not compared.

        Raises IntegrityError where parts are missing or others, Unreachable, ResourceExhausted.
        """
        # One that is here does not wait for others that are fetched.
        if not self._bucket or _is_whole(file, size_bytes):
            return file
        with self._fetching:
            if not _is_whole(file, size_bytes):
                with errors.storage_faults_named(self.root, size_bytes):
                    self._fetch(self._bucket, file, size_bytes, digest, parts)
        return file

    def _fetch(self, bucket: StateBucket, file: Path, size_bytes: int, digest: str, parts: Sequence[str]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole, part = file.with_name(f".whole-{ULID()}"), file.with_name(f".fetched-{ULID()}")
        found = blake3()
        try:
            with whole.open("wb") as target:
                for name in parts:
                    bucket.fetch(f"{FOLDER}/{file.parent.name}/{name}", part)
                    with part.open("rb") as source:
                        while chunk := source.read(COPIED_AT_ONCE):
                            found.update(chunk)
                            target.write(chunk)
            if whole.stat().st_size != size_bytes or digest not in ("", found.hexdigest()):
                raise errors.IntegrityError(f"the parts of {file.parent.name} in the bucket are not what was uploaded")
            whole.rename(file)
        except FileNotFoundError as error:
            raise errors.IntegrityError(f"a part of {file.parent.name} is missing in the bucket: {error}") from None
        finally:
            whole.unlink(missing_ok=True)
            part.unlink(missing_ok=True)

    def remove(self, dataset_id: str) -> None:
        """All of one. Raises OSError, Unreachable."""
        remove_tree(self.root / dataset_id)
        if self._bucket:
            self._bucket.remove_folder(f"{FOLDER}/{dataset_id}")


def _is_whole(file: Path, size_bytes: int) -> bool:
    return file.is_file() and file.stat().st_size == size_bytes


def _copy_to(file: Path, offset: int, part: Path) -> None:
    with file.open("r+b") as target, part.open("rb") as source:
        # A crash may have left bytes beyond those the record counts.
        target.truncate(offset)
        target.seek(offset)
        shutil.copyfileobj(source, target, COPIED_AT_ONCE)
        target.flush()
        os.fsync(target.fileno())


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
    state: DatasetState = "uploading"
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
            raise errors.InvalidInput(
                "the dataset is too large",
                code="dataset_too_large",
                violations=(errors.FieldViolation("/size_bytes", message),),
            )
        open_uploads = [upload for upload in self._all(tenant) if upload.state == "uploading"]
        if len(open_uploads) >= MAX_UPLOADS:
            raise errors.ResourceExhausted(
                f"{MAX_UPLOADS} uploads are unfinished; finish them first", code="too_many_uploads"
            )
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
            raise errors.NotFound(f"there is no dataset {dataset_id}", code="dataset_not_found")
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
                raise errors.Conflict(f"more than the {dataset.size_bytes} bytes announced", code="upload_overflow")
            self._require_lead()
            stored = self.files.append(self._file(dataset), offset, part)
            done = offset + size == dataset.size_bytes
            state: DatasetState = "validating" if done else "uploading"
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
                raise errors.Conflict("its rows are being checked; wait for the report", code="dataset_in_use")
            if users := users_of(dataset_id):
                # They may be other tenants' jobs, whose ids are not for everybody to see.
                named = f", such as {users[0]}" if tenant is None else ""
                raise errors.Conflict(f"unfinished jobs use the dataset: {len(users)}{named}", code="dataset_in_use")
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

        def advance_all() -> None:
            ids = self.client.smembers(own_keys.open_datasets())
            stored = self.client.hmget(own_keys.datasets(), list(ids)) if ids else []
            for dataset in sorted(map(_decode, filter(None, stored)), key=lambda dataset: dataset.touched_at):
                if stop.is_set():
                    return
                self._advance_alone(dataset)

        in_rounds(advance_all, stop, LOOK_SECONDS, "datasets wait", (redis.RedisError, errors.NotReady))

    def _advance_alone(self, dataset: Dataset) -> None:
        """Advance one; its errors delay no other, and a bug makes it invalid instead of ending the process."""
        try:
            self._advance(dataset)
        except (OSError, errors.ResourceExhausted, errors.StorageUnavailable) as error:
            # A full disk, where its file has to be fetched from a bucket, or a place that cannot be read now.
            log.warning("a dataset waits", dataset=dataset.id, reason=str(error))
        except (redis.RedisError, errors.NotReady):
            raise
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
            state: DatasetState = "ready" if report["problems"] and not report["faults_total"] else "invalid"
            self._store(replace(dataset, state=state, report=report, digest=digest))
            log.info("dataset checked", dataset=dataset.id, state=state, problems=report["problems"])
        elif time.time() - dataset.touched_at > ABANDONED_SECONDS:
            log.info("an abandoned upload is removed", dataset=dataset.id)
            self._remove(dataset)

    def _is_whole(self, dataset: Dataset) -> bool:
        try:
            return self.file_of(dataset).stat().st_size == dataset.size_bytes
        except errors.IntegrityError:
            return False

    def _usable(self, tasks: TasksSpec, tenant: str | None) -> Dataset:
        message = f"there is no dataset {tasks.id}"
        try:
            dataset = self.get(tasks.id or "", tenant)
            if dataset.state == "ready":
                return dataset
            message = f"the dataset is {dataset.state}; `spo dataset show {tasks.id}` has its report"
        except errors.NotFound:
            pass
        violation = errors.FieldViolation("/tasks/id", message)
        raise errors.InvalidInput("the dataset cannot be used", code="dataset_unusable", violations=(violation,))

    def _check_offset(self, dataset: Dataset, offset: int) -> None:
        if dataset.state != "uploading":
            raise errors.Conflict(f"the dataset is {dataset.state}; it takes no part", code="upload_complete")
        if offset != dataset.uploaded_bytes:
            raise errors.Conflict(
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
            raise errors.NotReady(reason, code="files_not_removed") from None
        self.jobs.write(
            *(("ZREM", key, dataset.id) for key in _indexes(dataset)),
            ("SREM", own_keys.open_datasets(), dataset.id),
            ("HDEL", own_keys.datasets(), dataset.id),
        )


def _indexes(dataset: Dataset) -> tuple[str, str]:
    return own_keys.dataset_index(None), own_keys.dataset_index(dataset.tenant)


def _decode(raw: bytes) -> Dataset:
    return record_from_json(Dataset, raw)


class TaskLibrary:
    """Loads task sets and remembers them; a changed file is read again. Safe from several threads.

    Loads of different sets run side by side, those who want one set share one load, and a load that failed is tried
    again by who asks next. Beyond `most_bytes` those go that were used longest ago and that no active job uses.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        # Replaces the id of an uploaded dataset by its file.
        self.resolve: Callable[[TasksSpec], TasksSpec] = lambda spec: spec
        # The tasks of all active jobs, resolved.
        self.in_use: Callable[[], Iterable[TasksSpec]] = tuple
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._loads: OrderedDict[_Key, Future[TaskSets]] = OrderedDict()
        self._sizes: dict[_Key, int] = {}

    def load(self, spec: TasksSpec) -> TaskSets:
        """The problems of a task set. Raises InvalidInput naming the file, the line and the reason."""
        spec = self.resolve(spec)
        key = _key(spec)
        with self._lock:
            found = self._loads.get(key)
            load = self._loads.setdefault(key, Future())
            self._loads.move_to_end(key)
        if found is None:
            self._fill(load, key, spec)
        # Whoever fills it ends it, with the problems or with the reason: no wait is longer than the load.
        return load.result()

    def notes(self, spec: TasksSpec) -> tuple[str, ...]:
        """What was left out of a task set, or not looked at; of one that is loaded, and nothing is loaded for it."""
        try:
            key = _key(self.resolve(spec))
        except (errors.SpoError, redis.RedisError):
            return ()
        with self._lock:
            load = self._loads.get(key)
        is_there = load is not None and load.done() and load.exception() is None
        return load.result().notes if load is not None and is_there else ()

    def _fill(self, load: Future[TaskSets], key: _Key, spec: TasksSpec) -> None:
        try:
            tasks = load_tasks(spec)
            with self._lock:
                self._sizes[key] = size_of(tasks)
        except BaseException as error:
            with self._lock:
                del self._loads[key]
            load.set_exception(error)
            return
        load.set_result(tasks)
        self._make_room(key)

    def _make_room(self, newest: _Key) -> None:
        with self._lock:
            if sum(self._sizes.values()) <= self._most_bytes:
                return
        try:
            kept = {newest, *(_key(spec) for spec in self.in_use())}
        except (errors.SpoError, redis.RedisError) as error:
            log.warning("which task sets are in use cannot be seen; all are kept", reason=str(error))
            return
        with self._lock:
            for key in [key for key in self._loads if key in self._sizes and key not in kept]:
                if sum(self._sizes.values()) <= self._most_bytes:
                    break
                del self._loads[key], self._sizes[key]


def size_of(tasks: TaskSets) -> int:
    """About the bytes of memory that problems take."""
    return sum(sum(_sizes(problem)) for part in (tasks.train, tasks.evaluation) for problem in part)


def _sizes(problem: Problem) -> Iterator[int]:
    yield PROBLEM_BYTES + problem.tests.ByteSize()
    texts = (problem.statement, problem.arguments_json, problem.environment_json)
    yield from map(len, (*texts, *problem.human_solutions, *problem.wrong_solutions))


def _key(spec: TasksSpec) -> _Key:
    functions = tuple(_stamp(one.path) for _, one in verifiers_in(spec.verifier) if one.kind == "python")
    return (spec.model_dump_json(), _stamp(spec.path), _stamp(spec.evaluation_path), *functions)


def _stamp(path: str | None) -> tuple[float, int] | None:
    if path is None:
        return None
    try:
        facts = Path(path).stat()
    except (OSError, ValueError):
        # Whoever reads it says what is wrong.
        return None
    return facts.st_mtime, facts.st_size


def prompt_of(problem: Problem, spec: JobSpec) -> Prompt:
    """The problem as the policy sees it."""
    return Prompt(
        prompt_id=problem.problem_id,
        text=problem.statement,
        task_set=spec.tasks.kind,
        tests_digest=problem.tests_digest,
        language=problem.language,
        response_format=problem.response_format,
        verifier_pool=pool_of(problem.tests),
        environment=problem.environment,
        environment_json=problem.environment_json,
    )
