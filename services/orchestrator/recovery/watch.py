"""Looks all the time whether Redis still holds what it held, keeps the manifests, and says what was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import redis

from services.orchestrator.jobs.store import JobStore
from services.orchestrator.recovery.append_only_file import AppendOnlyFile
from services.orchestrator.recovery.identity import PlatformIdentity, newest_open
from services.orchestrator.recovery.manifests import JobManifest, JobManifests
from spo.errors import NotFound, SpoError, Unreachable
from spo.observability.logs import get_logger

log = get_logger("recovery")

LOOK_SECONDS = 1.0
REMEMBER_SECONDS = 5.0


class RecoveryWatch:
    """The platform's identity and its jobs' manifests, brought up to date every second."""

    def __init__(self, jobs: JobStore, identity: PlatformIdentity, manifests: JobManifests) -> None:
        self.jobs = jobs
        self.identity = identity
        self.manifests = manifests
        self.append_only_file = AppendOnlyFile(jobs.client)
        # Brings a job that Redis is behind of up to what is on disk.
        self.mend: Callable[[str, JobManifest | None], bool] = lambda job_id, before: False
        self._mending = threading.Lock()
        self._notice: tuple[float, str] = (float("-inf"), "")
        # Why the files could not be read when `notice` looked last.
        self.away = ""

    def run(self, stop: threading.Event) -> None:
        """Look until stop."""
        while not stop.is_set():
            try:
                self.append_only_file.look()
                self.look()
            except (redis.RedisError, OSError, SpoError) as error:
                log.warning("the manifests of the jobs are brought up to date later", reason=str(error))
            stop.wait(LOOK_SECONDS)

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
        except (OSError, Unreachable) as error:
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
