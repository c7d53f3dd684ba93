"""What is left of jobs that are not there: keys and folders that somebody wrote after a deletion, found and removed.

Every write of a run is fenced: by its lease, by its spec, or by its state. A process that is stopped between the check
and the write, or an older release, still writes afterwards; this sweep is what is behind the fences.

A job is there while it has records, while it has a manifest, from which lost records are made again, while a fork makes
its files, and while its deletion is under way. Nothing is removed of a job that is older than the platform, or while a
loss of records is told that nobody has acknowledged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from typing import cast

from ulid import ULID

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import Commit
from services.orchestrator.jobs import JobStore
from services.orchestrator.leases import JobFiles
from services.orchestrator.recovery import RecoveryWatch, newest_open
from spo import redis_keys
from spo.observability import LEFTOVERS, get_logger

log = get_logger("leftovers")

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
