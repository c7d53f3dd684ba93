"""The workers and the reader of a replay-buffer process that concern the experience store."""

from __future__ import annotations

from services.replay_buffer.archive.archived_trajectories import ArchivedTrajectories
from services.replay_buffer.archive.experience_archiver import ExperienceArchiver
from services.replay_buffer.archive.window_trimmer import WindowTrimmer
from services.replay_buffer.sampler import BatchSampler
from services.replay_buffer.settings import Settings
from spo.experience.store import ExperienceStore
from spo.service.process import Worker


def archive_reader(settings: Settings) -> ArchivedTrajectories | None:
    """What reads trajectories that have left Redis; None where none are stored. Raises InvalidInput."""
    return ArchivedTrajectories(ExperienceStore(settings.experience_place)) if settings.store_experience else None


def archive_workers(sampler: BatchSampler, settings: Settings) -> list[Worker]:
    """What keeps Redis within the window and, unless switched off, stores experience first. Raises InvalidInput."""
    trimmer = WindowTrimmer(sampler, settings)
    if not settings.store_experience:
        return [trimmer.run]
    store = ExperienceStore(settings.experience_place)
    archiver = ExperienceArchiver(sampler.store, store, settings.stored_rows_per_file, settings.store_seconds)
    return [trimmer.run, archiver.run]
