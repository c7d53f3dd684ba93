"""Fewer, larger files: runs that store every minute leave thousands of small ones, each of which every look must open.

A merged file names those it was made of, and from the moment it is there they do not count: readers meet each row once,
whatever dies in between. What a dead compaction left is removed by the next one. Callers keep others from pruning or
compacting at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import pyarrow

from spo import redis_keys
from spo.experience.columns import SCHEMA
from spo.experience.store import ExperienceStore, Origin, StoredFile

# A merged file; larger ones are left as they are.
MERGED_ROWS = 16_384
MERGED_BYTES = 64 << 20


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
