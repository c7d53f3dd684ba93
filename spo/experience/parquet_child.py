"""Reads one Parquet file that nobody vouches for: `python -m spo.experience.parquet_child FILE`.

A process of its own, confined in memory, time and output: what a hostile file does to the reader ends here. Prints one
JSON object per row; refuses whatever is not a flat table of text, numbers and lists of them.
Exit status 3 with a reason on standard error when the file is refused.
"""

from __future__ import annotations

import json
import resource
import sys

import pyarrow
from pyarrow import parquet

REFUSED = 3
MEMORY_BYTES = 3 << 30
PRINTED_BYTES = 2 << 30
CPU_SECONDS = 300
ROWS_PER_READ = 64
_LIMITS = {
    resource.RLIMIT_AS: MEMORY_BYTES,
    resource.RLIMIT_FSIZE: PRINTED_BYTES,
    resource.RLIMIT_CPU: CPU_SECONDS,
    resource.RLIMIT_CORE: 0,
}
_SCALARS = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_integer,
    pyarrow.types.is_floating,
    pyarrow.types.is_boolean,
    pyarrow.types.is_null,
)
_LISTS = (pyarrow.types.is_list, pyarrow.types.is_large_list)


def main(path: str) -> int:
    """Print the file's rows; returns the exit status."""
    for limit, most in _LIMITS.items():
        resource.setrlimit(limit, (most, most))
    try:
        with parquet.ParquetFile(path) as file:
            surprise = _surprise(file.schema_arrow)
            if surprise:
                print(surprise, file=sys.stderr)
                return REFUSED
            for batch in file.iter_batches(ROWS_PER_READ):
                for row in batch.to_pylist():
                    # Numbers that JSON does not know become words, which no schema takes for numbers.
                    print(json.dumps(row, default=str))
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        print(f"not a readable Parquet file: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        return REFUSED
    return 0


def _surprise(schema: pyarrow.Schema) -> str:
    if len(set(schema.names)) < len(schema.names):
        return "two columns have the same name"
    for field in schema:
        inner = field.type.value_type if any(check(field.type) for check in _LISTS) else field.type
        if isinstance(inner, pyarrow.BaseExtensionType) or not any(check(inner) for check in _SCALARS):
            return f"column {field.name!r} is of type {str(field.type)[:100]}; only text, numbers and lists of them are"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
