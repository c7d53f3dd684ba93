"""What a log line never shows, wherever in it a secret is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog

from spo.observability import configure_logs, get_logger, redacted, waiting

CANARY = "canary5ecret"


@pytest.mark.parametrize(
    "fields",
    [
        {"password": CANARY},
        {"api_key": CANARY},
        {"Authorization": f"Bearer {CANARY}"},
        {"settings": {"redis": {"client_secret": CANARY}}},
        {"headers": [{"authorization": CANARY}]},
        {"url": f"redis://user:{CANARY}@host:6379/0"},
        {"places": ("s3", f"https://me:{CANARY}@store")},
        {"reason": f"refused: Bearer {CANARY}"},
        {"reason": f"refused: basic {CANARY}=="},
        {"reason": f"no such key spo_0123456789abcdef_{CANARY}"},
    ],
)
def test_a_secret_is_known_by_its_name_or_its_form(fields: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    configure_logs("test")
    try:
        get_logger("test").warning("something", **fields)
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()

    written = capsys.readouterr().err
    assert json.loads(written)["event"] == "something"
    assert CANARY not in written
    assert CANARY not in waiting[-1].text


def test_what_is_no_secret_stays() -> None:
    fields = {
        "tokens": 5,
        "job": "job_01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "url": "http://host:80/a",
        "who": "the bearer of it",
    }

    assert redacted(fields) == fields
