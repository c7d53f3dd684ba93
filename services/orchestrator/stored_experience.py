"""The experience store behind REST: queries, exports, pruning, and new verdicts for stored trajectories."""

from __future__ import annotations

import base64
import binascii
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pyarrow import parquet

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.scoring import WAKING_SECONDS, RowJudge, judge_versions, pools_of
from spo import api, redis_keys
from spo.errors import Conflict, FieldViolation, InvalidInput, NotFound, storage_faults_named
from spo.experience.columns import SCHEMA, StoredTrajectory, fields_of, table_of
from spo.experience.imports import ProblemIndex, UploadFormat
from spo.experience.store import ExperienceStore, Origin, StoredFile, merge, plan
from spo.messaging.redis_client import RedisClient, RedisLock
from spo.rpc.pools import JudgePools
from spo.spec.reward import is_success
from spo.spec.section import TERMINAL, decode_state, wire_name
from spo.tasks.problem import Problem
from spo.tasks.verifier import pool_of, versions_of_today
from spo.v1.prompt_pb2 import Prompt
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, Outcome

COUNTED = (
    "trajectory_id", "prompt_id", "source", "reward", "outcome", "judge_version", "licence", "content_digest",
    "response_token_ids", "segment_kinds", "segment_tokens",
)  # fmt: skip
FILTERED = ("trajectory_id", "prompt_id", "source", "reward", "outcome")

ROWS_PER_WRITE = 256
BYTES_PER_READ = 1 << 20

# The lock of a dead process expires after this; renewed with every file.
LOCK_SECONDS = 600.0

SHOWN_CHANGES = 100


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


def runs(client: RedisClient, store: ExperienceStore, scope: Scope) -> list[api.StoredRun]:
    """What is stored, by name, newest first."""
    by_run: dict[str, list[StoredFile]] = defaultdict(list)
    for file in scope.files(store):
        by_run[file.origin.run].append(file)
    found = [_run(client, run, files) for run, files in by_run.items()]
    return sorted(found, key=lambda stored: stored.stored_at, reverse=True)


def statistics(store: ExperienceStore, scope: Scope) -> api.ExperienceStatistics:
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
    return api.ExperienceStatistics(
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


def rows(store: ExperienceStore, scope: Scope, wanted: RowFilter, limit: int, cursor: str) -> api.StoredRowPage:
    """A page of rows in the order of the files. Raises InvalidInput for an unknown cursor."""
    after = _decode_cursor(cursor) if cursor else ("", -1)
    found: list[api.StoredRow] = []
    for file in scope.files(store):
        if file.path < after[0]:
            continue
        numbers = _matching(store, file, wanted, after[1] if file.path == after[0] else -1)
        taken = numbers[: limit - len(found)]
        found += [_row(file, row) for row in store.rows(file, taken)]
        if len(found) == limit:
            return api.StoredRowPage(items=found, next_cursor=_encode_cursor(file.path, taken[-1]))
    return api.StoredRowPage(items=found, next_cursor=None)


def row(store: ExperienceStore, scope: Scope, trajectory_id: str) -> api.StoredRowDetail:
    """One row with all its columns. Raises NotFound."""
    for file in scope.files(store):
        ids = store.table(file, ("trajectory_id",))["trajectory_id"].to_pylist()
        if trajectory_id in ids:
            (found,) = store.rows(file, [ids.index(trajectory_id)])
            return api.StoredRowDetail(run=file.origin.run, file=file.path, columns=fields_of(found))
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


def _run(client: RedisClient, run: str, files: Sequence[StoredFile]) -> api.StoredRun:
    newest = max(file.written_unix_ms for file in files)
    return api.StoredRun(
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


def _row(file: StoredFile, stored: StoredTrajectory) -> api.StoredRow:
    fields = fields_of(stored)
    return api.StoredRow(
        **{name: fields[name] for name in api.StoredRow.model_fields if name in fields}, run=file.origin.run
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


def exported(rows: Iterable[StoredTrajectory], upload_format: UploadFormat) -> Iterator[bytes]:
    """JSONL with a field per column, or one Parquet file with the store's columns; both can be imported again."""
    return _json_lines(rows) if upload_format == "jsonl" else _parquet(rows)


def _json_lines(rows: Iterable[StoredTrajectory]) -> Iterator[bytes]:
    for row in rows:
        yield json.dumps(fields_of(row), ensure_ascii=False).encode() + b"\n"


def _parquet(rows: Iterable[StoredTrajectory]) -> Iterator[bytes]:
    """Through a temporary file, since Parquet's footer comes last and memory must stay bounded."""
    with storage_faults_named(tempfile.gettempdir()), tempfile.TemporaryFile() as target:
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


def prune(
    client: RedisClient, store: ExperienceStore, scope: Scope, older_than_days: float | None, *, dry_run: bool
) -> api.PruneReport:
    """Remove files, or with dry_run report them. Raises InvalidInput without any filter, Conflict, NotFound."""
    if scope.run is None and scope.task_set is None and older_than_days is None:
        violation = FieldViolation("/run", "name a run, a task set or an age")
        raise InvalidInput("what is to be removed?", violations=(violation,))
    newest = (time.time() - (older_than_days or 0) * 86_400) * 1000
    with _alone(client):
        found = [file for file in scope.files(store) if older_than_days is None or file.written_unix_ms < newest]
        growing = sorted({file.origin.run for file in found if not is_complete(client, file.origin.run)})
        if growing:
            raise Conflict(f"jobs still add to {', '.join(growing)}", code="experience_in_use")
        if not dry_run:
            # First the files that were merged: without the merged file their rows would count again.
            for file in [*scope.superseded(store), *found]:
                store.remove(file)
    return api.PruneReport(
        runs=sorted({file.origin.run for file in found}),
        files=len(found),
        trajectories=sum(file.rows for file in found),
        size_bytes=sum(file.size_bytes for file in found),
        removed=not dry_run,
    )


def compact(client: RedisClient, store: ExperienceStore, scope: Scope, *, dry_run: bool) -> api.CompactReport:
    """Merge many files into few, or with dry_run count them; skips runs that jobs add to. Raises Conflict, NotFound."""
    with _alone(client) as lock:
        found = [file for file in scope.files(store) if is_complete(client, file.origin.run)]
        left_over = scope.superseded(store)
        quotas = plan(found)
        if not dry_run:
            for file in left_over if not store.is_read() else []:
                store.remove(file)
            for files in quotas:
                lock.reacquire()
                merge(store, files)
    return api.CompactReport(
        runs=sorted({files[0].origin.run for files in quotas}),
        trajectories=sum(file.rows for files in quotas for file in files),
        files_before=len(found),
        files_after=len(found) - sum(len(files) - 1 for files in quotas),
        left_over=len(left_over),
        compacted=not dry_run,
    )


@contextmanager
def _alone(client: RedisClient) -> Iterator[RedisLock]:
    lock = client.lock(own_keys.experience_maintenance(), timeout=LOCK_SECONDS, blocking=False)
    if not lock.acquire():
        raise Conflict("stored experience is being pruned or compacted; try again later", code="experience_busy")
    try:
        yield lock
    finally:
        if lock.owned():
            lock.release()


@dataclass
class Rejudging:
    """One pass over part of the store with the tests of a task set; skips rows that this judge decided by them."""

    store: ExperienceStore
    judges: JudgePools
    problems: Sequence[Problem]
    task_set: str
    name: str
    tenant: str
    writes: bool
    looked_at: int = field(default=0, init=False)
    judged: int = field(default=0, init=False)
    unknown: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    rejected: int = field(default=0, init=False)
    changes: list[api.ChangedVerdict] = field(default_factory=list, init=False)
    _seen: set[str] = field(default_factory=set, init=False)

    def run(self, scope: Scope) -> api.RejudgeReport:
        """Judge the rows and, if `writes`, store them under the new name; a second run changes nothing.

        Raises NotFound, NotReady, Unreachable.
        """
        pools = pools_of(self.problems)
        with self.judges.needed_for(pools), self.store.snapshot() as go_on:
            files = [file for file in scope.files(self.store) if file.origin.run != self.name]
            index = ProblemIndex(self.problems)
            versions = judge_versions(self.judges, pools, WAKING_SECONDS)
            judge = RowJudge(self.judges, index)
            for file in files:
                go_on()
                self._file(file, index, versions, judge)
        return api.RejudgeReport(
            run=self.name if self.writes and self.judged else None,
            looked_at=self.looked_at,
            judged=self.judged,
            unknown_problems=self.unknown,
            newly_accepted=self.accepted,
            newly_rejected=self.rejected,
            changed=self.changes,
        )

    def _file(self, file: StoredFile, index: ProblemIndex, versions: Mapping[str, str], judge: RowJudge) -> None:
        before = [row for batch in self.store.batches(file) for row in self._outdated(batch, index, versions)]
        before = [row for row in before if row.trajectory.trajectory_id not in self._seen]
        self._seen.update(row.trajectory.trajectory_id for row in before)
        after = [self._copy(row, index) for row in before]
        judge.judge(after)
        for old, new in zip(before, after, strict=True):
            self._compare(old.trajectory, new.trajectory)
        self.judged += len(after)
        if self.writes and after:
            reference_hash, licence = file.origin.reference_hash, file.origin.licence
            parents = (file.origin.run,)
            origin = Origin(self.name, "rejudge", self.task_set, reference_hash, licence, parents, self.tenant)
            self.store.write(origin, f"part-{redis_keys.digest(file.path)[:32]}", after)

    def _outdated(
        self, batch: Iterable[StoredTrajectory], index: ProblemIndex, versions: Mapping[str, str]
    ) -> Iterable[StoredTrajectory]:
        for row in batch:
            self.looked_at += 1
            problem = index.find(row.prompt.prompt_id, row.prompt.text)
            if problem is None:
                self.unknown += 1
                continue
            same_tests = problem.tests_digest == row.prompt.tests_digest
            # What an environment said in a conversation, and perhaps decided, rests on the judge of that time.
            today = versions_of_today(problem.tests, versions)
            same_judge = row.trajectory.verdict.judge_version in today or bool(row.prompt.environment)
            if not (same_tests and same_judge):
                yield row

    def _copy(self, row: StoredTrajectory, index: ProblemIndex) -> StoredTrajectory:
        problem = index.find(row.prompt.prompt_id, row.prompt.text)
        if problem is None:
            raise InvalidInput(f"no problem for {row.trajectory.trajectory_id}")
        old, new = row.trajectory, Trajectory()
        new.CopyFrom(old)
        new.ClearField("verdict")
        if problem.tests_digest != row.prompt.tests_digest:
            # The annotations count successes by the old tests.
            del new.annotations[:]
        new.trajectory_id = "traj_" + redis_keys.digest(self.name, old.trajectory_id)[:32]
        new.parents[:] = [old.trajectory_id]
        new.run_id = self.name
        new.prompt_id = problem.problem_id
        prompt = Prompt(
            prompt_id=problem.problem_id,
            text=problem.statement,
            task_set=self.task_set,
            tests_digest=problem.tests_digest,
            language=problem.language,
            response_format=problem.response_format,
            verifier_pool=pool_of(problem.tests),
            environment=row.prompt.environment,
            environment_json=row.prompt.environment_json,
        )
        return StoredTrajectory(new, prompt, row.reference_dtype)

    def _compare(self, old: Trajectory, new: Trajectory) -> None:
        before = _outcome(old)
        after = _outcome(new)
        if (before == "accepted") == (after == "accepted"):
            return
        accepted = new.verdict.outcome == OUTCOME_ACCEPTED
        self.accepted += accepted
        self.rejected += not accepted
        if len(self.changes) == SHOWN_CHANGES:
            return
        self.changes.append(
            api.ChangedVerdict(trajectory_id=old.trajectory_id, prompt_id=new.prompt_id, before=before, after=after)
        )


def _outcome(trajectory: Trajectory) -> str:
    if trajectory.HasField("verdict"):
        return wire_name(Outcome, trajectory.verdict.outcome)
    return "accepted" if is_success(trajectory.reward) else "rewarded at import"
