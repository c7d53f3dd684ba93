"""What all documents of the API have in common, and the two kinds of lists."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

# A part whose members the API does not fix: a JobSpec, the body of an event.
JsonObject = dict[str, Any]
Entry = TypeVar("Entry")


class Document(BaseModel):
    """A JSON document of the API. It only grows: fields that this release does not know are kept, not refused."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Listing(Document, Generic[Entry]):
    """A list that comes whole."""

    items: list[Entry]


class Page(Listing[Entry]):
    """Part of a list; next_cursor asks for the next part, None at the end."""

    next_cursor: str | None
