"""The experience store: judged trajectories that outlive their run, as Parquet files; where it may be, its
compaction, and what a job selects.

Where an experience store may be: a folder, a bucket, or whatever else fsspec opens by its URL.
Buckets go through Arrow's own S3 client, which is there wherever Parquet is. Credentials and region are found as every
AWS client finds them; AWS_ENDPOINT_URL names a server that is not Amazon's.

    <root>/task_set=toy/reference=1f3a.../run=job_01.../part-000000000001-000000002048.parquet

A file is whole or absent, its name says what it holds, and writing it twice is writing it once. Nothing in a file is
trusted before its columns, types and sizes are checked: the folder may have been filled by others.

Fewer, larger files: runs that store every minute leave thousands of small ones, each of which every look must open.
A merged file names those it was made of, and from the moment it is there they do not count: readers meet each row once,
whatever dies in between. What a dead compaction left is removed by the next one. Callers keep others from pruning or
compacting at the same time.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypedDict, TypeVar
from urllib.parse import quote, unquote, urlsplit

import fsspec
import pyarrow
from fsspec import AbstractFileSystem
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from pyarrow import compute, parquet
from ulid import ULID

from spo import redis_keys
from spo.errors import IntegrityError, InvalidInput, SpoError, Unreachable, storage_faults_named
from spo.experience.columns import (
    ADDED,
    FORMAT,
    SCHEMA,
    StoredTrajectory,
    completed,
    rows_of,
    statement_digest,
    table_of,
)
from spo.observability import get_logger
from spo.spec.reward import is_success
from spo.spec.section import StoredExperience
from spo.v1.prompt_pb2 import Prompt

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem


# Path -> what fsspec says of it: name, size, type.
Listing = dict[str, dict[str, str | int]]

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 60.0
_S3 = "s3://"

Read = TypeVar("Read")

log = get_logger("experience")

ROW_GROUP_ROWS = 256
UNPACKED_BYTES_MAXIMUM = 8 << 30
FILE_ROWS_MAXIMUM = 4_000_000
UNKNOWN_REFERENCE = "none"
# Names of what reads: the unix ms at which it ends by itself.
LEASES = ".reading"
LEASE_SECONDS = 600.0
RUN_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,199}", re.ASCII)
_PATH = re.compile(r"task_set=(?P<task_set>[^/]+)/reference=(?P<reference>[^/]+)/run=(?P<run>[^/]+)/[^/]+\.parquet")

# A merged file; larger ones are left as they are.
MERGED_ROWS = 16_384
MERGED_BYTES = 64 << 20

# What the choice depends on; all else is read for the chosen rows only.
NARROW = ("trajectory_id", "prompt_id", "statement_digest", "content_digest", "reward", "outcome", "created_unix_ms")
# What people said of their answers: nine who like a text and one who does not are ten opinions, not two.
OPINIONS = "traffic"
_PLACE = [("file", pyarrow.int32()), ("row", pyarrow.int32())]
_EMPTY = pyarrow.schema([*(SCHEMA.field(name) for name in NARROW), *_PLACE]).empty_table()


class BucketFiles(ArrowFSWrapper):  # type: ignore[misc]
    """The objects of an S3 server."""

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: object) -> Listing:
        """Every object below a path with its size: one listing, not one for each folder."""
        from pyarrow.fs import FileSelector, FileType

        found = self.fs.get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
        files = (entry for entry in found if entry.type == FileType.File)
        return {entry.path: {"name": entry.path, "size": entry.size, "type": "file"} for entry in files}


def open_place(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL and the path within it. Raises ValueError, ImportError when nothing opens it."""
    if not url.startswith(_S3):
        file_system, root = fsspec.core.url_to_fs(url)
        return file_system, str(root)
    root = url.removeprefix(_S3).strip("/")
    if not root:
        raise ValueError("it names no bucket")
    return BucketFiles(_bucket_client(), skip_instance_cache=True), root


def _bucket_client() -> S3FileSystem:
    # Only here: importing it starts the client's threads.
    from pyarrow.fs import S3FileSystem

    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = urlsplit(named) if named else None
    return S3FileSystem(
        endpoint_override=endpoint.netloc if endpoint else None,
        scheme=endpoint.scheme if endpoint else "https",
        connect_timeout=CONNECT_SECONDS,
        request_timeout=REQUEST_SECONDS,
    )


@dataclass(frozen=True)
class Origin:
    """What a file's rows have together: kind is "run", "import", "traffic" or "rejudge"; parents: their runs."""

    run: str
    kind: str
    task_set: str
    reference_hash: str = ""
    licence: str = ""
    parents: tuple[str, ...] = ()
    tenant: str = ""


@dataclass(frozen=True)
class StoredFile:
    """One file as its place and its footer describe it."""

    path: str
    origin: Origin
    rows: int
    size_bytes: int
    written_unix_ms: int
    merged: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Its name within the folder of its origin."""
        return PurePosixPath(self.path).name


class ExperienceStore:
    """All stored experience below a folder or an fsspec URL; safe to use from many threads and processes.

    Raises InvalidInput when nothing that is installed can open the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, self._root = open_place(url)
        except (ImportError, ValueError) as error:
            raise InvalidInput(f"SPO_EXPERIENCE_URL={url} cannot be opened: {error}", code="experience_url") from None

    def write(self, origin: Origin, name: str, rows: Sequence[StoredTrajectory]) -> str:
        """Store rows as the file `name` of their origin, replacing one of that name; returns its path.

        Raises InvalidInput on names that are no plain names, Unreachable when the place cannot be written,
        ResourceExhausted when it is full.
        """
        if not (RUN_NAME.fullmatch(origin.run) and RUN_NAME.fullmatch(name)):
            raise InvalidInput(f"{origin.run!r}, {name!r}: not the names of a run and a file")
        return self.write_table(origin, name, table_of(rows))

    def write_table(
        self, origin: Origin, name: str, table: pyarrow.Table, merged: Collection[str] = (), written_unix_ms: int = 0
    ) -> str:
        """As write, of rows that are a table already; `merged` names files beside it whose rows it holds.

        From then on they do not count any more: in one step, wherever a crash leaves them. written_unix_ms 0: now.
        """
        path = f"{self._folder(origin)}/{name}.parquet"
        payload = _encode(origin, table, merged, written_unix_ms)
        with self._reaching(), storage_faults_named(self.url, len(payload)):
            self._write_whole(path, payload)
        return path

    def files(self, run: str | None = None, task_set: str | None = None) -> list[StoredFile]:
        """The readable files, of one run or task set, in order of path; foreign ones are logged and left out.

        So are those whose rows lie in a merged file. Raises Unreachable.
        """
        return self._sorted_out(run, task_set)[0]

    def superseded(self, run: str | None = None, task_set: str | None = None) -> list[StoredFile]:
        """Files whose rows lie in a merged one: what a merge that was cut short left. Raises Unreachable."""
        return self._sorted_out(run, task_set)[1]

    def _sorted_out(self, run: str | None, task_set: str | None) -> tuple[list[StoredFile], list[StoredFile]]:
        found = self._readable(run, task_set)
        merged = {str(PurePosixPath(file.path).with_name(name)) for file in found for name in file.merged}
        return [file for file in found if file.path not in merged], [file for file in found if file.path in merged]

    def _readable(self, run: str | None, task_set: str | None) -> list[StoredFile]:
        found = []
        for path, facts in self._listed(run, task_set):
            try:
                with self._open(path) as file:
                    found.append(_described(path, int(facts["size"]), file))
            except IntegrityError as error:
                log.warning("a file of the experience store is left out", path=path, reason=error.message)
        return found

    def table(self, file: StoredFile, columns: Sequence[str]) -> pyarrow.Table:
        """Some columns of a file, all rows. Raises IntegrityError, Unreachable."""
        return self._read(file.path, lambda opened: completed(opened.read(columns=list(columns)), columns))

    def rows(self, file: StoredFile, numbers: Sequence[int]) -> list[StoredTrajectory]:
        """Rows of a file by number, in that order. Raises IntegrityError, Unreachable."""

        def pick(opened: parquet.ParquetFile) -> list[StoredTrajectory]:
            groups = sorted({number // ROW_GROUP_ROWS for number in numbers})
            place = {group: index * ROW_GROUP_ROWS for index, group in enumerate(groups)}
            table = completed(opened.read_row_groups(groups), SCHEMA.names)
            return rows_of(table.take([place[n // ROW_GROUP_ROWS] + n % ROW_GROUP_ROWS for n in numbers]))

        return self._read(file.path, pick) if numbers else []

    def batches(self, file: StoredFile) -> Iterator[list[StoredTrajectory]]:
        """All rows of a file, ROW_GROUP_ROWS at a time. Raises IntegrityError, Unreachable."""
        for start in range(0, file.rows, ROW_GROUP_ROWS):
            yield self.rows(file, range(start, min(start + ROW_GROUP_ROWS, file.rows)))

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Callable[[], None]]:
        """Files listed in this block can be read in it, though they are merged meanwhile; pruned ones are gone.

        Call what it yields while reading goes on: a snapshot ends by itself LEASE_SECONDS after its last sign of life.
        A place that cannot be written to gives none.
        """
        held: list[tuple[str, float]] = []

        def renew() -> None:
            now = time.time()
            if held and held[-1][1] > now + LEASE_SECONDS / 2:
                return
            path = f"{self._root}/{LEASES}/{int((now + LEASE_SECONDS) * 1000)}-{ULID()}"
            with contextlib.suppress(Unreachable, OSError), self._reaching():
                self._write_whole(path, b"read")
                held.append((path, now + LEASE_SECONDS))
            for old in held[:-1]:
                self._forget_lease(old[0])
            del held[:-1]

        renew()
        try:
            yield renew
        finally:
            for path, _ in held:
                self._forget_lease(path)

    def is_read(self) -> bool:
        """Whether somebody reads files as they were listed; ends what ended by itself. Raises Unreachable."""
        place = f"{self._root}/{LEASES}"
        with self._reaching():
            self._fs.invalidate_cache()
            names = [PurePosixPath(path).name for path in self._fs.find(place)] if self._fs.exists(place) else []
        until = {name: int(name.partition("-")[0]) for name in names if name.partition("-")[0].isdecimal()}
        now_ms = time.time() * 1000
        for name in (name for name, end_ms in until.items() if end_ms <= now_ms):
            self._forget_lease(f"{place}/{name}")
        return any(now_ms < end_ms for end_ms in until.values())

    def _forget_lease(self, path: str) -> None:
        with contextlib.suppress(Unreachable, OSError), self._reaching():
            self._fs.rm_file(path)

    def remove(self, file: StoredFile) -> None:
        """Take a file away; one that is gone already is no fault. Raises Unreachable."""
        with self._reaching(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(file.path)

    def _folder(self, origin: Origin) -> str:
        reference = origin.reference_hash[:16] or UNKNOWN_REFERENCE
        parts = {"task_set": origin.task_set or UNKNOWN_REFERENCE, "reference": reference, "run": origin.run}
        return "/".join([self._root, *(f"{name}={quote(value, safe='')}" for name, value in parts.items())])

    def _listed(self, run: str | None, task_set: str | None) -> Iterator[tuple[str, Mapping[str, str | int]]]:
        with self._reaching():
            self._fs.invalidate_cache()
            found: Listing = self._fs.find(self._root, detail=True) if self._fs.exists(self._root) else {}
        for path, facts in sorted(found.items()):
            place = _PATH.fullmatch(path.removeprefix(self._root).lstrip("/"))
            if place and run in (None, unquote(place["run"])) and task_set in (None, unquote(place["task_set"])):
                yield path, facts

    def _write_whole(self, path: str, payload: bytes) -> None:
        if not isinstance(self._fs, LocalFileSystem):
            # Object stores show an object when it is complete, and not before.
            self._fs.pipe_file(path, payload)
            return
        folder = Path(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        writing = folder / f".writing-{ULID()}"
        try:
            with writing.open("xb") as stream:
                stream.write(payload)
                stream.flush()
                os.fsync(stream.fileno())
            writing.replace(path)
        finally:
            writing.unlink(missing_ok=True)

    def _read(self, path: str, read: Callable[[parquet.ParquetFile], Read]) -> Read:
        with self._open(path) as file:
            return read(file)

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[parquet.ParquetFile]:
        """A checked file; whatever its bytes do to the reader is an IntegrityError that names it."""
        try:
            with self._reaching(), self._fs.open(path, "rb") as stream, parquet.ParquetFile(stream) as file:
                _check(file, path)
                yield file
        except (pyarrow.ArrowException, ValueError, TypeError, KeyError) as error:
            raise IntegrityError(f"{path} is no file of an experience store: {error}", code="bad_experience") from None

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except pyarrow.ArrowException:
            raise
        except OSError as error:
            raise Unreachable(
                f"the experience store at {self.url} cannot be used: {error}", code="experience_store"
            ) from error


def _encode(origin: Origin, table: pyarrow.Table, merged: Collection[str], written_unix_ms: int) -> bytes:
    described = {
        "spo_format": FORMAT,
        "spo_kind": origin.kind,
        "spo_reference_hash": origin.reference_hash,
        "spo_licence": origin.licence,
        "spo_parents": " ".join(origin.parents),
        "spo_tenant": origin.tenant,
        "spo_merged": " ".join(sorted(merged)),
        "spo_written_unix_ms": str(written_unix_ms or int(time.time() * 1000)),
    }
    target = io.BytesIO()
    parquet.write_table(
        table.replace_schema_metadata(described), target, compression="zstd", row_group_size=ROW_GROUP_ROWS
    )
    return target.getvalue()


def _described(path: str, size_bytes: int, file: parquet.ParquetFile) -> StoredFile:
    place = _PATH.search(path)
    said = {name.decode(): value.decode("utf-8", "replace") for name, value in (file.metadata.metadata or {}).items()}
    if place is None:
        raise IntegrityError(f"{path} is not in its place", code="bad_experience")
    origin = Origin(
        run=unquote(place["run"]),
        kind=said.get("spo_kind", ""),
        task_set=unquote(place["task_set"]),
        reference_hash=said.get("spo_reference_hash", ""),
        licence=said.get("spo_licence", ""),
        parents=tuple(said.get("spo_parents", "").split()),
        tenant=said.get("spo_tenant", ""),
    )
    written = said.get("spo_written_unix_ms", "")
    written_unix_ms = int(written) if written.isdecimal() else 0
    merged = frozenset(said.get("spo_merged", "").split())
    return StoredFile(path, origin, file.metadata.num_rows, size_bytes, written_unix_ms, merged)


def _check(file: parquet.ParquetFile, path: str) -> None:
    """Raise IntegrityError unless the file's footer promises our columns in our types, within the limits."""
    footer = file.metadata
    unpacked = sum(footer.row_group(index).total_byte_size for index in range(footer.num_row_groups))
    types = {field.name: field.type for field in file.schema_arrow}
    # Names of list elements differ between writers; the types are what counts.
    expected = [field for field in SCHEMA if field.name in types or field.name not in ADDED]
    wrong = [field.name for field in expected if not _same(types.get(field.name), field.type)]
    sizes = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    faults = [
        ("is of another format", (footer.metadata or {}).get(b"spo_format") != FORMAT.encode()),
        ("has too many rows", footer.num_rows > FILE_ROWS_MAXIMUM),
        ("unpacks to too much", unpacked > UNPACKED_BYTES_MAXIMUM),
        ("is cut into other row groups", any(size != ROW_GROUP_ROWS for size in sizes[:-1])),
        (f"has no or other columns {', '.join(wrong)}", bool(wrong)),
    ]
    reasons = [reason for reason, holds in faults if holds]
    if reasons:
        raise IntegrityError(f"{path} {'; '.join(reasons)}", code="bad_experience")


def _same(found: pyarrow.DataType | None, wanted: pyarrow.DataType) -> bool:
    if found is None or not pyarrow.types.is_list(wanted):
        return bool(found == wanted)
    return bool(pyarrow.types.is_list(found) and found.value_type == wanted.value_type)


def plan(files: Sequence[StoredFile]) -> list[list[StoredFile]]:
    """Files that become one: of one origin, at least two, in order of path, within the limits of a merged file."""
    by_place: dict[tuple[Origin, str], list[StoredFile]] = defaultdict(list)
    for file in files:
        by_place[file.origin, file.path.removesuffix(file.name)].append(file)
    return [chosen for beside in by_place.values() for chosen in _portions(beside) if len(chosen) > 1]


def merge(store: ExperienceStore, files: Sequence[StoredFile]) -> str:
    """Make one file of several of one origin and remove them; returns its path. Raises IntegrityError, Unreachable.

    While somebody reads them as they were listed they stay, superseded: the next compaction removes them.
    """
    tables = [store.table(file, SCHEMA.names) for file in files]
    table = pyarrow.concat_tables([table.replace_schema_metadata() for table in tables])
    names = {file.name for file in files}
    path = store.write_table(
        files[0].origin,
        f"merged-{redis_keys.digest(*sorted(names))[:32]}",
        table.sort_by([("prompt_id", "ascending"), ("trajectory_id", "ascending")]),
        merged=names.union(*(file.merged for file in files)),
        # By age they are pruned with the youngest.
        written_unix_ms=max(file.written_unix_ms for file in files),
    )
    # After the merged file is there: who begins to read from now on does not find them.
    if not store.is_read():
        for file in files:
            store.remove(file)
    return path


def _portions(files: Sequence[StoredFile]) -> Iterator[list[StoredFile]]:
    chosen: list[StoredFile] = []
    for file in files:
        rows, size = sum(file.rows for file in chosen), sum(file.size_bytes for file in chosen)
        if chosen and (rows + file.rows > MERGED_ROWS or size + file.size_bytes > MERGED_BYTES):
            yield chosen
            chosen = []
        chosen.append(file)
    yield chosen


class IndexRow(TypedDict):
    """A row of the index: the columns of NARROW, and where the whole row is."""

    trajectory_id: str
    prompt_id: str
    statement_digest: str
    content_digest: str
    reward: float | None
    outcome: str | None
    created_unix_ms: int
    file: int
    row: int


class Selection:
    """The stored experience that a job names, looked through once and then asked prompt by prompt.

    `tenant` keeps to what one tenant stored; `job_id` leaves out what the job itself has stored meanwhile.
    """

    def __init__(
        self, store: ExperienceStore, wanted: Sequence[StoredExperience], *, job_id: str = "", tenant: str = ""
    ) -> None:
        self.store = store
        self.wanted = wanted
        self.job_id = job_id
        self.tenant = tenant
        self._known: tuple[pyarrow.Table, list[StoredFile]] | None = None
        self._lock = threading.Lock()

    def of(self, prompt: Prompt) -> list[StoredTrajectory]:
        """At most `per_prompt` trajectories for each source named: successes and failures in turn, newest first.

        Those on this very prompt, and those on the same statement with other tests, whose verdicts do not count here.
        None twice by id, nor by content and outcome, except captured traffic: there each is an opinion. Raises
        Unreachable, IntegrityError.
        """
        with self._lock:
            index, files = self._known = self._known or self._look()
        same = compute.or_(
            compute.equal(index["prompt_id"], prompt.prompt_id),
            compute.equal(index["statement_digest"], statement_digest(prompt.text)),
        )
        found: list[IndexRow] = index.filter(same).to_pylist()
        found.sort(key=lambda row: (row["created_unix_ms"], row["trajectory_id"]), reverse=True)
        chosen = {row["trajectory_id"]: row for wanted in self.wanted for row in _choose(found, wanted, files)}
        numbers: dict[int, list[int]] = defaultdict(list)
        for row in chosen.values():
            numbers[row["file"]].append(row["row"])
        try:
            return [stored for file, rows in numbers.items() for stored in self.store.rows(files[file], rows)]
        except SpoError:
            # A file was pruned meanwhile: the next try looks again at what there is.
            with self._lock:
                self._known = None
            raise

    def _look(self) -> tuple[pyarrow.Table, list[StoredFile]]:
        """The index of all rows that may be taken, and the files it points into."""
        runs = {wanted.run for wanted in self.wanted}
        found = [file for run in sorted(runs, key=str) for file in self.store.files(None if None in runs else run)]
        mine = (file for file in found if file.origin.run != self.job_id and file.origin.tenant == self.tenant)
        files = list({file.path: file for file in mine}.values())
        tables = []
        for number, file in enumerate(files):
            table = self.store.table(file, NARROW)
            place = ([number] * len(table), range(len(table)))
            for (name, kind), values in zip(_PLACE, place, strict=True):
                table = table.append_column(name, pyarrow.array(values, kind))
            tables.append(table.replace_schema_metadata())
        return pyarrow.concat_tables([_EMPTY, *tables]), files


def _choose(found: Sequence[IndexRow], wanted: StoredExperience, files: Sequence[StoredFile]) -> list[IndexRow]:
    of_run = [row for row in found if wanted.run in (None, files[row["file"]].origin.run)]
    distinct: dict[tuple[str, bool], IndexRow] = {}
    for row in of_run:
        success = is_success(row["reward"], outcome=row["outcome"])
        is_opinion = row["outcome"] is None and files[row["file"]].origin.kind == OPINIONS
        distinct.setdefault((row["trajectory_id"] if is_opinion else row["content_digest"], success), row)
    right = [row for (_, success), row in distinct.items() if success]
    wrong = [row for (_, success), row in distinct.items() if not success and not wanted.correct_only]
    in_turn = chain.from_iterable(zip_longest(right, wrong))
    return [row for row in in_turn if row is not None][: wanted.per_prompt]
