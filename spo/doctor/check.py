"""One thing that `spo doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorCheck:
    """What was looked at and whether it is well; `why` says what it is for, `step` what to do where it is not.

    Needed ones must be well, the others are good to have.
    """

    what: str
    well: bool
    why: str
    step: str
    needed: bool = True

    @property
    def mark(self) -> str:
        return "ok" if self.well else ("missing" if self.needed else "absent")
