"""What all sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from spo.algorithm.sources import SourceName

# Sampled while the job trains, with the sampler's log-probs: the newest count, and they age in the versions of the run
# that samples them.
LIVE_SOURCES: frozenset[SourceName] = frozenset({"online", "shared"})
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(gt=0, le=5)]


class Section(BaseModel):
    """Unknown fields are refused, sections are frozen, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=False)
