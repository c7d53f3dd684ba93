"""Where the replay buffer lives: SPO_REPLAY_BUFFER_<FIELD>."""

from __future__ import annotations

from pydantic import Field

from spo.service.settings import ServiceSettings


class Settings(ServiceSettings, service="replay_buffer"):
    """The replay buffer's own settings."""

    stop_memory_share: float = Field(
        default=0.9, gt=0, le=1, description="Share of Redis' maxmemory at which dispatching stops."
    )
    long_polls: int = Field(default=448, ge=1, le=4096, description="Trainers that may wait for a batch at once.")
    groups_per_read: int = Field(default=64, ge=1, le=1024, description="Judged groups inserted at once.")
    reclaim_seconds: float = Field(default=30, gt=0, description="After this a silent ingest's entries are taken over.")
    logprobs_deadline_seconds: float = Field(
        default=30, gt=0, description="A call for reference log-probs ends so long after the last sign of life."
    )
    store_experience: bool = Field(default=True, description="Write trajectories to the experience store.")
    stored_rows_per_file: int = Field(default=2048, ge=1, le=1_000_000, description="Most trajectories of one file.")
    ledger_trajectories: int = Field(
        default=200_000, ge=1000, description="Ids of a run that are remembered after their trajectories left Redis."
    )
    ended_seconds: float = Field(
        default=3600, ge=0, description="An ended run's window stays in Redis so long once its experience is stored."
    )
    store_seconds: float = Field(default=60, gt=0, description="Longest wait of a running job's experience.")
