"""Queries of the experience store: runs, counts, rows, each within one tenant's experience."""

from __future__ import annotations

import base64
import binascii
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from services.orchestrator.schemas import experience as schemas
from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput, NotFound
from spo.experience.columns import StoredTrajectory, fields_of
from spo.experience.store import ExperienceStore, StoredFile
from spo.messaging.redis_client import RedisClient
from spo.spec.job_state import TERMINAL, decode_state
from spo.spec.reward import is_success

COUNTED = (
    "trajectory_id", "prompt_id", "source", "reward", "outcome", "judge_version", "licence", "content_digest",
    "response_token_ids", "segment_kinds", "segment_tokens",
)  # fmt: skip
FILTERED = ("trajectory_id", "prompt_id", "source", "reward", "outcome")


@dataclass(frozen=True)
class Scope:
    """Part of the store: one run's or task set's files, of one tenant (None: of all)."""

    tenant: str | None
    run: str | None = None
    task_set: str | None = None

    def files(self, store: ExperienceStore) -> list[StoredFile]:
        """Its files in order of path. Raises NotFound for a named run without files."""
        found = [file for file in store.files(self.run, self.task_set) if self.tenant in (None, file.origin.tenant)]
        if self.run is not None and not found:
            raise NotFound(f"nothing is stored under the name {self.run}", code="experience_not_found")
        return found

    def superseded(self, store: ExperienceStore) -> list[StoredFile]:
        """Its files that an interrupted compaction left behind: their rows are in a merged file already."""
        found = store.superseded(self.run, self.task_set)
        return [file for file in found if self.tenant in (None, file.origin.tenant)]


@dataclass(frozen=True)
class RowFilter:
    """Filter on rows; empty fields ask nothing."""

    prompt_id: str = ""
    source: str = ""
    right: bool | None = None

    def takes(self, row: Mapping[str, Any]) -> bool:
        return (
            self.prompt_id in ("", row["prompt_id"])
            and self.source in ("", row["source"])
            and self.right in (None, is_success(row["reward"], outcome=row["outcome"]))
        )


def runs(client: RedisClient, store: ExperienceStore, scope: Scope) -> list[schemas.StoredRun]:
    """What is stored, by name, newest first."""
    by_run: dict[str, list[StoredFile]] = defaultdict(list)
    for file in scope.files(store):
        by_run[file.origin.run].append(file)
    found = [_run(client, run, files) for run, files in by_run.items()]
    return sorted(found, key=lambda stored: stored.stored_at, reverse=True)


def statistics(store: ExperienceStore, scope: Scope) -> schemas.ExperienceStatistics:
    """Counts over a part of the store; a trajectory that is stored twice counts once."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seen: set[str] = set()
    solved: set[str] = set()
    distinct: set[tuple[str, str]] = set()
    tokens = 0
    for file, rows_of_file in _counted(store, scope):
        for row in rows_of_file:
            if row["trajectory_id"] in seen:
                continue
            seen.add(row["trajectory_id"])
            counts["runs"][file.origin.run] += 1
            counts["prompts"][row["prompt_id"]] += 1
            counts["sources"][row["source"]] += 1
            counts["outcomes"][row["outcome"] or "not judged"] += 1
            counts["judge_versions"][row["judge_version"] or "not judged"] += 1
            counts["licences"][row["licence"] or "made here"] += 1
            distinct.add((row["prompt_id"], row["content_digest"]))
            tokens += _trained_tokens(row)
            if is_success(row["reward"], outcome=row["outcome"]):
                solved.add(row["prompt_id"])
                counts["right"]["right"] += 1
    shown = ("runs", "sources", "outcomes", "judge_versions", "licences")
    return schemas.ExperienceStatistics(
        trajectories=len(seen),
        right=counts["right"]["right"],
        prompts=len(counts["prompts"]),
        prompts_with_success=len(solved),
        distinct_responses=len(distinct),
        response_tokens=tokens,
        **{name: dict(counts[name].most_common()) for name in shown},
    )


def _counted(store: ExperienceStore, scope: Scope) -> Iterator[tuple[StoredFile, list[dict[str, Any]]]]:
    with store.snapshot() as go_on:
        for file in scope.files(store):
            go_on()
            yield file, store.table(file, COUNTED).to_pylist()


def rows(store: ExperienceStore, scope: Scope, wanted: RowFilter, limit: int, cursor: str) -> schemas.StoredRowPage:
    """A page of rows in the order of the files. Raises InvalidInput for an unknown cursor."""
    after = _decode_cursor(cursor) if cursor else ("", -1)
    found: list[schemas.StoredRow] = []
    for file in scope.files(store):
        if file.path < after[0]:
            continue
        numbers = _matching(store, file, wanted, after[1] if file.path == after[0] else -1)
        taken = numbers[: limit - len(found)]
        found += [_row(file, row) for row in store.rows(file, taken)]
        if len(found) == limit:
            return schemas.StoredRowPage(items=found, next_cursor=_encode_cursor(file.path, taken[-1]))
    return schemas.StoredRowPage(items=found, next_cursor=None)


def row(store: ExperienceStore, scope: Scope, trajectory_id: str) -> schemas.StoredRowDetail:
    """One row with all its columns. Raises NotFound."""
    for file in scope.files(store):
        ids = store.table(file, ("trajectory_id",))["trajectory_id"].to_pylist()
        if trajectory_id in ids:
            (found,) = store.rows(file, [ids.index(trajectory_id)])
            return schemas.StoredRowDetail(run=file.origin.run, file=file.path, columns=fields_of(found))
    raise NotFound(f"no trajectory {trajectory_id} is stored", code="experience_not_found")


def every_row(store: ExperienceStore, scope: Scope, wanted: RowFilter) -> Iterator[StoredTrajectory]:
    """All rows that pass the filter, one per trajectory."""
    seen: set[str] = set()
    with store.snapshot() as go_on:
        for batch in (batch for file in scope.files(store) for batch in store.batches(file)):
            go_on()
            for stored in batch:
                fields = {name: value for name, value in fields_of(stored).items() if name in FILTERED}
                if wanted.takes(fields) and stored.trajectory.trajectory_id not in seen:
                    seen.add(stored.trajectory.trajectory_id)
                    yield stored


def is_complete(client: RedisClient, run: str) -> bool:
    """Whether no job will store more under this name: it is no job's, or the job has ended and everything is stored."""
    with client.pipeline(transaction=False) as pipe:
        pipe.get(redis_keys.run_state(run))
        pipe.hget(redis_keys.replay_counters(run), "number")
        pipe.hget(redis_keys.replay_stored(run), "written")
        state, number, written = pipe.execute()
    return state is None or (decode_state(state) in TERMINAL and int(written or 0) >= int(number or 0))


def is_on_its_way(client: RedisClient, run: str) -> bool:
    """Whether a job has ended and part of what it gathered is still to be stored."""
    state = client.get(redis_keys.run_state(run))
    return state is not None and decode_state(state) in TERMINAL and not is_complete(client, run)


def _trained_tokens(row: Mapping[str, Any]) -> int:
    """Response tokens that the policy sampled, of a row of COUNTED."""
    said = zip(row["segment_kinds"] or (), row["segment_tokens"] or (), strict=True)
    observed: int = sum(tokens for kind, tokens in said if kind != "action")
    return len(row["response_token_ids"] or ()) - observed


def _run(client: RedisClient, run: str, files: Sequence[StoredFile]) -> schemas.StoredRun:
    newest = max(file.written_unix_ms for file in files)
    return schemas.StoredRun(
        run=run,
        kind=files[0].origin.kind,
        task_sets=sorted({file.origin.task_set for file in files}),
        reference_hashes=sorted({file.origin.reference_hash for file in files if file.origin.reference_hash}),
        trajectories=sum(file.rows for file in files),
        files=len(files),
        size_bytes=sum(file.size_bytes for file in files),
        licence=", ".join(sorted({file.origin.licence for file in files if file.origin.licence})),
        parents=sorted({parent for file in files for parent in file.origin.parents}),
        stored_at=datetime.fromtimestamp(newest / 1000, UTC).isoformat(timespec="milliseconds"),
        complete=is_complete(client, run),
    )


def _matching(store: ExperienceStore, file: StoredFile, wanted: RowFilter, after: int) -> list[int]:
    found = store.table(file, FILTERED).to_pylist()
    return [number for number, row in enumerate(found) if number > after and wanted.takes(row)]


def _row(file: StoredFile, stored: StoredTrajectory) -> schemas.StoredRow:
    fields = fields_of(stored)
    return schemas.StoredRow(
        **{name: fields[name] for name in schemas.StoredRow.model_fields if name in fields}, run=file.origin.run
    )


def _encode_cursor(path: str, number: int) -> str:
    return base64.urlsafe_b64encode(f"{number}:{path}".encode()).decode()


def _decode_cursor(cursor: str) -> tuple[str, int]:
    try:
        number, _, path = base64.urlsafe_b64decode(cursor).decode().partition(":")
        return path, int(number)
    except (binascii.Error, ValueError):
        violation = FieldViolation("/cursor", "is not one of ours")
        raise InvalidInput("the cursor is not one of ours", violations=(violation,)) from None
