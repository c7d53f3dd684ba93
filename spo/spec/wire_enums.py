"""Enums of protobuf as documents spell them; a number or a name of a later release stays what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

    Number = TypeVar("Number", bound=int)

_UNKNOWN = "unknown_"


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
