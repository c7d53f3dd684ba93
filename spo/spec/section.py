"""What all documents share: sections, violations by JSON pointer, enums as they are spelled, the state of a job, and
documents read from files or storage.

Documents read back from Redis or disk, which a neighbouring release of the platform may have written.
While a platform is upgraded or rolled back, services of two releases share Redis. What a document is checked for when
somebody submits it is not asked again when it is read: fields that this release does not know are left out, and numbers
beyond its bounds stay what they are. What this release cannot carry out, such as an objective that it does not have, is
never guessed: it raises NotReady, so that entries wait for a service that can, and nothing is given up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, cast

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import PydanticCustomError

from spo.algorithm.registry import SourceName
from spo.errors import FieldViolation, InvalidInput, NotReady

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

    Number = TypeVar("Number", bound=int)


_IMPOSSIBLE = "impossible_combination"

_UNKNOWN = "unknown_"

STORED: Final = "stored"

Model = TypeVar("Model", bound=BaseModel)
Record = TypeVar("Record", bound="DataclassInstance")

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


def impossible(*violations: tuple[str, str]) -> PydanticCustomError:
    """The error a model validator raises: pairs (pointer below the validated section without its slash, message)."""
    return PydanticCustomError(_IMPOSSIBLE, "{violations}", {"violations": violations})


def violations_of(error: ValidationError) -> tuple[FieldViolation, ...]:
    """Translate pydantic's findings to JSON pointers; messages never repeat the input."""
    found: list[FieldViolation] = []
    for entry in error.errors(include_url=False, include_input=False):
        at = "".join(f"/{_escape(part)}" for part in entry["loc"])
        if entry["type"] == _IMPOSSIBLE:
            found += [FieldViolation(f"{at}/{field}", message) for field, message in entry["ctx"]["violations"]]
        else:
            found.append(FieldViolation(at or "/", entry["msg"]))
    return tuple(found)


def _escape(part: object) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def wire_name(kind: _EnumTypeWrapper[Number], number: Number) -> str:
    """`accepted` for OUTCOME_ACCEPTED; `unknown_17` for a number that this release does not know."""
    known = kind.DESCRIPTOR.values_by_number.get(number)
    if known is None:
        return f"{_UNKNOWN}{number}"
    return known.name.removeprefix(_prefix(kind)).lower()


def wire_number(kind: _EnumTypeWrapper[Number], name: str) -> Number:
    """The inverse of wire_name; 0, which specifies nothing, for a name of a later release."""
    known = kind.DESCRIPTOR.values_by_name.get(f"{_prefix(kind)}{name.upper()}")
    number = name.removeprefix(_UNKNOWN) if known is None else known.number
    return cast("Number", int(number) if str(number).isdecimal() else 0)


def _prefix(kind: _EnumTypeWrapper[Number]) -> str:
    return str(kind.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED"))


"""The validation context of stored documents: checks of those who submit are left out under it."""


def read_stored(model: type[Model], document: object, what: str) -> Model:
    """A stored document as this release understands it; `what` it is, for people.

    Raises NotReady (code "unreadable_document") where it asks for something that this release does not have.
    """
    try:
        return model.model_validate(document, extra="ignore", context=STORED)
    except ValidationError as error:
        faults = "; ".join(f"{fault.pointer}: {fault.message}" for fault in violations_of(error)[:3])
        raise unreadable(f"{what} ({faults[:500]})") from None


def record_of(kind: type[Record], fields: Mapping[str, object]) -> Record:
    """A dataclass of those stored fields that it knows."""
    return kind(**{known.name: fields[known.name] for known in dataclasses.fields(kind) if known.name in fields})


def record_from_json(kind: type[Record], text: str | bytes) -> Record:
    """A dataclass of those fields of a stored JSON object that it knows."""
    return record_of(kind, json.loads(text))


def unreadable(what: str) -> NotReady:
    """The error of a stored document that this release cannot carry out."""
    return NotReady(
        f"this release of the platform cannot read what another one stored, and waits for one that can: {what}",
        code="unreadable_document",
    )


class JobState(StrEnum):
    QUEUED = "queued"
    VALIDATING = "validating"
    ESTIMATING = "estimating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
# Begun and not ended.
ACTIVE = frozenset(JobState) - TERMINAL - {JobState.QUEUED}
# A paused job gives back its slot, its trainer and its replicas; to resume, it waits for a slot again.
HOLDS_SLOT = ACTIVE - {JobState.PAUSED}
# What is computed for such a job may still be used.
WANTED = ACTIVE - {JobState.CANCELLING}
# Training has begun: every training prompt has its value and its offline trajectories, unless the job's record says
# that estimates are pending.
ESTIMATED = frozenset({JobState.RUNNING, JobState.PAUSING, JobState.PAUSED})


def decode_state(stored: bytes | None) -> JobState | None:
    """A state as Redis holds it; None for a job that was never submitted, or is deleted.

    Raises NotReady (code "unreadable_document") for a state of a later release.
    """
    if stored is None:
        return None
    try:
        return JobState(stored.decode())
    except ValueError:
        raise unreadable(f"a job's state {stored.decode()}") from None


class Section(BaseModel):
    """Unknown fields are refused, sections are frozen, numbers are finite; of a stored document see `read_stored`."""

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


def read_spec(path: Path) -> dict[str, Any]:
    """The document of a YAML or JSON file, not validated.

    Raises InvalidInput (code "unreadable_spec") naming the file.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", code="unreadable_spec") from None
    except yaml.YAMLError as error:
        raise InvalidInput(f"{path} is neither YAML nor JSON: {error}", code="unreadable_spec") from None
    if not isinstance(document, dict):
        raise InvalidInput(f"{path} must hold a mapping", code="unreadable_spec")
    return document
