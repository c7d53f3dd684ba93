"""Log lines that wait for a heartbeat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from spo.observability import MAX_WAITING, Line, configure_logs, get_logger, lines_concern_run, waiting
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
