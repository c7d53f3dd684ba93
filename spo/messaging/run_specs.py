"""The specs of runs, as every service reads them."""

from __future__ import annotations

from spo import redis_keys
from spo.errors import NotFound
from spo.messaging.redis_client import RedisClient
from spo.spec.job_spec import JobSpec, spec_from_json


class RunSpecs:
    """Each run's spec, read once: it never changes within a run."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self._known: dict[str, JobSpec] = {}

    def of(self, run_id: str) -> JobSpec:
        """The run's spec. Raises NotFound (code "unknown_run") for a run nobody started."""
        if run_id not in self._known:
            stored = self.client.get(redis_keys.run_spec(run_id))
            if stored is None:
                raise NotFound(f"there is no run {run_id}", code="unknown_run")
            self._known[run_id] = spec_from_json(stored)
        return self._known[run_id]

    def forget(self, run_id: str) -> None:
        """Read the run's spec again next time, since the run may be deleted."""
        self._known.pop(run_id, None)
