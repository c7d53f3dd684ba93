"""A manifest of each job in the state place: enough to say what was lost, and to make the job's records again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.checkpoints import CheckpointRecord
from services.orchestrator.jobs.commit import timestamp
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.recovery.files import read_json, write_json
from spo import redis_keys
from spo.messaging.redis_client import StreamEntry
from spo.service.state_place import StatePlace
from spo.spec.job_state import TERMINAL, JobState
from spo.spec.stored import record_of

FOLDER = "jobs"
JOBS_PER_READ = 200
# Of a job that only trains the manifest is written again after so many more events.
STALE_EVENTS = 20


@dataclass(frozen=True)
class JobManifest:
    """A job as it was at `saved_at`: what Redis held of it, and the number of its last event.

    checkpoints, by step, and weights, by version, are the JSON of what the trainer reported.
    """

    id: str
    state: str = ""
    events: int = 0
    lease_epoch: int = 0
    spec: str = ""
    record: dict[str, str] = field(default_factory=dict)
    checkpoints: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    epoch: str = ""
    saved_at: str = ""

    @property
    def tenant(self) -> str:
        return self.record.get("tenant", "")

    @property
    def name(self) -> str:
        return self.record.get("name", "")

    def is_as(self, other: JobManifest) -> bool:
        """Whether writing this one would tell nothing new."""
        return self._lasting() == other._lasting() and self.events - other.events < STALE_EVENTS

    def is_behind(self, before: JobManifest) -> bool:
        """Whether Redis was set back since the other was written: epochs, checkpoints and versions only grow.

        After a loss of all records a job made again has other events, but no smaller lease.
        """
        if self.lease_epoch < before.lease_epoch:
            return True
        return self.epoch == before.epoch and (
            self.events < before.events
            or any(now < then for now, then in zip(self._newest(), before._newest(), strict=True))
        )

    def _newest(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(lease epoch, step) of the newest checkpoint, and (0, version) of the newest weights."""
        saved = map(CheckpointRecord.model_validate_json, self.checkpoints.values())
        newest = max(((each.epoch, each.step) for each in saved), default=(0, 0))
        return newest, (0, max(map(int, self.weights), default=0))

    def _lasting(self) -> tuple[object, ...]:
        record = {name: value for name, value in self.record.items() if name != "updated_at"}
        return (self.state, self.lease_epoch, self.epoch, record, self.checkpoints, self.weights)


class JobManifests:
    """The folder of manifests, brought up to date from Redis."""

    def __init__(self, jobs: JobStore, place: StatePlace) -> None:
        self.jobs = jobs
        self.place = place
        self._saved: dict[str, JobManifest] = {}

    def read(self, job_id: str) -> JobManifest | None:
        """The manifest; None where there is none."""
        document = read_json(self.place, _name(job_id))
        return record_of(JobManifest, document) if document.get("id") == job_id else None

    def lost(self) -> list[JobManifest]:
        """Jobs that have a manifest and no records, and that nobody deleted; oldest first."""
        names = (name.removeprefix(f"{FOLDER}/") for name in self.place.names(FOLDER))
        ids = [name.removesuffix(".json") for name in names if name.startswith("job_")]
        gone: list[str] = []
        for chunk in _chunks(ids):
            with self.jobs.client.pipeline(transaction=False) as pipe:
                for job_id in chunk:
                    pipe.exists(redis_keys.run_state(job_id))
                replies = pipe.execute()
            gone += [job_id for job_id, there in zip(chunk, replies, strict=True) if not there]
        deleted = self.jobs.client.smembers(own_keys.deleted_jobs()) if gone else set()
        gone = [job_id for job_id in gone if job_id.encode() not in deleted]
        return [manifest for manifest in map(self.read, gone) if manifest]

    def save_all(self, epoch: str) -> list[JobManifest]:
        """Write what has changed; returns the manifests of jobs that Redis knows an older state of.

        Ended jobs are looked at once in the life of a process. Raises redis.RedisError, OSError, Unreachable.
        """
        unfinished = self.jobs.in_states([state for state in JobState if state not in TERMINAL])
        if self._saved:
            watched = {job_id for job_id, saved in self._saved.items() if saved.state not in TERMINAL}
            return self.save(sorted(watched.union(unfinished)), epoch)
        indexed = self.jobs.client.zrange(redis_keys.job_index(), 0, -1)
        return self.save([raw.decode() for raw in indexed], epoch)

    def save(self, job_ids: Sequence[str], epoch: str) -> list[JobManifest]:
        """As save_all, for these. What Redis is behind of is kept until `replace`."""
        behind = []
        for found in self._as_stored(job_ids, epoch):
            before = self._saved.get(found.id) or self.read(found.id)
            if before and found.is_behind(before):
                behind.append(before)
            elif before and found.is_as(before):
                self._saved[found.id] = before
            else:
                self._write(found)
        return behind

    def replace(self, job_id: str, epoch: str) -> None:
        """Write a job's manifest as Redis has it now: what it was behind of is made good."""
        for found in self._as_stored([job_id], epoch):
            self._write(found)

    def _write(self, found: JobManifest) -> None:
        write_json(self.place, _name(found.id), asdict(found))
        self._saved[found.id] = found

    def forget(self, job_id: str) -> None:
        """Remove the manifest of a job that somebody deletes."""
        self._saved.pop(job_id, None)
        self.place.remove(_name(job_id))

    def _as_stored(self, job_ids: Sequence[str], epoch: str) -> Iterator[JobManifest]:
        for chunk in _chunks(job_ids):
            with self.jobs.client.pipeline(transaction=False) as pipe:
                for job_id in chunk:
                    pipe.get(redis_keys.run_state(job_id))
                    pipe.get(redis_keys.run_spec(job_id))
                    pipe.hgetall(redis_keys.job_record(job_id))
                    pipe.hget(own_keys.job_lease(job_id), "epoch")
                    pipe.xrevrange(own_keys.job_events(job_id), count=1)
                    pipe.hgetall(redis_keys.job_checkpoints(job_id))
                    pipe.hgetall(own_keys.job_weights(job_id))
                replies = pipe.execute()
            for number, job_id in enumerate(chunk):
                state, spec, record, lease_epoch, newest, *reported = replies[7 * number : 7 * number + 7]
                if state and spec and record:
                    yield JobManifest(
                        id=job_id,
                        state=state.decode(),
                        events=_seq(newest),
                        lease_epoch=int(lease_epoch or 0),
                        spec=spec.decode(),
                        record=_words(record),
                        checkpoints=_words(reported[0]),
                        weights=_words(reported[1]),
                        epoch=epoch,
                        saved_at=timestamp(),
                    )
                else:
                    self._saved.pop(job_id, None)


def _name(job_id: str) -> str:
    return f"{FOLDER}/{job_id}.json"


def _chunks(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(job_ids), JOBS_PER_READ):
        yield job_ids[start : start + JOBS_PER_READ]


def _words(stored: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in stored.items()}


def _seq(newest: list[StreamEntry]) -> int:
    return int(newest[0][0].split(b"-")[0]) if newest else 0
