"""Copies trajectories from the buffer into the experience store, where they outlive the run.

Which insertion numbers a file holds is stored in Redis before the file is written, and is part of its name. So after a
crash, or beside a second replica, the same file is written again instead of another one: nothing is lost or doubled.
A Redis that was set back numbers anew: what the store has of a run beyond what Redis knows is not stored again.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from services.replay_buffer import redis_keys as own_keys
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.messaging.redis_client import RedisScript
from spo.messaging.run_status import run_tenant
from spo.observability import metrics
from spo.observability.logs import get_logger
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import TERMINAL, decode_state
from spo.v1.prompt_pb2 import Prompt
from spo.v1.trajectory_pb2 import Trajectory

log = get_logger("archiver")

POLL_SECONDS = 2.0
RUNS_PER_READ = 1000


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
        here = Path(__file__).parent.parent / "lua"
        self._plan: RedisScript[list[bytes]] = self.client.register_script((here / "archive_plan.lua").read_text())
        self._done: RedisScript[int] = self.client.register_script((here / "archive_done.lua").read_text())
        self._settle: RedisScript[int] = self.client.register_script((here / "archive_settle.lua").read_text())

    def run(self, stop: threading.Event) -> None:
        """Archive until stop is set; a store that cannot be written is tried again and delays nothing else."""
        adopted = False
        while not stop.wait(POLL_SECONDS):
            try:
                if not adopted:
                    self.adopt()
                    adopted = True
                runs = self.client.smembers(own_keys.replay_unstored())
            except redis.RedisError as error:
                log.warning("Redis does not answer; trying again", reason=str(error))
                continue
            for run_id in map(bytes.decode, runs):
                self._try(run_id)

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
                self.client.sadd(own_keys.replay_unstored(), *unstored)

    def _try(self, run_id: str) -> None:
        try:
            self.archive_when_due(run_id)
        except Exception as error:
            # Whatever it was (store full, Redis away), the buffer still has everything, and other runs go on.
            log.warning("experience is not stored yet; trying again", run=run_id, reason=str(error))

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
        metrics.REPLAY_STORED.inc(len(kept))
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
        own_keys.replay_unstored(),
    ]
