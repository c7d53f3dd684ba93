"""What the people of a job see of the logs: the head and the tail of long texts, and no paths of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from spo.errors import InvalidInput
from spo.model.folder import inspect_model_folder
from spo.observability import MAX_CHARACTERS, configure_logs, get_logger, head_and_tail, job_line, waiting


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    waiting.clear()
    yield
    structlog.reset_defaults()
    waiting.clear()


def recurse(depth: int) -> None:
    if depth == 0:
        inspect_model_folder("/nowhere/at/all")
    recurse(depth - 1)


def test_a_long_traceback_keeps_its_beginning_and_the_exception(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("test")
    try:
        recurse(3)
    except InvalidInput:
        get_logger("test").exception("the job's model cannot be loaded", run="job_a", note="x" * 8_000)

    line = json.loads(waiting[0].text)
    assert len(waiting[0].text) <= MAX_CHARACTERS
    assert line["event"] == "the job's model cannot be loaded"
    assert line["exception"].startswith("Traceback (most recent call last)")
    assert "/nowhere/at/all is not a folder" in line["exception"][-200:]
    assert "characters left out" in line["note"]
    # The server's own log has all of it.
    assert "x" * 8_000 in capsys.readouterr().err


def test_tracebacks_name_modules_and_no_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("test")
    try:
        recurse(1)
    except InvalidInput:
        get_logger("test").exception("failed", run="job_a")

    shown = json.loads(waiting[0].text)["exception"]
    assert 'File "spo.model.folder", line' in shown
    assert ".py" not in shown
    assert f'File "{__file__}"' not in shown
    assert f'File \\"{__file__}\\"' in capsys.readouterr().err


def test_a_deep_traceback_is_cut_in_the_middle() -> None:
    exception = "Traceback\n" + 'File "/srv/x.py", line 1\n' * 5000 + "ValueError: what happened"

    shown = json.loads(job_line({"event": "failed", "exception": exception}))["exception"]

    assert shown.startswith("Traceback")
    assert shown.endswith("ValueError: what happened")
    assert "/srv" not in shown


@pytest.mark.parametrize(
    "event",
    [
        {"event": '\n"' * 10_000},
        {"event": "short", "many": {str(number): number for number in range(10_000)}},
        {str(number): "y" * 50 for number in range(1000)},
        {"event": "\U0001f600" * 5000, "note": "é" * 5000},
        {"event": "an object", "thing": object()},
        {"event": "half a character: \ud800" * 1000},
    ],
)
def test_whatever_it_holds_a_line_is_short_json(event: dict[str, object]) -> None:
    line = job_line(event)

    assert len(line) <= MAX_CHARACTERS
    assert isinstance(json.loads(line), dict)


@pytest.mark.parametrize("most", [0, 5, 40, 100, 999, 1000])
def test_a_cut_text_is_no_longer_than_allowed(most: int) -> None:
    assert len(head_and_tail("z" * 1000, most)) <= most
