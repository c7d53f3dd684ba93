"""The defaults of a job are those that the page explains."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path

import pytest

from spo.spec.job_spec import parse_job_spec
from spo.spec.section import CriticSpec

PAGE = Path(__file__).parents[3] / "docs" / "defaults.md"
ROWS = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("field", "default"), ROWS)
def test_a_default_is_what_the_page_says(field: str, default: str) -> None:
    found = reduce(getattr, field.split("."), parse_job_spec({"model": {"path": "/models/pi0"}}))

    if field == "algorithm.losses":
        (term,) = found
        found = term.objective
    if field == "replay.mix":
        found = ", ".join(f"{part.source} {part.share}" for part in found)
    assert ("null" if found is None else str(found)) == default


def test_the_page_has_rows_and_the_critics_rate() -> None:
    assert len(ROWS) > 20
    assert f"is {CriticSpec().learning_rate:.0e}".replace("e-0", "e-") in PAGE.read_text()
