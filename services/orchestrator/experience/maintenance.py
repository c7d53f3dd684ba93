"""Pruning and compacting the experience store, one at a time, so that neither loses files to the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.experience.queries import Scope, is_complete
from services.orchestrator.schemas import experience as schemas
from spo.errors import Conflict, FieldViolation, InvalidInput
from spo.experience.compaction import merge, plan
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient, RedisLock

# The lock of a dead process expires after this; renewed with every file.
LOCK_SECONDS = 600.0


def prune(
    client: RedisClient, store: ExperienceStore, scope: Scope, older_than_days: float | None, *, dry_run: bool
) -> schemas.PruneReport:
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
    return schemas.PruneReport(
        runs=sorted({file.origin.run for file in found}),
        files=len(found),
        trajectories=sum(file.rows for file in found),
        size_bytes=sum(file.size_bytes for file in found),
        removed=not dry_run,
    )


def compact(client: RedisClient, store: ExperienceStore, scope: Scope, *, dry_run: bool) -> schemas.CompactReport:
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
    return schemas.CompactReport(
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
