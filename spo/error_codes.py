"""The catalogue of error codes: what each means, and what to do about it.

The type of a problem is `/errors/<code>`, where the orchestrator serves its entry; `docs/reference/errors.md` has all.
A test holds that every code raised anywhere is in error_codes.txt, and no other: a line with the code and its meaning,
below it what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CatalogueEntry:
    """What a code means, and what to do."""

    meaning: str
    remedy: str


def _entries() -> dict[str, CatalogueEntry]:
    lines = Path(__file__).with_name("error_codes.txt").read_text(encoding="utf-8").splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return {line.partition(": ")[0]: CatalogueEntry(line.partition(": ")[2], remedy.strip()) for line, remedy in pairs}


CATALOGUE = _entries()
