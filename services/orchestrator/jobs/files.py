"""What a job has outside Redis: its weights, its checkpoints, and its part of the state place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.orchestrator.settings import Settings
from spo.service.state_place import StatePlace, state_at
from spo.weights.backends import CHECKPOINT_DIGITS, FolderBackend, WeightBackend
from spo.weights.made_models import MadeModels
from spo.weights.store import WeightStore, backend_at


@dataclass(frozen=True)
class JobFiles:
    """Of all jobs; checkpoints lie by step, in a folder or a bucket.

    state_path: this machine's folder; place: where files are that a restart finds again. shared: other services see
    the state folder.
    """

    state_path: Path
    place: StatePlace
    models: MadeModels
    weights: WeightStore
    checkpoints: WeightBackend
    shared: bool = True

    @classmethod
    def of(cls, settings: Settings) -> JobFiles:
        """As a process is told. Raises InvalidInput where a store's address is none."""
        return cls(
            settings.state_path,
            state_at(settings.state_place),
            MadeModels(settings.state_place, settings.state_path),
            WeightStore(settings.weight_place, cache_path=settings.weight_cache_path),
            backend_at(settings.checkpoint_place, CHECKPOINT_DIGITS),
            settings.shared_state,
        )

    def checkpoint_steps(self, job_id: str) -> set[int] | None:
        """Of those that are there; None in a bucket, where a record goes with what it records."""
        return set(self.checkpoints.versions(job_id)) if isinstance(self.checkpoints, FolderBackend) else None
