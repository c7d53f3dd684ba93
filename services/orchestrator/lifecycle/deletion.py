"""Deleting ended jobs: out of every list at once, keys and folders after that, repeated until done.

What the job left in the experience store stays: it outlives runs on purpose.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.experience.queries import is_complete
from services.orchestrator.jobs.listing import label_names
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.deleted_keys import keys_of
from services.orchestrator.lifecycle.pipeline import SHARED_STREAMS
from spo import redis_keys
from spo.errors import Conflict, NotReady
from spo.messaging.streams.dead_letters import drop_run
from spo.observability.logs import get_logger
from spo.spec.job_state import TERMINAL, JobState
from spo.weights.store import WeightStore

log = get_logger("deletion")

SWEEP_SECONDS = 5.0


class JobDeletion:
    """Removes jobs; a crash at any point leaves the id in a set that the next sweep reads."""

    def __init__(
        self, jobs: JobStore, state_path: Path, weights: WeightStore, forget: Callable[[str], None] = lambda _: None
    ) -> None:
        self.jobs = jobs
        self.weights = weights
        self.state_path = state_path
        self.forget = forget

    def delete(self, job_id: str) -> None:
        """Make an ended job absent.

        Raises NotFound, Conflict (illegal_transition) when it has not ended, NotReady while it is being stored.
        """
        state = self.jobs.state(job_id)
        if state not in TERMINAL:
            ended = ", ".join(sorted(TERMINAL))
            raise Conflict(
                f"a job that is {state} cannot be deleted, only {ended}; cancel it", code="illegal_transition"
            )
        if self.jobs.client.exists(redis_keys.replay_stored(job_id)) and not is_complete(self.jobs.client, job_id):
            raise NotReady(f"the experience of {job_id} is still being stored", code="experience_on_its_way")
        tenant = self.jobs.tenant(job_id)
        labels = label_names(self.jobs.spec(job_id).labels)
        lists = (
            redis_keys.job_index(),
            own_keys.tenant_jobs(tenant),
            own_keys.resuming(),
            *map(own_keys.labelled_jobs, labels),
            *map(redis_keys.jobs_in_state, JobState),
        )
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
        adopted = False
        while not stop.is_set():
            try:
                if not adopted:
                    self._adopt()
                    adopted = True
                self.sweep()
            except (redis.RedisError, OSError, NotReady) as error:
                log.warning("deleted jobs are removed later", reason=str(error))
            stop.wait(SWEEP_SECONDS)

    def _adopt(self) -> None:
        """Forks that a dead process left half-made are no jobs."""
        begun = self.jobs.client.smembers(own_keys.forks_under_way())
        for raw in begun:
            self.jobs.write(("SMOVE", own_keys.forks_under_way(), own_keys.deleted_jobs(), raw))

    def sweep(self) -> None:
        """Remove the keys, weights and checkpoints of deleted jobs."""
        retired = self.jobs.client.smembers(own_keys.deleted_jobs())
        for raw in retired:
            job_id = raw.decode()
            # Redis first: it may be full, and a store of weights that does not answer must not keep it so.
            for keys in filter(None, keys_of(self.jobs.client, job_id)):
                self.jobs.write(("UNLINK", *keys))
            drop_run(self.jobs.client, [stream for stream, _ in SHARED_STREAMS.values()], job_id)
            self.weights.remove_run(job_id)
            for folder in ("checkpoints", "models", "events"):
                shutil.rmtree(self.state_path / folder / job_id, ignore_errors=True)
            self.jobs.write(("SREM", own_keys.deleted_jobs(), job_id))
