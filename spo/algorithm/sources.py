"""Where a trajectory comes from, by the names of a JobSpec and the numbers of the wire. No torch here."""

from __future__ import annotations

from typing import Literal

SourceName = Literal["online", "reference", "human", "other_run", "annotated", "shared", "memory"]
# The values of spo.v1.Source; a unit test holds them together.
SOURCE_CODES: dict[SourceName, int] = {
    "online": 1,
    "reference": 2,
    "human": 3,
    "other_run": 4,
    "annotated": 5,
    "shared": 6,
    "memory": 7,
}
