"""Responses that reach the limit, as a loss sees them: left out, or punished softly. No torch: a JobSpec reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OverlongSpec(BaseModel):
    """What a loss makes of responses that are too long (Yu et al. 2025, 3.4); the store keeps rewards as they were."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["filter", "shape"] = Field(
        default="filter",
        description="filter: responses that were cut off teach nothing and do not count in their group's mean. shape: "
        "the reward falls over the last buffer_tokens before the limit, by its scale at the limit.",
    )
    buffer_tokens: int = Field(default=256, ge=1, le=2**31 - 1, description="shape: the length of the slope.")

    def penalty(self, tokens: int, limit: int) -> float:
        """Share of the reward's scale that a response of so many tokens loses; between 0 and 1 (Eq. 13)."""
        return min(1.0, max(0.0, (tokens - (limit - self.buffer_tokens)) / self.buffer_tokens))
