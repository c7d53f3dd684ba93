"""Log lines that wait for a heartbeat."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from spo.observability import (
    MAX_WAITING,
    Line,
    configure_logs,
    get_logger,
    lines_concern_run,
    take_over_logs,
    waiting,
)
from spo.service.process import ServiceProcess


def line(number: int) -> Line:
    return Line("", "info", number, str(number))


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    waiting.clear()
    yield
    waiting.clear()


def test_lines_of_a_failed_heartbeat_go_back_before_the_newer_ones() -> None:
    waiting.append(line(2))

    ServiceProcess._give_back([line(0), line(1)])

    assert [each.at_unix_ms for each in waiting] == [0, 1, 2]


def test_a_line_concerns_the_run_it_names_else_that_of_its_process_else_none() -> None:
    configure_logs("test")
    log = get_logger("test")
    try:
        log.info("before")
        lines_concern_run("job_a")
        log.info("while it serves a run")
        log.info("another one", run="job_b")
        lines_concern_run("")
        log.info("after")
    finally:
        lines_concern_run("")
        structlog.reset_defaults()

    assert [each.run_id for each in waiting] == ["", "job_a", "job_b", ""]


def test_where_room_is_short_the_oldest_lines_give_way() -> None:
    waiting.extend(line(number) for number in range(2, MAX_WAITING + 1))

    ServiceProcess._give_back([line(0), line(1)])

    assert [each.at_unix_ms for each in waiting] == list(range(1, MAX_WAITING + 1))


def test_what_libraries_log_are_lines_of_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        configure_logs("test")
    library = logging.getLogger("a_library")
    # As vLLM and DeepSpeed do when they are imported.
    library.addHandler(logging.StreamHandler(sys.stderr))
    library.propagate = False
    library.setLevel(logging.DEBUG)
    take_over_logs("a_library")

    logging.getLogger("a_library.part").warning("%d at redis://:secret@host/0", 3)
    library.info("not asked for")
    library.log(35, "between two levels")
    try:
        raise ValueError("broken")
    except ValueError:
        library.exception("it broke")

    said = capsys.readouterr().err.splitlines()
    lines = [json.loads(each) for each in said if each.startswith("{")]
    assert [(each["level"], each["library"], each["event"]) for each in lines] == [
        ("warning", "a_library.part", "3 at redis://:[redacted]@host/0"),
        ("warning", "a_library", "between two levels"),
        ("error", "a_library", "it broke"),
    ]
    assert "broken" in lines[-1]["exception"]
    assert {each["component"] for each in lines} == {"library"}
