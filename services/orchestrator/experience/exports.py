"""Stored trajectories as a file, streamed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator

from pyarrow import parquet

from spo.disk_space import told_when_full
from spo.experience.columns import SCHEMA, StoredTrajectory, fields_of, table_of
from spo.experience.uploads import UploadFormat

ROWS_PER_WRITE = 256
BYTES_PER_READ = 1 << 20


def exported(rows: Iterable[StoredTrajectory], upload_format: UploadFormat) -> Iterator[bytes]:
    """JSONL with a field per column, or one Parquet file with the store's columns; both can be imported again."""
    return _json_lines(rows) if upload_format == "jsonl" else _parquet(rows)


def _json_lines(rows: Iterable[StoredTrajectory]) -> Iterator[bytes]:
    for row in rows:
        yield json.dumps(fields_of(row), ensure_ascii=False).encode() + b"\n"


def _parquet(rows: Iterable[StoredTrajectory]) -> Iterator[bytes]:
    """Through a temporary file, since Parquet's footer comes last and memory must stay bounded."""
    with told_when_full(tempfile.gettempdir()), tempfile.TemporaryFile() as target:
        with parquet.ParquetWriter(target, SCHEMA, compression="zstd") as writer:
            chunk: list[StoredTrajectory] = []
            for row in rows:
                chunk.append(row)
                if len(chunk) == ROWS_PER_WRITE:
                    writer.write_table(table_of(chunk))
                    chunk = []
            writer.write_table(table_of(chunk))
        target.seek(0)
        while chunk_of_file := target.read(BYTES_PER_READ):
            yield chunk_of_file
