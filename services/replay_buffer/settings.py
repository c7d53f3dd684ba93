"""Where the replay buffer lives: SPO_REPLAY_BUFFER_<FIELD>."""

from __future__ import annotations

from pydantic import Field

from spo.service.settings import ServiceSettings


class Settings(ServiceSettings, service="replay_buffer"):
    """The replay buffer's own settings."""

    stop_memory_share: float = Field(
        default=0.9, gt=0, le=1, description="Share of Redis' maxmemory at which dispatching stops."
    )
    groups_per_read: int = Field(default=64, ge=1, le=1024, description="Judged groups inserted at once.")
    reclaim_seconds: float = Field(default=30, gt=0, description="After this a silent ingest's entries are taken over.")
    logprobs_deadline_seconds: float = Field(default=60, gt=0, description="Wait for reference log-probs of one read.")
    store_experience: bool = Field(default=True, description="Write trajectories to the experience store.")
    stored_rows_per_file: int = Field(default=2048, ge=1, le=1_000_000, description="Most trajectories of one file.")
    store_seconds: float = Field(default=60, gt=0, description="Longest wait of a running job's experience.")
