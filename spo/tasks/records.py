"""Records of a task file, one at a time: JSONL, Parquet or Arrow; whatever is malformed is named by file and line.

Files come from users, so sizes are bounded and nothing is ever unpickled.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from spo.errors import FieldViolation, InvalidInput

if TYPE_CHECKING:
    import pyarrow

LINE_BYTES_MAXIMUM = 256 << 20
ROW_GROUP_BYTES_MAXIMUM = 4 << 30
ROWS_PER_READ = 16
SUFFIXES = (".jsonl", ".parquet", ".arrow")

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
        match file.suffix:
            case ".jsonl":
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
        first = error.errors(include_url=False, include_input=False)[0]
        raise malformed(record.place, f"{'/'.join(map(str, first['loc']))}: {first['msg']}") from error


def malformed(place: str, reason: str) -> InvalidInput:
    """Return the error for a row that cannot be read."""
    return InvalidInput(
        f"{place}: {reason}",
        code="malformed_task",
        violations=(FieldViolation(pointer="/tasks/path", message=f"{place}: {reason}"),),
    )


def _task_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise malformed(str(path), f"the folder holds no {', '.join(SUFFIXES)} file")
        return files
    if not path.is_file():
        raise malformed(str(path), "no such file or folder")
    if path.suffix not in SUFFIXES:
        raise malformed(str(path), f"not one of {', '.join(SUFFIXES)}")
    return [path]


def _json_lines(file: Path, on_fault: Callable[[InvalidInput], None] | None) -> Iterator[Record]:
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(LINE_BYTES_MAXIMUM + 1):
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


def parse_json(text: str | bytes, place: str) -> Any:
    """Return parsed JSON; integers too long for Python stay text instead of refusing the whole file."""
    try:
        parsed = json.loads(text, parse_int=_integer)
        if _SURROGATE_ESCAPE.search(text if isinstance(text, bytes) else text.encode()):
            # Half a character is valid JSON, but no program could ever read or print it.
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise malformed(place, f"not valid JSON: {error}") from error
    return parsed


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
