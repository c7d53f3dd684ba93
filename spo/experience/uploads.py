"""Rows of an uploaded file, one at a time: JSONL, or Parquet as a confined process reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from spo.disk_space import told_when_full
from spo.errors import FieldViolation, InvalidInput
from spo.experience.parquet_child import PRINTED_BYTES, REFUSED

UploadFormat = Literal["jsonl", "parquet"]

ROWS_MAXIMUM = 1_000_000
ROW_BYTES_MAXIMUM = 4 << 20
READER_SECONDS = 600


@dataclass(frozen=True)
class UploadedRow:
    """One row, counted from 1: its fields, or why it has none."""

    number: int
    fields: dict[str, Any] | None
    code: str = ""
    message: str = ""


def uploaded_rows(body: bytes, upload_format: UploadFormat) -> Iterator[UploadedRow]:
    """The rows in order; a row that is malformed or too long says so.

    Raises InvalidInput (code "bad_upload") when the file as a whole cannot be read or is too large.
    """
    lines = body.split(b"\n") if upload_format == "jsonl" else _parquet_lines(body)
    number = 0
    for line in lines:
        if line.strip():
            number += 1
            if number > ROWS_MAXIMUM:
                raise refused(f"more than {ROWS_MAXIMUM} rows; cut the file into several")
            yield _parsed(number, line)


def refused(reason: str) -> InvalidInput:
    """The error for a file that cannot be read as a whole."""
    return InvalidInput("the file cannot be imported", code="bad_upload", violations=(FieldViolation("/", reason),))


def _parsed(number: int, line: bytes) -> UploadedRow:
    if len(line) > ROW_BYTES_MAXIMUM:
        return UploadedRow(number, None, "oversize_row", f"longer than {ROW_BYTES_MAXIMUM} bytes")
    try:
        fields = json.loads(line)
        # Half a character is valid JSON, but nothing could store or read it.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return UploadedRow(number, None, "malformed_row", f"not valid JSON: {str(error)[:200]}")
    if not isinstance(fields, dict):
        return UploadedRow(number, None, "malformed_row", "not a JSON object")
    # A null column of Parquet is an absent field.
    return UploadedRow(number, {name: value for name, value in fields.items() if value is not None})


def _parquet_lines(body: bytes) -> Iterator[bytes]:
    """What the confined reader prints; its output is bounded too, since small files may unpack to anything."""
    with tempfile.TemporaryDirectory(prefix="spo-upload-") as folder:
        path, printed, said = (os.path.join(folder, name) for name in ("upload.parquet", "rows", "errors"))
        with told_when_full(folder, len(body)), open(path, "wb") as stream:
            stream.write(body)
        with open(printed, "wb") as rows, open(said, "wb") as errors:
            status = _run_confined(path, rows, errors)
        if status != 0:
            with open(said, encoding="utf-8", errors="replace") as stream:
                reason = stream.read(2000).strip().splitlines()
            limits = f"unpacks to more than {PRINTED_BYTES} bytes, or broke its reader"
            raise refused(reason[-1] if status == REFUSED and reason else limits)
        with open(printed, "rb") as lines:
            yield from lines


def _run_confined(path: str, rows: BinaryIO, errors: BinaryIO) -> int:
    command = [sys.executable, "-m", "spo.experience.parquet_child", path]
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=rows,
            stderr=errors,
            env=environment,
            timeout=READER_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return -1
