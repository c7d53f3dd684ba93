"""What all sections share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SourceName = Literal["online", "reference", "human", "other_run", "annotated", "shared"]
# Sampled while the job trains, with the sampler's log-probs: the newest count, and they age in the versions of the run
# that samples them.
LIVE_SOURCES: frozenset[SourceName] = frozenset({"online", "shared"})
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(gt=0, le=5)]


class Section(BaseModel):
    """Unknown fields are refused, sections are frozen, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=False)
