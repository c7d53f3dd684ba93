"""What all documents of the REST API have in common: snake_case, times as RFC 3339 UTC; fields are only ever added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

JOB_ID_PATTERN = r"^job_[0-9A-HJKMNP-TV-Z]{26}$"
# What stored experience is named: a job's id or a name of somebody's choice.
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$"

# A part whose members the API does not fix: a JobSpec, the body of an event.
JsonObject = dict[str, Any]
ReadJson = Mapping[str, Any]
Entry = TypeVar("Entry")


class Document(BaseModel):
    """What the API answers. A client ignores fields that it does not know, which a newer server may send."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class RequestBody(BaseModel):
    """What the API is asked. A server refuses fields that it does not know: a typing error must not be a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Listing(Document, Generic[Entry]):
    """A list that comes whole."""

    items: list[Entry]


class Page(Listing[Entry]):
    """Part of a list; next_cursor asks for the next part, null at the end."""

    next_cursor: str | None
