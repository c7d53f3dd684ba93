"""Jobs as append-only events: submit, read, find, and move them along the one table of transitions.

Older events of jobs in files of the state place, so that neither Redis nor a restart grows with a job's age.
A file holds SEGMENT events as JSON lines; its number says which. Events never change, so whoever writes a file writes
the same bytes: it may be written twice, also by an orchestrator that leads no more. Events leave Redis only after that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import (
    Commit,
    CommitOutcome,
    Durability,
    Fence,
    LeaderFence,
    Leadership,
    Precondition,
    Write,
)
from services.orchestrator.job_records import (
    JobFilter,
    JobIdPage,
    JobRecord,
    NewJob,
    Submission,
    fold,
    may_become,
    page_of_jobs,
    require_same_request,
    while_field_is,
    write_fields,
)
from spo import redis_keys
from spo.errors import IntegrityError, LeaseLost, NotFound
from spo.messaging.redis_client import RedisClient, StreamEntry, replies_by_key
from spo.observability import get_logger
from spo.service.state import StatePlace
from spo.spec.job_spec import JobSpec, spec_from_json
from spo.spec.section import TERMINAL, JobState, decode_state, record_from_json

SEGMENT = 1000

log = get_logger("jobs")

# More than this many jobs at once would parse their specs again each round.
PARSED_SPECS = 1024
# Whole files of a job's events that are written in one go, so that it takes part in the next round.
FILES_AT_ONCE = 20
# What changes of jobs wait for, unless the settings say otherwise; and what those that may be lost wait for.
DURABLE = Durability()
IN_REDIS = Durability(append_only_file=False)

PIECE = 500
MOST_LOOKED_AT = 20_000


def seed_of(spec_seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose, for example ("rollout", 17)."""
    return int(redis_keys.digest(str(spec_seed), *map(str, purpose))[:16], 16) >> 1


@dataclass(frozen=True)
class JobEvent:
    """One entry of a job's history; seq counts from 1 without gaps."""

    seq: int
    at: str
    actor: str
    kind: str
    body: dict[str, Any]


def event_of(entry: StreamEntry) -> JobEvent:
    """Decode one stream entry."""
    entry_id, fields = entry
    body = json.loads(fields[b"body"])
    if fields[b"kind"] == b"state":
        body = {"from": fields[b"from"].decode() or None, "to": fields[b"to"].decode(), **body}
    return JobEvent(
        seq=int(entry_id.split(b"-")[0]),
        at=fields[b"at"].decode(),
        actor=fields[b"actor"].decode(),
        kind=fields[b"kind"].decode(),
        body=body,
    )


def last_of_segment(seq: int) -> int:
    """The last sequence number of the file that holds this one."""
    return ((seq - 1) // SEGMENT + 1) * SEGMENT


class EventFiles:
    """`events/<job>/<number of the file>.jsonl`."""

    def __init__(self, place: StatePlace) -> None:
        self.place = place

    def write(self, job_id: str, events: Sequence[JobEvent]) -> None:
        """Write one whole file, safe when this returns. Raises OSError, Unreachable; IntegrityError on a hole."""
        first, last = events[0].seq, events[-1].seq
        whole = list(range(last - SEGMENT + 1, last + 1))
        if last != last_of_segment(first) or [event.seq for event in events] != whole:
            raise IntegrityError(f"the events {first} to {last} of {job_id} are not a whole file of {SEGMENT}")
        lines = "".join(json.dumps(asdict(event)) + "\n" for event in events)
        self.place.write(self._name(job_id, first), lines.encode())

    def read(self, job_id: str, after_seq: int, limit: int) -> list[JobEvent]:
        """Events after a sequence number, oldest first, as far as files have them."""
        found: list[JobEvent] = []
        while len(found) < limit:
            seq = found[-1].seq if found else after_seq
            content = self.place.read(self._name(job_id, seq + 1))
            if content is None:
                break
            lines = content.decode().split("\n")[:-1]
            events = [record_from_json(JobEvent, line) for line in lines[seq % SEGMENT :]]
            found += events[: limit - len(found)]
        return found

    def remove(self, job_id: str) -> None:
        """Remove what there is of a job. Raises OSError, Unreachable."""
        self.place.remove_folder(f"events/{job_id}")

    def _name(self, job_id: str, seq: int) -> str:
        return f"events/{job_id}/{(seq - 1) // SEGMENT:08d}.jsonl"


class JobStore:
    """All jobs in Redis. Every change goes through `Commit`."""

    def __init__(
        self,
        client: RedisClient,
        leadership: Leadership | None = None,
        files: EventFiles | None = None,
        *,
        durable: Durability = DURABLE,
    ) -> None:
        """leadership, files None: a tool beside the orchestrator, which takes no part in the election."""
        self.client = client
        self.files = files
        self.leadership = leadership
        self.durable = durable
        self.absent: Callable[[str], NotFound] = _absent
        """The error of a job without records; who knows of lost ones puts its own here."""
        self.parse_spec = lru_cache(maxsize=PARSED_SPECS)(spec_from_json)

    def submit(
        self,
        spec: JobSpec,
        idempotency_key: str | None = None,
        actor: str = "api",
        tenant: str = "",
        new_job: NewJob | None = None,
    ) -> str:
        """Create a queued job and return its id; the same key and request of a tenant return the same job.

        Raises InvalidInput (code "idempotency_mismatch") when the key was used for another request.
        """
        submission = Submission(spec, idempotency_key, actor, tenant, new_job)
        commit = submission.commit()
        outcome = self.commit(commit)
        if outcome.verdict == "guard" and commit.guard is not None:
            require_same_request(self.client, commit.guard.key, submission.request_digest())
            return outcome.guard_value
        return commit.job_id

    @property
    def fence(self) -> LeaderFence:
        """What each write of this process carries."""
        return self.leadership.fence if self.leadership else LeaderFence()

    def commit(self, commit: Commit, *, durable: bool = True) -> CommitOutcome:
        """Make one change of a job, durably unless told otherwise. Raises NotLeading, NotReady."""
        return commit.run(self.client, self.fence, self.durable if durable else IN_REDIS)

    def write(self, *writes: Write) -> list[object]:
        """Make writes that change no job in one atomic step. Raises NotLeading."""
        return self.fence.write(self.client, writes)

    def state(self, job_id: str) -> JobState:
        """Raises NotFound."""
        state = decode_state(self.client.get(redis_keys.run_state(job_id)))
        if state is None:
            raise self.absent(job_id)
        return state

    def spec(self, job_id: str) -> JobSpec:
        """Raises NotFound."""
        return self.parse_spec(self.spec_document(job_id))

    def spec_document(self, job_id: str) -> bytes:
        """The spec as it was stored, with what this release may not know of it. Raises NotFound."""
        document = self.client.get(redis_keys.run_spec(job_id))
        if document is None:
            raise self.absent(job_id)
        return document

    def record(self, job_id: str) -> JobRecord:
        """The job's record; raises NotFound."""
        fields = self.client.hgetall(redis_keys.job_record(job_id))
        if not fields:
            raise self.absent(job_id)
        return JobRecord.from_redis(fields)

    def events(self, job_id: str, after_seq: int = 0, limit: int = 1000) -> list[JobEvent]:
        """Events after a sequence number, oldest first."""
        entries = self.client.xrange(own_keys.job_events(job_id), min=f"({after_seq}-0", count=limit)
        found = [event_of(entry) for entry in entries]
        if self.files is None or not found or found[0].seq == after_seq + 1:
            return found
        # Read after Redis: what has left it since is in the files.
        older = [event for event in self.files.read(job_id, after_seq, limit) if event.seq < found[0].seq]
        return [*older, *found][:limit]

    def move_events_to_files(self, job_id: str) -> int:
        """Move a job's oldest events out of Redis, which keeps the newest; returns how many files they filled.

        Raises OSError, Unreachable, IntegrityError, and nothing has been lost, when they cannot be written.
        """
        key, moved = own_keys.job_events(job_id), 0
        while self.files and moved < FILES_AT_ONCE and self.client.xlen(key) >= 2 * SEGMENT:
            record, events = self.record(job_id), list(map(event_of, self.client.xrange(key, count=SEGMENT)))
            states = [event.body["to"] for event in events if event.kind == "state"]
            after = JobState(states[-1]) if states else record.state_in_files
            self.files.write(job_id, events)
            last = events[-1].seq
            trim: Write = ("XTRIM", key, "MINID", f"{last + 1}-0")
            note = write_fields(job_id, events_in_files=last)
            writes = [note, trim] if after is None else [note, write_fields(job_id, state_in_files=after), trim]
            guard = while_field_is(job_id, "events_in_files", record.events_in_files)
            outcome = self.commit(Commit(job_id, guard=guard, writes=writes))
            if not outcome.done:
                if outcome.state == "absent":
                    self.files.remove(job_id)
                break
            moved += 1
        return moved

    def tenant(self, job_id: str) -> str:
        """Whose job it is; the operator's own have the tenant "". Raises NotFound."""
        tenant = self.client.hget(redis_keys.job_record(job_id), "tenant")
        if tenant is None:
            # Before there were tenants all jobs were the operator's.
            self.state(job_id)
            return ""
        return str(tenant.decode())

    def active_of(self, tenant: str) -> int:
        """How many of a tenant's jobs have not ended."""
        ended = [redis_keys.jobs_in_state(state) for state in TERMINAL]
        left = self.client.zdiff([own_keys.tenant_jobs(tenant), *ended])
        return len(left)

    def page(
        self,
        states: Sequence[JobState],
        cursor: str | None,
        limit: int,
        tenant: str | None = None,
        labels: Sequence[str] = (),
        created: tuple[int | None, int | None] = (None, None),
    ) -> JobIdPage:
        """Jobs newest first, by what `listing` finds them."""
        return page_of_jobs(self.client, JobFilter(states, labels, created, tenant), cursor, limit)

    def in_states(self, states: Iterable[JobState]) -> list[str]:
        """Ids of the jobs in any of these states, oldest first."""
        with self.client.pipeline(transaction=True) as pipe:
            for state in states:
                pipe.zrange(redis_keys.jobs_in_state(state), 0, -1, withscores=True)
            found = [(score, raw.decode()) for members in pipe.execute() for raw, score in members]
        return [job_id for _, job_id in sorted(found)]

    def by_priority(self, job_ids: Sequence[str]) -> dict[str, int]:
        """The jobs with their priorities, the highest first; of equal ones in the order given."""
        with self.client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(redis_keys.job_record(job_id), "priority")
            replies = zip(job_ids, replies_by_key(pipe), strict=True)
            found = {job_id: int(raw) if raw and raw.isdigit() else 1 for job_id, raw in replies}
        return dict(sorted(found.items(), key=lambda found: -found[1]))

    def users_of(self, dataset_id: str) -> list[str]:
        """Jobs that have not ended and whose tasks are this dataset."""
        unfinished = self.in_states([state for state in JobState if state not in TERMINAL])
        stored = self.client.mget(list(map(redis_keys.run_spec, unfinished))) if unfinished else []
        # Thousands may wait; only those that hold the id somewhere are worth parsing.
        found = [
            (job_id, raw) for job_id, raw in zip(unfinished, stored, strict=True) if dataset_id.encode() in (raw or b"")
        ]
        return [job_id for job_id, raw in found if self.parse_spec(raw).tasks.id == dataset_id]

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        with self.client.pipeline(transaction=False) as pipe:
            for state in JobState:
                pipe.zcard(redis_keys.jobs_in_state(state))
            return dict(zip(JobState, pipe.execute(), strict=True))

    def transition(
        self,
        job_id: str,
        to: JobState,
        reason: str,
        *,
        expected: Iterable[JobState] | None = None,
        actor: str = "orchestrator",
        writes: Sequence[Write] = (),
    ) -> bool:
        """Move a job; False when it is not (or no longer) in an expected state, by default any that may become `to`."""
        allowed = may_become(to) if expected is None else frozenset(expected) & may_become(to)
        body = json.dumps({"reason": reason})
        commit = Commit(job_id, sorted(allowed), to, writes=writes, kind="state", body=body, actor=actor)
        outcome = self.commit(commit)
        if outcome.done:
            log.info("job state", job=job_id, before=outcome.state, to=to.value, reason=reason)
        return outcome.done

    def fail(self, job_id: str, code: str, message: str) -> bool:
        """Move a job to failed with the reason people will read."""
        message = message[:2000]
        failure = write_fields(job_id, failure_code=code, failure_message=message)
        return self.transition(job_id, JobState.FAILED, f"{code}: {message}", writes=[failure])

    def append(self, job_id: str, kind: str, body: Mapping[str, object], writes: Sequence[Write] = ()) -> None:
        """Add an event that is not a transition, with the writes it tells of."""
        self.commit(Commit(job_id, writes=writes, kind=kind, body=json.dumps(body)), durable=False)

    def once(
        self,
        job_id: str,
        guard: Precondition,
        kind: str,
        body: Mapping[str, object],
        writes: Sequence[Write],
        *,
        durable: bool = True,
    ) -> bool:
        """As append, durably unless told otherwise, only while the guard holds; False when it does not."""
        commit = Commit(job_id, guard=guard, writes=writes, kind=kind, body=json.dumps(body))
        return self.commit(commit, durable=durable).done

    def fenced(self, commit: Commit, *, durable: bool = True) -> CommitOutcome:
        """Run a commit of a lease holder. Raises LeaseLost when another trainer has the job, or it is deleted."""
        outcome = self.commit(commit, durable=durable)
        if outcome.verdict == "fence" or outcome.state == "absent":
            trainer = commit.fence or Fence("", 0)
            raise LeaseLost(f"trainer {trainer.trainer_id} (epoch {trainer.epoch}) does not hold {commit.job_id}")
        return outcome

    def forget_ghost(self, job_id: str) -> bool:
        """Take a job that is not there off the lists that name it; False when it is there, if only in part."""
        if self.client.exists(redis_keys.job_record(job_id)):
            return False
        keys = (redis_keys.job_index(), own_keys.resuming(), *map(redis_keys.jobs_in_state, JobState))
        writes: list[Write] = [("ZREM", key, job_id) for key in keys]
        return self.commit(Commit(job_id, ("absent",), writes=writes)).done

    def refold(self, job_id: str) -> JobState:
        """Recompute the state from the events; where the stored one or the sets by state differ, correct them at once.

        Raises NotFound, IntegrityError when the events are none that a job can have.
        """
        while True:
            stored, record = self.state(job_id), self.record(job_id)
            state = fold(self._transitions(job_id, record.events_in_files), record.state_in_files)
            listed = self.listed_under(job_id)
            if stored is state and listed == [state]:
                return state
            away = [("ZREM", redis_keys.jobs_in_state(other), job_id) for other in listed]
            # The same step puts it where it belongs; not when the job has moved since it was read.
            if self.commit(Commit(job_id, (stored,), state, writes=away)).done:
                log.error("stored state differs from its events; corrected", job=job_id, folded=state.value)

    def _transitions(self, job_id: str, after_seq: int) -> Iterator[dict[str, Any]]:
        """The bodies of the transitions in Redis, a page at a time."""
        key, position = own_keys.job_events(job_id), f"({after_seq}-0"
        while entries := self.client.xrange(key, min=position, count=SEGMENT):
            yield from (event_of(entry).body for entry in entries if entry[1][b"kind"] == b"state")
            position = f"({entries[-1][0].decode()}"

    def listed_under(self, job_id: str) -> list[JobState]:
        """The states in whose lists a job is: one, unless something is damaged."""
        with self.client.pipeline(transaction=True) as pipe:
            for state in JobState:
                pipe.zscore(redis_keys.jobs_in_state(state), job_id)
            return [state for state, score in zip(JobState, pipe.execute(), strict=True) if score is not None]


def _absent(job_id: str) -> NotFound:
    return NotFound(f"there is no job {job_id}", code="job_not_found")


def find_jobs(jobs: JobStore, wanted: JobFilter, words: str, cursor: str | None, limit: int) -> JobIdPage:
    """Jobs whose name or id holds the words, in any case of letters.

    Up to a piece of the list more than `limit`; it looks at MOST_LOOKED_AT jobs, so that a page may hold fewer, or
    none, while its cursor says that there are more.
    """
    if not words:
        return page_of_jobs(jobs.client, wanted, cursor, limit)
    found: list[str] = []
    for _ in range(MOST_LOOKED_AT // PIECE):
        page = page_of_jobs(jobs.client, wanted, cursor, PIECE)
        found += _matching(jobs, page.job_ids, words.casefold())
        cursor = page.next_cursor
        if cursor is None or len(found) >= limit:
            break
    return JobIdPage(found, cursor)


def _matching(jobs: JobStore, job_ids: Sequence[str], words: str) -> list[str]:
    with jobs.client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(redis_keys.job_record(job_id), "name")
        names = replies_by_key(pipe)
    return [
        job_id
        for job_id, name in zip(job_ids, names, strict=True)
        if name is not None and words in f"{name.decode()}\n{job_id}".casefold()
    ]
