"""Whether Redis still holds what it held: the platform's identity, manifests of jobs, the append-only file, and lost
jobs made again.

Redis' append-only file after its disk was full: written anew, because it may have a hole that no restart survives.
A server that has rewritten its file since it started goes on in one that it did not open for appending. After a write
that found no room it cuts the file back, but the next one lands behind the cut: the bytes between are zeros, and the
server refuses to load such a file. Seen with Valkey 9.1; harmless where it does not happen.

Whose data Redis holds: an epoch in Redis and the same one in files beside what the jobs left.
Redis without an epoch, while a file has one, has lost its data; another epoch is that of another platform, or of a
backup from before a loss. Whatever is found is told and written down, and the platform goes on under one epoch.

Lost jobs made again from their manifests and from what is on disk: their weights and checkpoints.
What only Redis had is gone: events, curves, values, evaluations and the replay buffer. So a job that had not ended
comes back as failed, with the reason records_lost, and may be forked; or, where somebody asks for it, it is queued
again: values are estimated anew, and training goes on from the newest checkpoint with an empty replay buffer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import redis
from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import Commit, Precondition, Write, now_ms, timestamp, without_append_only_file
from services.orchestrator.job_records import label_writes, write_fields
from services.orchestrator.jobs import JobStore
from services.orchestrator.leases import CheckpointRecord, JobFiles, recorded_checkpoints
from spo import redis_keys
from spo.errors import IntegrityError, NotFound, PreconditionFailed, SpoError, StorageUnavailable, Unreachable
from spo.messaging.redis_client import RedisClient, ServerFacts, StreamEntry, replies_by_key
from spo.messaging.streams.entries import append_words
from spo.observability import get_logger
from spo.service.process import in_rounds
from spo.service.state import StateFolder, StatePlace
from spo.spec.section import TERMINAL, JobState, record_of
from spo.v1.weights_pb2 import WeightAnnouncement
from spo.weights.store import digest_of, whole_entries

log = get_logger("recovery")

AGAIN_SECONDS = 30.0

FILE = "platform.json"
MOST_LOSSES = 100

LossKind = Literal["redis_emptied", "redis_behind", "other_redis", "state_emptied", "weights_replaced"]

_WORDS: dict[str, str] = {
    "redis_emptied": "Redis came back without its data: the records of the jobs, API keys, datasets, values and the "
    "replay buffers are lost; weights, checkpoints and stored experience are on disk",
    "redis_behind": "Redis came back with older data: what was written last is lost",
    "other_redis": "Redis holds the data of another platform than the state folder",
    "state_emptied": "the state folder came back empty: checkpoints, datasets and manifests of jobs are lost",
    "weights_replaced": "the folder of weights belongs to another platform",
}

FOLDER = "jobs"
JOBS_PER_READ = 200
# Of a job that only trains the manifest is written again after so many more events.
STALE_EVENTS = 20

# Leases that may have been granted after the last manifest was written.
UNSEEN_LEASES = 10
# What is asked of the trainer or was done for the values: of the time before the loss.
_PASSING = (
    "checkpoint_asked",
    "resume_asked",
    "estimates_published",
    "pivotal_published",
    "reference_asked",
    "reference_total",
    "prompts_total",
    "evaluation_total",
)

LOOK_SECONDS = 1.0
REMEMBER_SECONDS = 5.0


def read_json(place: StatePlace, name: str) -> dict[str, object]:
    """The object in a file; empty where there is none, or it is damaged. Raises OSError, Unreachable."""
    try:
        document = json.loads(place.read(name) or b"{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def write_json(place: StatePlace, name: str, document: Mapping[str, object]) -> None:
    """Write it in one step. Raises OSError, Unreachable."""
    place.write(name, json.dumps(document, indent=1, sort_keys=True).encode())


def require_append_only_file(client: RedisClient, address: str, *, accept_none: bool) -> None:
    """Raises PreconditionFailed (code "no_append_only_file") where Redis keeps none, unless that is accepted.

    INFO says it, which managed servers answer where they refuse CONFIG. PreconditionFailed (code "redis_unfit") where
    WAITAOF, which says that a write is in the file, is not allowed.
    """
    if client.info("persistence").get("aof_enabled"):
        if not accept_none:
            _require_waitaof(client, address)
        return
    if not accept_none:
        raise without_append_only_file(address)
    log.warning(
        "Redis keeps no append-only file, as was accepted: a crash of it loses what was acknowledged", at=address
    )


def _require_waitaof(client: RedisClient, address: str) -> None:
    if lacking := lacks_waitaof(client):
        raise PreconditionFailed(f"Redis at {address} is not fit for the platform: {lacking}", code="redis_unfit")


def lacks_durability(client: RedisClient, *, accept_none: bool = False) -> str:
    """Why an accepted job would not outlive a crash of this Redis, and what to do; "" where it would, or need not.

    Raises redis.RedisError where Redis is away.
    """
    if accept_none:
        return ""
    if client.info("persistence").get("aof_enabled", 1):
        return lacks_waitaof(client)
    return without_append_only_file("it").message


def lacks_waitaof(client: RedisClient) -> str:
    """Why WAITAOF cannot be had, and what to do; "" where it can. Raises redis.RedisError where Redis is away."""
    try:
        with client.pipeline(transaction=False) as pipe:
            pipe.execute_command("WAITAOF", 0, 0, 0)
            pipe.execute()
    except redis.ResponseError as error:
        return (
            f"it does not answer WAITAOF, by which an accepted job is known to outlive a crash ({error}): allow it, "
            "ACL SETUSER NAME +waitaof, or accept the loss with SPO_ORCHESTRATOR_DURABLE_WRITES=false"
        )
    return ""


class AppendOnlyFile:
    """Has the file rewritten once after each time that the server could not write it."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self._refusals = 0
        self._due = False
        self._asked_at = float("-inf")

    def look(self) -> None:
        """One round; begins a rewrite where one is due. Raises redis.RedisError."""
        facts = self.client.info("persistence", "errorstats")
        if not facts.get("aof_enabled"):
            return
        # Counted by the server for as long as it runs: also what came and went between two looks.
        refusals = int(facts.get("errorstat_MISCONF", {}).get("count", 0))
        if refusals > self._refusals or facts["aof_last_write_status"] != "ok":
            self._due, self._asked_at = True, float("-inf")
        self._refusals = refusals
        if not self._due or facts["aof_last_write_status"] != "ok" or _is_rewriting(facts):
            return
        if self._asked_at > 0 and facts["aof_last_bgrewrite_status"] == "ok":
            self._due = False
            log.info("the append-only file of Redis is whole again")
        elif time.monotonic() - self._asked_at > AGAIN_SECONDS:
            self._asked_at = time.monotonic()
            log.warning("Redis could not write its append-only file for a while; it is written anew")
            with self.client.pipeline(transaction=False) as pipe:
                pipe.execute_command("BGREWRITEAOF")
                pipe.execute()


def _is_rewriting(facts: ServerFacts) -> bool:
    return bool(facts["aof_rewrite_in_progress"] or facts["aof_rewrite_scheduled"])


@dataclass(frozen=True)
class RecordedLoss:
    """What was found, RFC 3339 when; `epoch` is the one that it ended."""

    at: str
    kind: LossKind
    message: str
    epoch: str = ""
    acknowledged: bool = False


@dataclass(frozen=True)
class _Known:
    """What the file in the state folder holds."""

    epoch: str = ""
    earlier: list[str] = field(default_factory=list)
    losses: list[dict[str, object]] = field(default_factory=list)


class PlatformIdentity:
    """Compares the epochs; used by one orchestrator at a time."""

    def __init__(self, client: RedisClient, place: StatePlace, weight_place: str) -> None:
        self.client = client
        self.place = place
        self.weights = None if "://" in weight_place else Path(weight_place)

    def check(self) -> RecordedLoss | None:
        """Compare and make equal; what was lost, if anything was. Raises redis.RedisError, OSError, Unreachable."""
        known = self._known()
        stored = self.client.hget(redis_keys.platform(), "epoch")
        found = stored.decode() if stored else ""
        loss = self._difference(known, found)
        if loss is None and found and known.epoch == found:
            return self._check_weights(known)
        epoch = str(ULID()) if not found or (loss and loss.kind == "redis_behind") else found
        earlier = [each for each in dict.fromkeys([*known.earlier, known.epoch]) if each and each != epoch]
        self._write(_Known(epoch, earlier, known.losses), loss)
        # After the file: whoever is cut short in between finds the same difference again.
        self.client.hset(redis_keys.platform(), "epoch", epoch)
        return loss

    @property
    def epoch(self) -> str:
        """The epoch as the state folder has it; "" before the first check."""
        return self._known().epoch

    @property
    def begun_unix_ms(self) -> int:
        """When the first epoch that the state folder knows of began; after all jobs before the first check."""
        known = self._known()
        epochs = [each for each in (*known.earlier, known.epoch) if each]
        return min((ULID.from_str(each).milliseconds for each in epochs), default=1 << 48)

    def losses(self) -> list[RecordedLoss]:
        """What was ever found, newest first."""
        return [record_of(RecordedLoss, each) for each in reversed(self._known().losses)]

    def tell(self, kind: LossKind, detail: str = "") -> RecordedLoss:
        """Write down a loss that was found elsewhere."""
        known = self._known()
        loss = _loss(kind, known.epoch, detail)
        self._write(known, loss)
        return loss

    def acknowledge(self) -> None:
        """Somebody has seen what was lost; it stays in the list."""
        known = self._known()
        if any(not each.get("acknowledged") for each in known.losses):
            self._write(replace(known, losses=[{**each, "acknowledged": True} for each in known.losses]), None)

    def _difference(self, known: _Known, found: str) -> RecordedLoss | None:
        if known.epoch and not found:
            return _loss("redis_emptied", known.epoch)
        if known.epoch and found != known.epoch:
            return _loss("redis_behind" if found in known.earlier else "other_redis", known.epoch)
        if found and not known.epoch and self.client.zcard(redis_keys.job_index()):
            return _loss("state_emptied", found)
        return None

    def _check_weights(self, known: _Known) -> RecordedLoss | None:
        """The same mark beside the weights, where they lie in a folder."""
        if self.weights is None or not self.weights.is_dir():
            return None
        beside = StateFolder(self.weights)
        mark = str(read_json(beside, FILE).get("epoch", ""))
        if mark == known.epoch:
            return None
        write_json(beside, FILE, {"epoch": known.epoch})
        if not mark or mark in known.earlier:
            return None
        return self.tell("weights_replaced")

    def _known(self) -> _Known:
        return record_of(_Known, read_json(self.place, FILE))

    def _write(self, known: _Known, loss: RecordedLoss | None) -> None:
        losses = known.losses
        if loss:
            log.error("data was lost", kind=loss.kind, what=loss.message, epoch=loss.epoch)
            losses = [*losses, asdict(loss)][-MOST_LOSSES:]
        write_json(self.place, FILE, asdict(replace(known, losses=losses)))


def _loss(kind: LossKind, epoch: str, detail: str = "") -> RecordedLoss:
    message = _WORDS[kind] + (f" ({detail})" if detail else "")
    return RecordedLoss(timestamp(), kind, message, epoch)


def newest_open(losses: Sequence[RecordedLoss]) -> RecordedLoss | None:
    """The latest loss that nobody has acknowledged."""
    return next((loss for loss in losses if not loss.acknowledged), None)


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
                # What is written of a job whose keys are damaged stays as it was.
                replies = replies_by_key(pipe)
            for number, job_id in enumerate(chunk):
                state, spec, record, lease_epoch, newest, *reported = replies[7 * number : 7 * number + 7]
                if state and spec and record and newest is not None and None not in reported:
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


@dataclass(frozen=True)
class Rebuild:
    """A job that has records again; `note` says what it lacks."""

    id: str
    state: str
    note: str


class JobRebuild:
    """Makes records; each job in one atomic step, so that a repetition finds it there and changes nothing."""

    def __init__(self, jobs: JobStore, files: JobFiles) -> None:
        self.jobs = jobs
        self.weights = files.weights
        self.checkpoints = files.checkpoints

    def rebuild(self, manifest: JobManifest, *, resume: bool, actor: str) -> Rebuild:
        """Make the records of one job. Raises NotReady where another release wrote its spec, Unreachable."""
        versions, checkpoints = self._weights(manifest), self._checkpoints(manifest)
        state, note = self._end(manifest, resume=resume)
        record = {name: value for name, value in manifest.record.items() if name not in _PASSING}
        writes: list[Write] = [
            ("SET", redis_keys.run_spec(manifest.id), manifest.spec),
            ("HSET", redis_keys.job_record(manifest.id), *(word for pair in record.items() for word in pair)),
            *self._failure(manifest, state, note),
            *self._index(manifest, record),
            # Whoever still holds an older lease stays fenced: the next one is above all there may have been.
            ("HSET", own_keys.job_lease(manifest.id), "epoch", manifest.lease_epoch + UNSEEN_LEASES),
            *(("HSET", own_keys.job_weights(manifest.id), each["version"], json.dumps(each)) for each in versions),
            *(
                ("HSET", redis_keys.job_checkpoints(manifest.id), each.step, each.model_dump_json())
                for each in checkpoints
            ),
            *_announcement(manifest.id, versions),
        ]
        body = json.dumps({"reason": f"rebuilt from its manifest of {manifest.saved_at}: {note}"})
        outcome = self.jobs.commit(
            Commit(manifest.id, ("absent",), state, writes=writes, kind="state", body=body, actor=actor)
        )
        if outcome.done:
            log.warning("a lost job has records again", job=manifest.id, state=state.value, note=note)
        return Rebuild(manifest.id, state.value if outcome.done else outcome.state, note)

    def mend(self, job_id: str, before: JobManifest | None) -> bool:
        """Bring a job that Redis holds an older state of up to what the disk proves; whether anything was.

        before: the manifest that Redis is behind of. What trainers reported and is intact is recorded again, what a
        later lease than any that is known wrote is recorded, and no lease or version is given twice. Raises
        Unreachable.
        """
        held = int(self.jobs.client.hget(own_keys.job_lease(job_id), "epoch") or 0)
        known = max(held, before.lease_epoch if before else 0)
        recorded = recorded_checkpoints(self.jobs.client, job_id)
        newest = max(((each.epoch, each.step) for each in recorded), default=(-1, -1))
        reported = self._checkpoints(before) if before else []
        found = {each.step: each for each in [*reported, *self._unknown_checkpoints(job_id, known)]}
        checkpoints = [each for each in found.values() if (each.epoch, each.step) > newest]
        numbers = {int(raw) for raw in self.jobs.client.hkeys(own_keys.job_weights(job_id))}
        offered = [*(self._weights(before) if before else []), *self._unknown_weights(job_id, known)]
        versions = [each for each in offered if each["version"] > max(numbers, default=0)]
        epoch = max([known, *(each.epoch for each in checkpoints), *(each.get("epoch", 0) for each in versions)])
        if before is None and not checkpoints and not versions:
            return False
        writes: list[Write] = [
            *(("HSET", redis_keys.job_checkpoints(job_id), each.step, each.model_dump_json()) for each in checkpoints),
            *(("HSET", own_keys.job_weights(job_id), each["version"], json.dumps(each)) for each in versions),
            *_announcement(job_id, versions),
        ]
        if epoch > held:
            # Whoever holds an older lease, or one that Redis knows nothing of, is fenced: the next is above all.
            writes.append(("HSET", own_keys.job_lease(job_id), "trainer_id", "", "epoch", epoch + UNSEEN_LEASES))
        best = max([*recorded, *checkpoints], key=lambda each: (each.epoch, each.step), default=None)
        body = {
            "events_known": before.events if before else 0,
            "at": before.saved_at if before else "",
            "goes_on_from_step": best.step if best else 0,
            "checkpoints": sorted(each.step for each in checkpoints),
            "versions": sorted(each["version"] for each in versions),
            "lease_epoch": epoch + UNSEEN_LEASES if epoch > held else held,
        }
        guard = Precondition(own_keys.job_lease(job_id), "epoch", str(held) if held else "")
        commit = Commit(job_id, guard=guard, writes=writes, kind="records_behind", body=json.dumps(body))
        log.error("Redis held an older state of a job; it goes on from what is on disk", job=job_id, **body)
        return self.jobs.commit(commit).done

    def _unknown_checkpoints(self, job_id: str, known_epoch: int) -> Iterator[CheckpointRecord]:
        """Intact ones that a later lease than is known of wrote: nobody else could."""
        for step in self.checkpoints.versions(job_id):
            with suppress(IntegrityError, NotFound):
                manifest = self.checkpoints.manifest(job_id, step)
                if int(manifest["epoch"]) > known_epoch:
                    yield CheckpointRecord(
                        step=step,
                        path=self.checkpoints.uri(job_id, step),
                        manifest_digest=digest_of(manifest),
                        weight_version=int(manifest.get("weight_version", 0)),
                        epoch=int(manifest["epoch"]),
                    )

    def _unknown_weights(self, job_id: str, known_epoch: int) -> Iterator[dict[str, Any]]:
        for version in self.weights.versions(job_id):
            with suppress(IntegrityError, NotFound):
                manifest = self.weights.backend.manifest(job_id, version)
                if int(manifest["epoch"]) > known_epoch:
                    yield {
                        "version": version,
                        "step": int(manifest["step"]),
                        "uri": self.weights.backend.uri(job_id, version),
                        "manifest_digest": digest_of(manifest),
                        "size_bytes": sum(int(entry["size_bytes"]) for entry in whole_entries(manifest)),
                        "published_at": timestamp(),
                        "epoch": int(manifest["epoch"]),
                    }

    def _end(self, manifest: JobManifest, *, resume: bool) -> tuple[JobState, str]:
        """The state that is true of the job now, and why."""
        state = JobState(manifest.state)
        lost = "its events, curves, values, evaluations and replay buffer are lost"
        if state in TERMINAL:
            return state, f"it had {state}; {lost}"
        if state is JobState.CANCELLING:
            return JobState.CANCELLED, f"it was being cancelled; {lost}"
        if not resume:
            return JobState.FAILED, f"it was {state}; {lost}; fork it from a checkpoint, or submit it again"
        if int(manifest.record.get("reference_version", 0)):
            return JobState.FAILED, f"it was {state} under a refreshed reference whose values are lost; {lost}"
        self.jobs.parse_spec(manifest.spec.encode())
        return JobState.QUEUED, f"it was {state}; {lost}; it goes on from its newest checkpoint"

    def _failure(self, manifest: JobManifest, state: JobState, note: str) -> list[Write]:
        if state is not JobState.FAILED or manifest.state == JobState.FAILED:
            return []
        return [write_fields(manifest.id, failure_code="records_lost", failure_message=note)]

    def _index(self, manifest: JobManifest, record: dict[str, str]) -> list[Write]:
        created = int(record["created_unix_ms"])
        return [
            ("ZADD", redis_keys.job_index(), created, manifest.id),
            ("ZADD", own_keys.tenant_jobs(manifest.tenant), created, manifest.id),
            *label_writes(json.loads(record.get("labels", "{}")), manifest.id, created),
        ]

    def _weights(self, manifest: JobManifest) -> list[dict[str, Any]]:
        """The reported versions that are there as they were reported, oldest first."""
        reported = sorted((json.loads(raw) for raw in manifest.weights.values()), key=lambda each: int(each["version"]))
        there = set(self.weights.versions(manifest.id))
        return [each for each in reported if each["version"] in there and self._is_version(manifest.id, each)]

    def _is_version(self, job_id: str, reported: dict[str, Any]) -> bool:
        try:
            found = digest_of(self.weights.backend.manifest(job_id, int(reported["version"])))
        except (IntegrityError, NotFound):
            return False
        return found == str(reported["manifest_digest"])

    def _checkpoints(self, manifest: JobManifest) -> list[CheckpointRecord]:
        """The reported checkpoints that are there as they were reported."""
        reported = [CheckpointRecord.model_validate_json(raw) for raw in manifest.checkpoints.values()]
        return [each for each in reported if self._is_checkpoint(manifest.id, each)]

    def _is_checkpoint(self, job_id: str, reported: CheckpointRecord) -> bool:
        try:
            found = self.checkpoints.manifest(job_id, reported.step)
        except (IntegrityError, NotFound):
            return False
        return digest_of(found) == reported.manifest_digest


def _announcement(job_id: str, versions: Sequence[dict[str, Any]]) -> list[Write]:
    """The newest version, for replicas to sample from."""
    if not versions:
        return []
    newest = versions[-1]
    announced = WeightAnnouncement(
        run_id=job_id,
        version=newest["version"],
        step=newest["step"],
        uri=newest["uri"],
        manifest_digest=newest["manifest_digest"],
        announced_unix_ms=now_ms(),
    )
    return [append_words(redis_keys.weights(job_id), announced.SerializeToString())]


class RecoveryWatch:
    """The platform's identity and its jobs' manifests, brought up to date every second.

    mend: brings a job that Redis is behind of up to what is on disk (`JobRebuild.mend`).
    """

    def __init__(
        self,
        jobs: JobStore,
        identity: PlatformIdentity,
        manifests: JobManifests,
        mend: Callable[[str, JobManifest | None], bool],
    ) -> None:
        self.jobs = jobs
        self.identity = identity
        self.manifests = manifests
        self.append_only_file = AppendOnlyFile(jobs.client)
        self.mend = mend
        self._mending = threading.Lock()
        self._notice: tuple[float, str] = (float("-inf"), "")
        # Why the files could not be read when `notice` looked last.
        self.away = ""

    def run(self, stop: threading.Event) -> None:
        """Look until stop."""

        def look() -> None:
            self.append_only_file.look()
            self.look()

        passing = (redis.RedisError, OSError, SpoError)
        in_rounds(look, stop, LOOK_SECONDS, "the manifests of the jobs are not brought up to date", passing)

    def look(self) -> None:
        """One round: the epochs first, so that a loss is written down before new manifests are."""
        if self.identity.check():
            self._notice = (float("-inf"), "")
        with self._mending:
            self._make_good(self.manifests.save_all(self.identity.epoch))

    def before_lease(self, job_id: str) -> None:
        """Look at one job before a trainer is given it: nobody begins anew what is on disk."""
        try:
            with self._mending:
                self._make_good(self.manifests.save([job_id], self.identity.epoch))
                if self.mend(job_id, None):
                    self.identity.tell("redis_behind", f"files of job {job_id} are newer than its records")
                    self.manifests.replace(job_id, self.identity.epoch)
        except (OSError, Unreachable, StorageUnavailable) as error:
            log.warning("whether a job's files are newer than its records is not known", job=job_id, reason=str(error))

    def _make_good(self, behind: Sequence[JobManifest]) -> None:
        mended = [manifest for manifest in behind if self.mend(manifest.id, manifest)]
        if mended:
            self.identity.tell("redis_behind", f"{len(mended)} jobs, such as {mended[0].id}")
        for manifest in mended:
            self.manifests.replace(manifest.id, self.identity.epoch)

    def keep(self, job_id: str) -> None:
        """Write the manifest of a new job at once; where that fails, the next look tries again."""
        try:
            self.manifests.save([job_id], self.identity.epoch)
        except (redis.RedisError, OSError, SpoError) as error:
            log.warning("the manifest of a new job is written later", job=job_id, reason=str(error))

    def notice(self) -> str:
        """What everybody should know of lost data, in words; "" when there is nothing to know."""
        at, said = self._notice
        if time.monotonic() - at > REMEMBER_SECONDS:
            try:
                said, self.away = self._say(), ""
            except Unreachable as error:
                self.away = error.message
            self._notice = (time.monotonic(), said)
        return said

    def acknowledge(self) -> None:
        """Somebody has seen what was lost."""
        self.identity.acknowledge()
        self._notice = (float("-inf"), "")

    def absent(self, job_id: str, tenant: str | None = None) -> NotFound:
        """The error of a job that has no records: lost, where the tenant (None: anybody) had such a job."""
        manifest = self.manifests.read(job_id)
        if manifest is None or tenant not in (None, manifest.tenant):
            return NotFound(f"there is no job {job_id}", code="job_not_found")
        return NotFound(
            f"this job's records were lost: Redis no longer has them. It was {manifest.state} at {manifest.saved_at}; "
            "its weights and checkpoints are on disk, and it can be rebuilt from its manifest (`spo platform rebuild`)",
            code="job_records_lost",
        )

    def lost(self, tenant: str | None = None) -> list[JobManifest]:
        """Lost jobs of the tenant, None: of all."""
        return [manifest for manifest in self.manifests.lost() if tenant in (None, manifest.tenant)]

    def _say(self) -> str:
        loss, gone = newest_open(self.identity.losses()), self.manifests.lost()
        words = [f"{loss.at}: {loss.message}."] if loss else []
        if gone:
            words.append(f"The records of {len(gone)} jobs were lost; `spo platform rebuild` makes them again.")
        elif loss:
            words.append("`spo platform rebuild` acknowledges this.")
        return " ".join(words)
