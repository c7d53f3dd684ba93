"""Records of a task file, one at a time: JSONL (also in gzip), Parquet or Arrow; faults are named by file and line.

Files come from users, so sizes are bounded and nothing is ever unpickled.
"""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from spo.errors import InvalidInput
from spo.tasks.faults import malformed, problems_of, reasons_of

if TYPE_CHECKING:
    import pyarrow

    from spo.tasks.problem import Problem

LINE_BYTES_MAXIMUM = 256 << 20
ROW_GROUP_BYTES_MAXIMUM = 4 << 30
ROWS_PER_READ = 16
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True)
class Record:
    """One row as it was read; `place` says where a person finds it."""

    place: str
    fields: Any


def read_records(
    path: str | Path, columns: Iterable[str], on_fault: Callable[[InvalidInput], None] | None = None
) -> Iterator[Record]:
    """Yield the rows of a file, or of all files of a folder in order of name; only `columns` of columnar files.

    on_fault hears of lines that are no JSON, and reading goes on; without it they are raised.
    """
    for file in _task_files(Path(path)):
        yield from rows_of(file, columns, on_fault)


def read_problems(
    path: str | Path, columns: Collection[str], parse: Callable[[Record], "Problem | None"]
) -> "Iterator[Problem]":
    """The problems that `parse` makes of rows; when all are read, raises InvalidInput with the faults of all rows."""
    return problems_of(lambda on_fault: read_records(path, columns, on_fault), parse)


def rows_of(
    file: Path, columns: Iterable[str], on_fault: Callable[[InvalidInput], None] | None = None
) -> Iterator[Record]:
    """The rows of one regular file; as `read_records`."""
    match file.suffix:
        case ".jsonl" | ".gz":
            yield from _json_lines(file, on_fault)
        case ".parquet":
            yield from _parquet_rows(file, columns)
        case ".arrow":
            yield from _arrow_rows(file)


def parse_record(schema: type[Schema], record: Record) -> Schema:
    """Return the record as its schema reads it; InvalidInput says where it is and what is wrong with it."""
    try:
        return schema.model_validate(record.fields)
    except ValidationError as error:
        raise malformed(record.place, *reasons_of(error, schema.model_fields)) from error


def _task_files(path: Path) -> list[Path]:
    try:
        return _files_at(path)
    except (OSError, ValueError) as error:
        # No right to read it, or a name that no file can have.
        raise malformed(str(path)[:200], f"it cannot be read: {error}"[:300]) from error


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        # To open a FIFO would wait for whoever writes into it.
        special = next((file.name for file in files if not file.is_file()), None)
        if special:
            raise malformed(str(path), f"{special} is no regular file")
        if not files:
            raise malformed(str(path), f"the folder holds no {', '.join(SUFFIXES)} file")
        return files
    if not path.is_file():
        raise malformed(str(path), "no such file or folder")
    if not path.name.endswith(SUFFIXES):
        raise malformed(str(path), f"not one of {', '.join(SUFFIXES)}")
    return [path]


def _json_lines(file: Path, on_fault: Callable[[InvalidInput], None] | None) -> Iterator[Record]:
    try:
        stream: IO[bytes] = gzip.GzipFile(file) if file.suffix == ".gz" else file.open("rb")  # type: ignore[assignment]
    except OSError as error:
        raise malformed(str(file), f"it cannot be read: {error.strerror}") from error
    with stream:
        number = 0
        while line := _line(stream, file):
            number += 1
            place = f"{file}, line {number}"
            if len(line) > LINE_BYTES_MAXIMUM:
                raise malformed(place, f"longer than {LINE_BYTES_MAXIMUM} bytes")
            if not line.strip():
                continue
            try:
                fields = parse_json(line, place)
            except InvalidInput as error:
                if on_fault is None:
                    raise
                on_fault(error)
                continue
            yield Record(place, fields)


def _line(stream: IO[bytes], file: Path) -> bytes:
    try:
        return stream.readline(LINE_BYTES_MAXIMUM + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise malformed(str(file), f"it cannot be read to its end: {error}"[:300]) from error


def parse_json(text: str | bytes, place: str) -> Any:
    """Return parsed JSON; integers too long for Python stay text instead of refusing the whole file."""
    try:
        parsed = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
        if _SURROGATE_ESCAPE.search(text if isinstance(text, bytes) else text.encode()):
            # Half a character is valid JSON, but no program could ever read or print it.
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise malformed(place, f"not valid JSON: {error}") from error
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{twice[:80]!r} appears twice in one object")
    return members


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) < 4000 else digits


def _parquet_rows(file: Path, columns: Iterable[str]) -> Iterator[Record]:
    # Here, because only columnar files need it and the base install goes without.
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as source:
            for group in range(source.metadata.num_row_groups):
                if source.metadata.row_group(group).total_byte_size > ROW_GROUP_BYTES_MAXIMUM:
                    raise malformed(f"{file}, row group {group}", f"unpacks to over {ROW_GROUP_BYTES_MAXIMUM} bytes")
            present = [name for name in columns if name in source.schema_arrow.names]
            yield from _rows(file, source.iter_batches(ROWS_PER_READ, columns=present))
    except (pyarrow.ArrowException, OSError) as error:
        raise malformed(str(file), f"not a readable Parquet file: {error}") from error


def _arrow_rows(file: Path) -> Iterator[Record]:
    import pyarrow

    try:
        # The stream format is what the `datasets` library writes.
        with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as batches:
            yield from _rows(file, batches)
    except (pyarrow.ArrowException, OSError) as error:
        raise malformed(str(file), f"not a readable Arrow stream: {error}") from error


def _rows(file: Path, batches: "Iterable[pyarrow.RecordBatch]") -> Iterator[Record]:
    number = 0
    for batch in batches:
        for fields in batch.to_pylist():
            number += 1
            yield Record(f"{file}, row {number}", fields)
