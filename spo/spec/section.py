"""What all sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from spo.algorithm.sources import SourceName
from spo.spec.stored import STORED

# Sampled while the job trains, with the sampler's log-probs: the newest count, and they age in the versions of the run
# that samples them.
LIVE_SOURCES: frozenset[SourceName] = frozenset({"online", "shared"})
# What exists only once a job samples: its rollouts, and what it remembers of them.
SAMPLED_SOURCES: frozenset[SourceName] = LIVE_SOURCES | {"memory"}
Share = Annotated[float, Field(ge=0, le=1)]
# What the sampling engine takes (vLLM's SamplingParams): it refuses what is hotter, and samples at its lowest
# temperature, without saying so, what is cooler.
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0
Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)]
# On the wire it is a single-precision number, and must not become 0 there.
TopP = Annotated[float, Field(ge=1e-6, le=1)]
# Counts and intervals travel as signed 32-bit integers.
MOST_COUNT = 2**31 - 1
# The longest path that Linux takes, and no NUL byte in it.
LocalPath = Annotated[str, Field(min_length=1, max_length=4095, pattern=r"^[^\x00]+$")]

_BOUNDS = frozenset(
    {
        *("less_than", "less_than_equal", "greater_than", "greater_than_equal"),
        *("string_too_short", "string_too_long", "string_pattern_mismatch"),
    }
)
# A number or a range: what is wrong with a range as a number is none of its faults.
_OTHER_BRANCH = frozenset({"float_type", "tuple_type"})


class Section(BaseModel):
    """Unknown fields are refused, sections are frozen, numbers are finite; of a stored document see spo.spec.stored."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def stored_values_stay(cls, value: object, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        """A bound that was moved after a document was stored ends no job that runs."""
        try:
            return check(value)
        except ValidationError as error:
            faults = {fault["type"] for fault in error.errors()}
            if info.context != STORED or not faults & _BOUNDS or faults - _BOUNDS - _OTHER_BRANCH:
                raise
            return tuple(value) if isinstance(value, list) else value
