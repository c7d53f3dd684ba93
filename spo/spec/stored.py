"""Documents read back from Redis or disk, which a neighbouring release of the platform may have written.

While a platform is upgraded or rolled back, services of two releases share Redis. What a document is checked for when
somebody submits it is not asked again when it is read: fields that this release does not know are left out, and numbers
beyond its bounds stay what they are. What this release cannot carry out, such as an objective that it does not have, is
never guessed: it raises NotReady, so that entries wait for a service that can, and nothing is given up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from pydantic import BaseModel, ValidationError

from spo.errors import NotReady
from spo.spec.violations import violations_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STORED: Final = "stored"
"""The validation context of stored documents: checks of those who submit are left out under it."""

Model = TypeVar("Model", bound=BaseModel)
Record = TypeVar("Record", bound="DataclassInstance")


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
