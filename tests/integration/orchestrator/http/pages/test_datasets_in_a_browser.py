"""A dataset is uploaded from its page in parts with digests, and deleted there; all in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.container import AppContext
from spo.testing.peers import wait_until

pytestmark = pytest.mark.slow


def test_a_file_is_uploaded_and_deleted(context: AppContext, page: Any, tmp_path: Path, complaints: list[str]) -> None:
    rows = tmp_path / "sums.jsonl"
    row = {"statement": "Say 4.", "answer": {"expected": ["4"]}}
    rows.write_text(
        "\n".join(json.dumps(row | {"statement": f"Say {number}. {'x' * 40_000}"}) for number in range(120))
    )
    page.goto("/datasets")
    page.get_by_label("File, JSONL or Parquet").set_input_files(rows)
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("heading", level=1, name="sums.jsonl").wait_for()
    (found,), _ = context.datasets.page(None, "", 10)

    # More than one part, and every byte of it.
    assert found.size_bytes == found.uploaded_bytes == rows.stat().st_size > 4 << 20
    context.datasets._advance(found)
    page.goto("/datasets")
    page.get_by_role("button", name="Delete sums.jsonl").click()
    page.get_by_text("No dataset yet").wait_for()
    wait_until(lambda: not context.datasets.page(None, "", 10)[0], "it is deleted")
    assert complaints == []
