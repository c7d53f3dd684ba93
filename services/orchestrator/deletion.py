"""Deleting ended jobs: out of every list at once, every key and folder of theirs after that, repeated until done.

While a job lives its trainer alone writes its weights and checkpoints, under a lease. A deleted job has no lease, and
what it left is the orchestrator's to remove: no trainer need be there, or be notified. What cannot be removed is
tried again, and reported by the log, the metric `spo_deletions_failing` and what asks for a person, until it is gone.

What the job left in the experience store stays: it outlives runs on purpose.

Leftovers are keys and folders of jobs that are not there, which somebody wrote after a deletion; they are found and
removed. Every write of a run is fenced: by its lease, by its spec, or by its state. A process that is stopped between
the check and the write, or an older release, still writes afterwards; this sweep is what is behind the fences.

A job is there while it has records, while it has a manifest, from which lost records are made again, while a fork makes
its files, and while its deletion is under way. Nothing is removed of a job that is older than the platform, or while a
loss of records is told that nobody has acknowledged.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import cast, get_args

import redis
from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import Commit, now_ms
from services.orchestrator.damaged_jobs import ENDING, lists_of, or_nothing, state_to_delete
from services.orchestrator.jobs import JobStore
from services.orchestrator.leases import JobFiles
from services.orchestrator.pipeline import SHARED_STREAMS
from services.orchestrator.recovery import RecoveryWatch, newest_open
from services.orchestrator.stored_experience import is_complete
from spo import redis_keys
from spo.errors import Conflict, NotReady, SpoError
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams.recovery import drop_run
from spo.observability import LEFTOVERS, get_logger
from spo.service.process import in_rounds
from spo.spec.job_spec import SourceName
from spo.spec.section import TERMINAL

IDS_PER_READ = 1000
_OF_A_RUN = ("run_id", "job_id")

log = get_logger("deletion")

SWEEP_SECONDS = 5.0
# Between two attempts at what cannot be removed: it doubles up to the longest.
LONGEST_PAUSE_SECONDS = 300.0


def keys_of(client: RedisClient, run_id: str) -> Iterator[list[str]]:
    """Chunks of keys, indices last: whoever is cut short finds the rest again, of a damaged index that is leftovers."""
    for chunk in _ids(client, redis_keys.replay_ids(run_id)):
        yield [redis_keys.replay_trajectory(run_id, trajectory_id) for trajectory_id in chunk]
    for chunk in _ids(client, redis_keys.replay_batch_log(run_id)):
        yield [redis_keys.replay_batch(run_id, int(step)) for step in chunk]
    prompts = {*_fields(client, redis_keys.run_prompts(run_id)), *_fields(client, redis_keys.run_values(run_id))}
    in_progress = redis_keys.prompts_in_progress(run_id)
    prompts |= {raw.decode() for raw in or_nothing(partial(client.smembers, in_progress))}
    yield [redis_keys.value_progress(run_id, prompt_id) for prompt_id in sorted(prompts)]
    versions = _fields(client, own_keys.job_weights(run_id))
    yield from ([key(each) for key in SESSION for each in ids] for ids in _ids(client, own_keys.agent_sessions(run_id)))
    yield [redis_keys.run_values_under(run_id, int(version)) for version in versions]
    yield [redis_keys.replay_source(run_id, source) for source in get_args(SourceName)]
    of_prompts = (
        redis_keys.dead_letters,
        redis_keys.dead_letter_payloads,
        redis_keys.dead_letter_totals,
        redis_keys.lone_deliveries,
        redis_keys.stream_clock,
    )
    yield [key(redis_keys.prompts(run_id)) for key in of_prompts]
    yield [key(run_id) for key in single_keys(redis_keys, own_keys)]


def single_keys(*modules: ModuleType) -> list[Callable[[str], str]]:
    """The functions that name one key of a run."""
    return [key for key in _functions(*modules) if tuple(inspect.signature(key).parameters) in ONLY_A_RUN]


def families(*modules: ModuleType) -> set[str]:
    """The names of the functions that name one of many keys of a run."""
    many = [key for key in _functions(*modules) if next(iter(inspect.signature(key).parameters), "") in _OF_A_RUN]
    return {key.__name__ for key in many} - {key.__name__ for key in single_keys(*modules)}


SESSION = (own_keys.agent_session, own_keys.agent_nodes, own_keys.agent_states)
ONLY_A_RUN = tuple((name,) for name in _OF_A_RUN)


def _functions(*modules: ModuleType) -> list[Callable[[str], str]]:
    return [
        function
        for module in modules
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    ]


def _ids(client: RedisClient, key: str) -> Iterator[list[str]]:
    start = 0
    while True:
        found = or_nothing(partial(client.zrange, key, start, start + IDS_PER_READ - 1))
        if not found:
            return
        yield [raw.decode() for raw in found]
        start += len(found)


def _fields(client: RedisClient, key: str) -> list[str]:
    found = or_nothing(partial(client.hkeys, key))
    return [raw.decode() for raw in found]


class JobDeletion:
    """Removes jobs; a crash at any point leaves the id in a set that the next sweep reads.

    find_leftovers: adds to that set the jobs that are not there, and of which somebody wrote something later.
    """

    def __init__(
        self,
        jobs: JobStore,
        files: JobFiles,
        forget: Callable[[str], None] = lambda _: None,
        find_leftovers: Callable[[], object] = lambda: None,
    ) -> None:
        self.jobs = jobs
        self.files = files
        self.forget = forget
        self.find_leftovers = find_leftovers
        self._attempts: dict[str, tuple[int, float]] = {}

    def delete(self, job_id: str) -> None:
        """Make an ended job absent.

        Raises NotFound, Conflict (illegal_transition) when it has not ended, NotReady while it is being stored.
        """
        state = state_to_delete(self.jobs, job_id)
        if state not in TERMINAL:
            ended = ", ".join(sorted(TERMINAL))
            raise Conflict(
                f"a job that is {state} cannot be deleted, only {ended}; cancel it", code="illegal_transition"
            )
        if self.jobs.client.exists(redis_keys.replay_stored(job_id)) and not is_complete(self.jobs.client, job_id):
            raise NotReady(f"the experience of {job_id} is still being stored", code="experience_on_its_way")
        lists = lists_of(self.jobs, job_id)
        with ENDING:
            self.jobs.write(
                ("SADD", own_keys.deleted_jobs(), job_id),
                *(("ZREM", key, job_id) for key in lists),
                # Without its spec a run gets no key again: what of it is still on its way is dropped.
                ("DEL", redis_keys.run_state(job_id), redis_keys.job_record(job_id), redis_keys.run_spec(job_id)),
            )
        self.forget(job_id)
        log.info("job deleted", deleted=job_id)

    def run(self, stop: threading.Event) -> None:
        """Sweep now and then until stop."""

        def sweep() -> None:
            self.sweep()
            self.find_leftovers()

        passing = (redis.RedisError, OSError, SpoError)
        in_rounds(sweep, stop, SWEEP_SECONDS, "deleted jobs are not removed", passing, self._adopt)

    def _adopt(self) -> None:
        """Forks that a dead process left half-made are no jobs."""
        begun = self.jobs.client.smembers(own_keys.forks_under_way())
        for raw in begun:
            self.jobs.write(("SMOVE", own_keys.forks_under_way(), own_keys.deleted_jobs(), raw))

    def sweep(self) -> None:
        """Remove the keys, weights and checkpoints of deleted jobs; what of one cannot be removed holds up no other."""
        for raw in self.jobs.client.smembers(own_keys.deleted_jobs()):
            job_id = raw.decode()
            attempts, next_at = self._attempts.get(job_id, (0, 0.0))
            # Redis first: it may be full, and a store of weights that does not answer must not keep it so.
            if not attempts:
                for keys in filter(None, keys_of(self.jobs.client, job_id)):
                    self.jobs.write(("UNLINK", *keys))
                drop_run(self.jobs.client, [stream for stream, _ in SHARED_STREAMS.values()], job_id)
            if time.monotonic() < next_at:
                continue
            try:
                self._remove_files(job_id)
            except (OSError, SpoError) as error:
                self._failed(job_id, attempts + 1, error)
                continue
            self._attempts.pop(job_id, None)
            failing = own_keys.failing_deletions()
            self.jobs.write(("SREM", own_keys.deleted_jobs(), job_id), ("HDEL", failing, job_id))
            if attempts:
                log.info("a deleted job's files are removed after all", deleted=job_id, attempts=attempts + 1)

    def failing(self) -> dict[str, str]:
        """Deleted jobs whose files are still there, with the reason."""
        found = self.jobs.client.hgetall(own_keys.failing_deletions())
        return {raw.decode(): str(json.loads(said)["reason"]) for raw, said in found.items()}

    def retry_now(self) -> None:
        """The next sweep tries everything again, however long it was to wait."""
        self._attempts.clear()

    def _remove_files(self, job_id: str) -> None:
        """Remove all of them that can be removed. Raises the first failure, OSError or SpoError."""
        faults: list[OSError | SpoError] = []
        stores = [partial(store.remove_run, job_id) for store in (self.files.weights, self.files.checkpoints)]
        events = partial(self.files.place.remove_folder, f"events/{job_id}")
        # Its manifest once more: a crash, or a manifest written beside the deletion, would make it a lost job.
        for remove in (*stores, events, partial(self.files.models.remove, job_id), partial(self.forget, job_id)):
            try:
                remove()
            except (OSError, SpoError) as error:
                faults.append(error)
        if faults:
            raise faults[0]

    def _failed(self, job_id: str, attempts: int, error: Exception) -> None:
        pause = min(LONGEST_PAUSE_SECONDS, SWEEP_SECONDS * 2 ** min(attempts, 10))
        self._attempts[job_id] = attempts, time.monotonic() + pause
        reason = f"{error}; does the orchestrator, user {os.geteuid()}, own what it has to remove?"
        log.error("a deleted job's files cannot be removed; tried again", deleted=job_id, reason=str(error))
        said = json.dumps({"reason": reason, "attempts": attempts, "at_unix_ms": now_ms()})
        self.jobs.write(("HSET", own_keys.failing_deletions(), job_id, said))


# For so long nobody may claim what is found; a job that is being made has its records long before.
LEFTOVER_SECONDS = 600.0
FOLDER_SECONDS = 60.0
# Keys that are looked at in one round: of ten million keys each is looked at within the hour.
KEYS_PER_READ, READS_PER_ROUND = 1000, 20

_KEY = re.compile(rb"spo:(job_[0-9A-HJKMNP-TV-Z]{26}):")
_FOLDER = re.compile(r"job_[0-9A-HJKMNP-TV-Z]{26}")


class Leftovers:
    """Looks at some keys and all folders now and then; what it finds goes the way of deleted jobs."""

    def __init__(
        self, jobs: JobStore, files: JobFiles, watch: RecoveryWatch, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.jobs = jobs
        self.files = files
        self.watch = watch
        self._clock = clock
        self._cursor = 0
        self._folders_at = float("-inf")
        # Since when each id is known not to be there.
        self._seen: dict[str, float] = {}

    def look(self) -> list[str]:
        """One round; returns the jobs of which something is removed. Raises redis.RedisError, OSError, SpoError."""
        if newest_open(self.watch.identity.losses()):
            return []
        keys = self._keys()
        ids = {*keys, *self._folders()}
        absent = self._absent(ids)
        for job_id in ids - set(absent):
            self._seen.pop(job_id, None)
        now = self._clock()
        due = [job_id for job_id in absent if now - self._seen.setdefault(job_id, now) >= LEFTOVER_SECONDS]
        return [job_id for job_id in due if self._remove(job_id, keys.get(job_id, ()))]

    def _keys(self) -> dict[str, list[bytes]]:
        """Some keys of jobs, by job."""
        found: dict[str, list[bytes]] = {}
        for _ in range(READS_PER_ROUND):
            with self.jobs.client.pipeline(transaction=False) as pipe:
                pipe.execute_command("SCAN", self._cursor, "MATCH", "spo:job_*", "COUNT", KEYS_PER_READ)
                cursor, keys = cast("tuple[int, list[bytes]]", pipe.execute()[0])
            self._cursor = int(cursor)
            for key in keys:
                if of_job := _KEY.match(key):
                    found.setdefault(of_job[1].decode(), []).append(key)
            if not self._cursor:
                break
        return found

    def _folders(self) -> Iterable[str]:
        if self._clock() - self._folders_at < FOLDER_SECONDS:
            return ()
        self._folders_at = self._clock()
        places = (self.files.weights.backend, self.files.checkpoints)
        events = (name.split("/")[1] for name in self.files.place.names("events"))
        names = [*(name for place in places for name in place.runs()), *events]
        oldest = self.watch.identity.begun_unix_ms
        return [name for name in names if _FOLDER.fullmatch(name) and _made_unix_ms(name) >= oldest]

    def _absent(self, ids: Collection[str]) -> list[str]:
        if not ids:
            return []
        going = {raw.decode() for key in _GOING for raw in self.jobs.client.smembers(key())}
        asked = sorted(set(ids) - going)
        with self.jobs.client.pipeline(transaction=False) as pipe:
            for job_id in asked:
                pipe.exists(redis_keys.run_state(job_id), redis_keys.run_spec(job_id), redis_keys.job_record(job_id))
            there = pipe.execute()
        gone = [job_id for job_id, count in zip(asked, there, strict=True) if not count]
        return [job_id for job_id in gone if self.watch.manifests.read(job_id) is None]

    def _remove(self, job_id: str, keys: Iterable[bytes]) -> bool:
        """Make it a deleted job, whose folders and keys go, unless it is there by now."""
        writes = [("SADD", own_keys.deleted_jobs(), job_id), *(("UNLINK", key) for key in keys)]
        done = self.jobs.commit(Commit(job_id, ("absent",), writes=writes), durable=False).done
        self._seen.pop(job_id, None)
        if done:
            LEFTOVERS.inc()
            log.warning("keys or files of a job that is not there are removed", deleted=job_id, keys=len(writes) - 1)
        return done


_GOING = (own_keys.deleted_jobs, own_keys.forks_under_way)


def _made_unix_ms(job_id: str) -> int:
    return int(ULID.from_str(job_id.removeprefix("job_")).milliseconds)
