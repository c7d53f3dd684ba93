"""Between the buffer and the experience store: trajectories copied out, taken from Redis behind the window, and read
again.

Trajectories of a run that have left Redis, read from the experience store, for people and for their values.
They lack what is not stored: the hops, and a verdict's detail and CPU time. Copies of another run's experience are
stored under that run only.

Copies trajectories from the buffer into the experience store, where they outlive the run.
Which insertion numbers a file holds is stored in Redis before the file is written, and is part of its name. So after a
crash, or beside a second replica, the same file is written again instead of another one: nothing is lost or doubled.
A Redis that was set back numbers anew: what the store has of a run beyond what Redis knows is not stored again.

Takes out of Redis what no batch will ever hold again: a run's memory ends at its window.
A trajectory of a live source leaves when all of this holds: it is older than the window; the experience store has it
(where experience is stored at all); no batch that a trainer may ask for again names it; no run that follows would still
take it. Offline trajectories are bounded by the prompts and stay. Of batches those stay that a trainer may ask for
again, that count for `max_times_sampled`, and the newest BATCHES_KEPT for people. Ids stay in the ledger for another
`ledger_trajectories` inserts, so that a late redelivery is recognised.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.sampling_index import FOLLOWED_POSITION
from services.replay_buffer.settings import Settings
from services.replay_buffer.store import ReplayStore
from services.replay_buffer.windows import ids_of, read_fact, rule_of
from spo import observability, redis_keys
from spo.errors import NotFound
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin, StoredFile
from spo.messaging.redis_client import RedisClient, RedisScript
from spo.messaging.run_specs import run_state, run_tenant
from spo.messaging.streams.recovery import TroubleNotes
from spo.observability import get_logger
from spo.service.process import Worker, for_each_run
from spo.spec.job_spec import JobSpec
from spo.spec.section import LIVE_SOURCES, TERMINAL, JobState, decode_state
from spo.v1.prompt_pb2 import Prompt
from spo.v1.trajectory_pb2 import Trajectory

NARROW = ("trajectory_id", "prompt_id", "source", "created_unix_ms")
# Listing a run opens every file of it; what was listed is good for a while, as files only come.
LISTED_SECONDS = 15.0
LISTED_RUNS = 8
FILES_PER_PAGE = 8

BATCHES_KEPT = 1000
BATCHES_PER_READ = 200

log = get_logger("archiver")

POLL_SECONDS = 2.0
RUNS_PER_READ = 1000

TRIM_SECONDS = 1.0
# A pass begins when this part of a window has come in, or so many trajectories, or after so long.
PASS_SHARE = 1 / 8
PASS_TRAJECTORIES = 2048
PASS_SECONDS = 30.0
IDS_PER_READ = 1000
IDS_PER_CALL = 128
IDS_FORGOTTEN_PER_CALL = 1000


@dataclass(frozen=True)
class ArchivedPage:
    """Trajectories and where the next page begins, "" at the end."""

    trajectories: list[Trajectory]
    cursor: str


class ArchivedTrajectories:
    """What the experience store holds of runs."""

    def __init__(self, store: ExperienceStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._listed: dict[str, tuple[float, list[StoredFile]]] = {}

    def find(self, run_id: str, trajectory_ids: Sequence[str]) -> dict[str, Trajectory]:
        """Those of these trajectories that are stored, by id. Raises Unreachable, IntegrityError."""
        wanted, found = set(trajectory_ids), dict[str, Trajectory]()
        for file in reversed(self._files(run_id)):
            if len(found) == len(wanted):
                break
            ids = self.store.table(file, ("trajectory_id",))["trajectory_id"].to_pylist()
            numbers = [number for number, stored in enumerate(ids) if stored in wanted]
            found |= {row.trajectory.trajectory_id: row.trajectory for row in self.store.rows(file, numbers)}
        return found

    def page(self, run_id: str, prompt_id: str, source: str, cursor: str, limit: int) -> ArchivedPage:
        """A page of a run's stored trajectories, newest file first; empty filters ask nothing.

        cursor: "" for the first page, else what the page before said. A page may hold fewer than `limit`.
        """
        files = self._files(run_id)
        number, passed = map(int, cursor.split("-")) if cursor else (len(files) - 1, 0)
        found: list[Trajectory] = []
        for _ in range(FILES_PER_PAGE):
            if not 0 <= number < len(files):
                return ArchivedPage(found, "")
            rows = self._matching(files[number], prompt_id, source)
            taken = rows[passed : passed + limit - len(found)]
            by_id = {row.trajectory.trajectory_id: row.trajectory for row in self.store.rows(files[number], taken)}
            ordered = sorted(by_id.values(), key=lambda trajectory: -trajectory.created_unix_ms)
            found += ordered
            passed += len(taken)
            if passed >= len(rows):
                number, passed = number - 1, 0
            if len(found) == limit:
                break
        return ArchivedPage(found, f"{number}-{passed}" if number >= 0 else "")

    def _matching(self, file: StoredFile, prompt_id: str, source: str) -> list[int]:
        """Numbers of the rows that pass the filters, the newest first."""
        columns = self.store.table(file, NARROW).to_pylist()
        numbers = [
            number
            for number, row in enumerate(columns)
            if prompt_id in ("", row["prompt_id"]) and source in ("", row["source"])
        ]
        return sorted(numbers, key=lambda number: -columns[number]["created_unix_ms"])

    def _files(self, run_id: str) -> list[StoredFile]:
        """The run's own files in the order in which they were written."""
        with self._lock:
            at, files = self._listed.pop(run_id, (float("-inf"), []))
            if time.monotonic() - at > LISTED_SECONDS:
                at = time.monotonic()
                found = [file for file in self.store.files(run_id) if file.origin.kind == "run"]
                # Their names say which insertion numbers they hold.
                files = sorted(found, key=lambda file: (file.name, file.path))
            self._listed[run_id] = at, files
            for oldest in list(self._listed)[:-LISTED_RUNS]:
                del self._listed[oldest]
            return files


class BatchRecords:
    """The log of batches as of the last `refresh`, for one pass."""

    def __init__(self, client: RedisClient, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        # Number of the last batch that is known.
        self.drawn = 0
        self._steps: list[int] = []
        self._named: set[str] = set()
        self._named_read = 0
        self._named_after: int | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the batches that were recorded since."""
        drawn = int(self.client.hget(redis_keys.replay_counters(self.run_id), "drawn") or 0)
        found = self.client.zrangebyscore(redis_keys.replay_batch_log(self.run_id), f"({self.drawn}", drawn)
        self._steps += map(int, found)
        self.drawn = drawn

    def named_after(self, step: int) -> frozenset[str] | set[str]:
        """Ids of the trajectories in batches of later steps."""
        if self._named_after != step:
            self._named, self._named_read, self._named_after = set(), 0, step
        later = [known for known in self._steps[self._named_read :] if known > step]
        self._named_read = len(self._steps)
        for ids in self._read(later):
            self._named.update(ids)
        return self._named

    def forget(self, step: int, *, keep_named: bool) -> int:
        """Remove the records up to a step but for the newest BATCHES_KEPT; returns how many.

        keep_named: also keep those with a trajectory that may still be sampled, since they count how often it was.
        """
        old = [known for known in self._steps[:-BATCHES_KEPT] if known <= step]
        removed = 0
        for start in range(0, len(old), BATCHES_PER_READ):
            chunk = old[start : start + BATCHES_PER_READ]
            if keep_named:
                pairs = zip(chunk, self._read(chunk), strict=True)
                chunk = [known for known, ids in pairs if not self._any_live(ids)]
            if not chunk:
                continue
            with self.client.pipeline(transaction=True) as pipe:
                pipe.zrem(redis_keys.replay_batch_log(self.run_id), *map(str, chunk))
                pipe.delete(*(redis_keys.replay_batch(self.run_id, known) for known in chunk))
                pipe.execute()
            removed += len(chunk)
        return removed

    def _any_live(self, ids: list[str]) -> bool:
        if not ids:
            return False
        found = self.client.zmscore(redis_keys.replay_source(self.run_id, "online"), ids)
        shared = self.client.zmscore(redis_keys.replay_source(self.run_id, "shared"), ids)
        return any(number is not None for number in (*found, *shared))

    def _read(self, steps: list[int]) -> list[list[str]]:
        found: list[list[str]] = []
        for start in range(0, len(steps), BATCHES_PER_READ):
            keys = [redis_keys.replay_batch(self.run_id, step) for step in steps[start : start + BATCHES_PER_READ]]
            found += map(ids_of, self.client.mget(keys))
        return found


@dataclass(frozen=True)
class FollowingRun:
    """Its position in the followed run's ledger, and the oldest version of that run that it still takes."""

    position: int
    oldest_version: int

    def would_take(self, number: int, version: int) -> bool:
        """Whether it will copy a trajectory of this insertion number and version when it comes there."""
        return number > self.position and version >= self.oldest_version


def runs_following(store: ReplayStore, run_id: str) -> list[FollowingRun]:
    """The runs that have not ended and follow this one."""
    client = store.client
    with client.pipeline(transaction=False) as pipe:
        for state in JobState:
            if state not in TERMINAL:
                pipe.zrange(redis_keys.jobs_in_state(state), 0, -1)
        unfinished = [member.decode() for members in pipe.execute() for member in members]
    newest = int(client.hget(redis_keys.replay_counters(run_id), "policy_version") or 0)
    found = []
    for follower in unfinished:
        try:
            spec = store.spec(follower)
        except NotFound:
            continue
        if spec.rollout.follow == run_id:
            position = int(client.hget(redis_keys.replay_counters(follower), FOLLOWED_POSITION) or 0)
            ages = (spec.replay.max_staleness, rule_of(spec, "shared").max_age_versions)
            oldest = newest - min(age for age in ages if age is not None)
            found.append(FollowingRun(position, oldest))
    return found


@dataclass(frozen=True)
class Beyond:
    """Trajectory ids and names of files."""

    ids: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


_NOTHING = Beyond()
_PART = re.compile(r"part-\d+-(?P<last>\d+)")


class ExperienceArchiver:
    """Writes a file of a run when it is full, when every_seconds have passed, or when the run has ended."""

    def __init__(
        self, store: ReplayStore, experience: ExperienceStore, rows_per_file: int, every_seconds: float
    ) -> None:
        self.store = store
        self.client = store.client
        self.experience = experience
        self.rows_per_file = rows_per_file
        self.every_seconds = every_seconds
        self._archived_at: dict[str, float] = {}
        # By run: how far it was stored when it was looked at last, and what the store has of it beyond that.
        self._written: dict[str, int] = {}
        self._beyond: dict[str, Beyond] = {}
        self._notes = TroubleNotes(self.client)
        here = Path(__file__).parent / "lua"
        self._plan: RedisScript[list[bytes]] = self.client.register_script((here / "archive_plan.lua").read_text())
        self._done: RedisScript[int] = self.client.register_script((here / "archive_done.lua").read_text())
        self._settle: RedisScript[int] = self.client.register_script((here / "archive_settle.lua").read_text())

    def run(self, stop: threading.Event) -> None:
        """Archive until stop is set; a store that cannot be written is tried again and delays nothing else."""
        for_each_run(
            self.archive_or_tell,
            lambda: self.client.smembers(redis_keys.replay_unstored()),
            stop,
            POLL_SECONDS,
            "experience is not stored yet",
            first=self.adopt,
        )

    def _unstored(self) -> list[str]:
        """Runs are stored one after the other: what holds up one holds up all of these."""
        return [run_id.decode() for run_id in self.client.smembers(redis_keys.replay_unstored())]

    def adopt(self) -> None:
        """List the runs with unarchived trajectories that an older version of this service did not list."""
        runs = self.client.zrange(redis_keys.job_index(), 0, -1)
        for start in range(0, len(runs), RUNS_PER_READ):
            chunk = [run_id.decode() for run_id in runs[start : start + RUNS_PER_READ]]
            with self.client.pipeline(transaction=False) as pipe:
                for run_id in chunk:
                    pipe.hget(redis_keys.replay_counters(run_id), "number")
                    pipe.hget(redis_keys.replay_stored(run_id), "written")
                found = pipe.execute()
            counts = zip(chunk, found[::2], found[1::2], strict=True)
            unstored = [run_id for run_id, number, written in counts if int(number or 0) > int(written or 0)]
            if unstored:
                self.client.sadd(redis_keys.replay_unstored(), *unstored)

    def archive_or_tell(self, run_id: str) -> None:
        """`archive_when_due`; what goes wrong is a wait reason of the job."""
        try:
            self.archive_when_due(run_id)
        except redis.RedisError:
            raise
        except Exception as error:
            # Whatever it was (a full store), the buffer still has everything.
            self._notes.note(run_id, "experience", f"is not stored yet: {error}")
            raise

    def archive_when_due(self, run_id: str) -> None:
        """Store what a run has gathered if it is time to. Raises SpoError, RedisError."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.get(redis_keys.run_state(run_id))
            pipe.hget(redis_keys.replay_counters(run_id), "number")
            pipe.hget(redis_keys.replay_stored(run_id), "written")
            state, number, written = pipe.execute()
        ended = decode_state(state) in TERMINAL
        waiting = int(number or 0) - int(written or 0)
        since = time.monotonic() - self._archived_at.setdefault(run_id, time.monotonic())
        if waiting > 0 and (ended or waiting >= self.rows_per_file or since > self.every_seconds):
            with self._notes.while_it_lasts(self._unstored, "experience", f"is not stored yet: {self.experience.url}"):
                self.archive(run_id)
            self._archived_at[run_id] = time.monotonic()
            waiting = 0
        if waiting <= 0 and self._settle(keys=_settled_keys(run_id), args=[run_id]):
            for known in (self._archived_at, self._written, self._beyond):
                known.pop(run_id, None)

    def archive(self, run_id: str) -> int:
        """Write all that a run's ledger holds by now; returns how many trajectories this call wrote.

        What comes meanwhile waits for the next call: one busy run must not keep the others waiting.
        """
        last = int(self.client.hget(redis_keys.replay_counters(run_id), "number") or 0)
        stored = 0
        while True:
            written, planned = self._next_file(run_id)
            if planned == written or written >= last:
                return stored
            stored += self._write(run_id, written, planned)
            self._done(keys=[redis_keys.replay_stored(run_id)], args=[written, planned])

    def _next_file(self, run_id: str) -> tuple[int, int]:
        key = redis_keys.replay_stored(run_id)
        stored = self.client.hget(key, "written")
        written = int(stored or 0)
        numbers = self.client.zrangebyscore(
            redis_keys.replay_ids(run_id), f"({written}", "+inf", start=0, num=self.rows_per_file, withscores=True
        )
        if not numbers:
            return written, written
        planned = self._plan(keys=[key], args=[written, int(numbers[-1][1])])
        return int(planned[0]), int(planned[1])

    def _write(self, run_id: str, written: int, planned: int) -> int:
        ids = self.client.zrangebyscore(redis_keys.replay_ids(run_id), f"({written}", planned)
        found = self.store.get(run_id, [trajectory_id.decode() for trajectory_id in ids])
        beyond = self._stored_beyond(run_id, written)
        own = [trajectory for trajectory in found if trajectory is not None and not trajectory.origin_run_id]
        kept = [trajectory for trajectory in own if trajectory.trajectory_id not in beyond.ids]
        if None in found:
            log.error("trajectories are gone from the buffer", run=run_id, missing=found.count(None))
        spec = self.store.spec(run_id)
        by_reference: dict[str, list[StoredTrajectory]] = defaultdict(list)
        for row in self._rows(run_id, spec, kept):
            by_reference[row.trajectory.reference_hash].append(row)
        tenant = run_tenant(self.client, run_id) or ""
        for reference_hash, rows in by_reference.items():
            origin = Origin(run_id, "run", spec.tasks.kind, reference_hash, tenant=tenant)
            name = f"part-{written + 1:012d}-{planned:012d}"
            if name in beyond.names:
                # Of the rows that Redis lost; they stay, and these come beside them.
                name += f"-{redis_keys.digest(*(row.trajectory.trajectory_id for row in rows))[:16]}"
            self.experience.write(origin, name, rows)
        self._written[run_id] = planned
        observability.REPLAY_STORED.inc(len(kept))
        return len(kept)

    def _stored_beyond(self, run_id: str, written: int) -> Beyond:
        """What the store has of a run beyond what Redis knows: an earlier try's, or of a Redis that was set back."""
        if run_id not in self._written or written < self._written[run_id]:
            ids: set[str] = set()
            names: set[str] = set()
            for file in self.experience.files(run_id):
                part = _PART.match(file.name)
                if file.origin.kind == "run" and (part is None or int(part["last"]) > written):
                    # A file by the name of one that was merged would not count.
                    names.update(name.removesuffix(".parquet") for name in (file.name, *file.merged))
                    ids.update(self.experience.table(file, ["trajectory_id"])["trajectory_id"].to_pylist())
            self._beyond[run_id] = Beyond(frozenset(ids), frozenset(names))
            self._written[run_id] = written
        return self._beyond.get(run_id, _NOTHING)

    def _rows(self, run_id: str, spec: JobSpec, found: Sequence[Trajectory]) -> list[StoredTrajectory]:
        prompts = self._prompts(run_id, spec, sorted({trajectory.prompt_id for trajectory in found}))
        return [
            StoredTrajectory(
                trajectory, prompts[trajectory.prompt_id], spec.model.dtype if trajectory.reference_hash else ""
            )
            for trajectory in found
        ]

    def _prompts(self, run_id: str, spec: JobSpec, prompt_ids: Sequence[str]) -> dict[str, Prompt]:
        stored = self.client.hmget(redis_keys.run_prompts(run_id), list(prompt_ids)) if prompt_ids else []
        return {
            prompt_id: Prompt.FromString(raw) if raw else Prompt(prompt_id=prompt_id, task_set=spec.tasks.kind)
            for prompt_id, raw in zip(prompt_ids, stored, strict=True)
        }


def _settled_keys(run_id: str) -> list[str]:
    return [
        redis_keys.replay_counters(run_id),
        redis_keys.replay_stored(run_id),
        redis_keys.replay_unstored(),
    ]


@dataclass(frozen=True)
class RunFacts:
    """Where a run stands: last insertion number, last one in the experience store, what a trainer may resume from."""

    number: int
    stored: int
    has_ended: bool
    resumed_step: int
    resumed_version: int


class WindowTrimmer:
    """Trims every run that gets trajectories, some time after they came; several may work at once."""

    def __init__(self, sampler: BatchSampler, settings: Settings) -> None:
        self.sampler = sampler
        self.store = sampler.store
        self.client = sampler.store.client
        self.settings = settings
        # Per run: when it was looked at last, how far the ledger was then, since when it has ended.
        self._looked: dict[str, tuple[float, int]] = {}
        self._ended: dict[str, float] = {}
        here = Path(__file__).parent / "lua"
        self._trim: RedisScript[int] = self.client.register_script((here / "trim.lua").read_text())
        self._remember: RedisScript[int] = self.client.register_script((here / "remember.lua").read_text())
        self._forget: RedisScript[int] = self.client.register_script((here / "forget.lua").read_text())
        self._note_equal: RedisScript[int] = self.client.register_script((here / "note_equal.lua").read_text())

    def run(self, stop: threading.Event) -> None:
        """Trim until stop is set; a run that fails is tried again and delays no other."""
        # Whatever goes wrong, nothing is lost by what stays.
        for_each_run(
            self.trim_when_due,
            lambda: self.client.smembers(redis_keys.replay_untrimmed()),
            stop,
            TRIM_SECONDS,
            "a run keeps what it might let go of",
        )

    def trim_when_due(self, run_id: str) -> int:
        """Trim a run if enough has come since the last time; returns how many trajectories left Redis."""
        if not self.client.exists(redis_keys.run_spec(run_id)):
            # Deleted: the orchestrator removes its keys.
            self._let_go(run_id)
            return 0
        spec = self.store.spec(run_id)
        facts = self._facts(run_id)
        looked_at, number = self._looked.get(run_id, (float("-inf"), 0))
        enough = min(PASS_TRAJECTORIES, max(1, int(spec.replay.online_capacity * PASS_SHARE)))
        if facts.number - number < enough and time.monotonic() - looked_at < PASS_SECONDS:
            return 0
        self._looked[run_id] = time.monotonic(), facts.number
        trimmed = self.trim(run_id, facts)
        left = (chunk for source in (*LIVE_SOURCES, "memory") for chunk in self._below(run_id, source, facts))
        if self._is_over(run_id, facts) and not any(left):
            self._let_go(run_id)
        return trimmed

    def trim(self, run_id: str, facts: RunFacts | None = None) -> int:
        """Take out all that may leave now; returns how many trajectories left Redis."""
        facts = facts or self._facts(run_id)
        batches = BatchRecords(self.client, run_id)
        followers = runs_following(self.store, run_id)
        trimmed = 0
        members = self._members(run_id, facts)
        for source in (*sorted(LIVE_SOURCES), "memory"):
            for chunk in self._below(run_id, source, facts):
                leaving = [pair for pair in chunk if pair[0] not in members]
                if len(leaving) < len(chunk) and source != "memory":
                    self._move_to_memory(run_id, source, [pair for pair in chunk if pair[0] in members])
                trimmed += self._take_out(run_id, source, leaving, facts, batches, followers)
        times_count = self.store.spec(run_id).replay.max_times_sampled is not None
        batches.forget(facts.resumed_step, keep_named=times_count)
        self._forget_ids(run_id, facts)
        if trimmed:
            log.debug("trajectories left Redis", run=run_id, trajectories=trimmed)
        return trimmed

    def _below(self, run_id: str, source: str, facts: RunFacts) -> Iterator[list[tuple[str, int]]]:
        """Chunks of (id, insertion number) below the window of a source and in the experience store."""
        index = self.sampler.index(run_id)
        kept: set[str] = set()
        if self._is_over(run_id, facts) or source == "memory":
            # What is in memory's set has left its window already.
            start = facts.number + 1
        else:
            with index.lock:
                index.refresh([source])
                start = index.window_start(source, facts.resumed_version)
                kept = index.groups_in_window(source)
                counted = index.read_to(source), index.without_contrast(source)
            if index.rule(source).contrast_only:
                # Who reads the ledger after this no longer meets them all.
                self._note_equal(keys=[redis_keys.replay_counters(run_id)], args=counted)
        last = min(start - 1, facts.stored if self.settings.store_experience else facts.number)
        after = 0
        while after < last:
            found = self.client.zrangebyscore(
                redis_keys.replay_source(run_id, source), f"({after}", last, start=0, num=IDS_PER_READ, withscores=True
            )
            if not found:
                return
            numbered = [(trajectory_id.decode(), int(number)) for trajectory_id, number in found]
            leaving = [pair for pair in numbered if pair[0] not in kept]
            if leaving:
                yield leaving
            after = numbered[-1][1]

    def _members(self, run_id: str, facts: RunFacts) -> set[str]:
        """Ids of what memory holds. What is no member now never becomes one: only newer answers do."""
        spec = self.store.spec(run_id)
        if not spec.replay.remembers or self._is_over(run_id, facts):
            return set()
        index = self.sampler.index(run_id)
        with index.lock:
            index.refresh(["memory"])
            return index.memory.members()

    def _move_to_memory(self, run_id: str, source: str, chunk: Sequence[tuple[str, int]]) -> None:
        keys = [redis_keys.replay_facts(run_id), *(redis_keys.replay_source(run_id, s) for s in (source, "memory"))]
        for start in range(0, len(chunk), IDS_PER_CALL):
            self._remember(keys=keys, args=[word for pair in chunk[start : start + IDS_PER_CALL] for word in pair])

    def _take_out(
        self,
        run_id: str,
        source: str,
        chunk: Sequence[tuple[str, int]],
        facts: RunFacts,
        batches: BatchRecords,
        followers: Sequence[FollowingRun],
    ) -> int:
        if followers and source == "online":
            chunk = self._unwanted(run_id, chunk, followers)
        trimmed = 0
        for start in range(0, len(chunk), IDS_PER_CALL):
            while True:
                # Nobody resumes an ended job.
                named = batches.named_after(facts.resumed_step) if not facts.has_ended else frozenset[str]()
                drawn = batches.drawn
                going = [pair for pair in chunk[start : start + IDS_PER_CALL] if pair[0] not in named]
                arguments = [word for pair in going for word in pair]
                result = self._trim(keys=_trim_keys(run_id, source), args=[drawn, *arguments]) if going else 0
                if result >= 0:
                    break
                batches.refresh()
            trimmed += result
        return trimmed

    def _unwanted(
        self, run_id: str, chunk: Sequence[tuple[str, int]], followers: Sequence[FollowingRun]
    ) -> list[tuple[str, int]]:
        found = self.client.hmget(redis_keys.replay_facts(run_id), [trajectory_id for trajectory_id, _ in chunk])
        versions = [read_fact("", fact.decode())[0].version if fact else 0 for fact in found]
        return [
            pair
            for pair, version in zip(chunk, versions, strict=True)
            if not any(follower.would_take(pair[1], version) for follower in followers)
        ]

    def _forget_ids(self, run_id: str, facts: RunFacts) -> None:
        last = facts.number - (0 if self._is_over(run_id, facts) else self.settings.ledger_trajectories)
        keys = [redis_keys.replay_ids(run_id), redis_keys.replay_facts(run_id), redis_keys.replay_counters(run_id)]
        while last > 0 and self._forget(keys=keys, args=[last, IDS_FORGOTTEN_PER_CALL]) == IDS_FORGOTTEN_PER_CALL:
            pass

    def _facts(self, run_id: str) -> RunFacts:
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hget(redis_keys.replay_counters(run_id), "number")
            pipe.hget(redis_keys.replay_stored(run_id), "written")
            pipe.hgetall(redis_keys.job_checkpoints(run_id))
            number, stored, checkpoints = pipe.execute()
        kept = [json.loads(record) for record in checkpoints.values()]
        return RunFacts(
            int(number or 0),
            int(stored or 0),
            run_state(self.client, run_id) in TERMINAL,
            min((int(record["step"]) for record in kept), default=0),
            min((int(record.get("weight_version", 0)) for record in kept), default=0),
        )

    def _is_over(self, run_id: str, facts: RunFacts) -> bool:
        """Whether an ended run needs no window: all is stored, nothing of it is under way, people had time to look."""
        if not (facts.has_ended and self.settings.store_experience and facts.stored >= facts.number):
            self._ended.pop(run_id, None)
            return False
        since = self._ended.setdefault(run_id, time.monotonic())
        return (
            time.monotonic() - since >= self.settings.ended_seconds
            and not self.client.hlen(redis_keys.entries_in_flight(run_id))
            and not self.client.xlen(redis_keys.prompts(run_id))
        )

    def _let_go(self, run_id: str) -> None:
        self.client.srem(redis_keys.replay_untrimmed(), run_id)
        self._looked.pop(run_id, None)
        self._ended.pop(run_id, None)


def _trim_keys(run_id: str, source: str) -> list[str]:
    return [
        redis_keys.replay_ids(run_id),
        redis_keys.replay_facts(run_id),
        redis_keys.replay_prompts(run_id),
        redis_keys.replay_counters(run_id),
        redis_keys.replay_source(run_id, source),
        redis_keys.replay_trajectory(run_id, ""),
    ]


def archive_reader(settings: Settings) -> ArchivedTrajectories | None:
    """What reads trajectories that have left Redis; None where none are stored. Raises InvalidInput."""
    return ArchivedTrajectories(ExperienceStore(settings.experience_place)) if settings.store_experience else None


def archive_workers(sampler: BatchSampler, settings: Settings) -> list[Worker]:
    """What keeps Redis within the window and, unless switched off, stores experience first. Raises InvalidInput."""
    trimmer = WindowTrimmer(sampler, settings)
    if not settings.store_experience:
        return [trimmer.run]
    store = ExperienceStore(settings.experience_place)
    archiver = ExperienceArchiver(sampler.store, store, settings.stored_rows_per_file, settings.store_seconds)
    return [trimmer.run, archiver.run]
