"""Where value-estimation lives: SPO_VALUE_ESTIMATION_<FIELD>."""

from __future__ import annotations

from pydantic import Field

from spo.service.settings import ServiceSettings


class Settings(ServiceSettings, service="value_estimation"):
    """Value-estimation's own settings."""

    prompts_in_flight: int = Field(
        default=6, ge=1, le=256, description="Prompts of one run estimated at once, to keep engines full."
    )
    chunk_samples: int = Field(default=64, ge=1, le=4096, description="Samples of one prompt asked for in one call.")
    patience_seconds: float = Field(default=600, gt=0, description="How long a call waits for a service that is away.")
    reclaim_seconds: float = Field(default=20, gt=0, description="After this a silent worker's prompts are taken over.")
    tokens_per_forward: int = Field(default=16_384, ge=1, description="Padded tokens of one reference forward.")
    device: str = Field(default="", description="torch device of pi0; default: cuda when there, else cpu.")
