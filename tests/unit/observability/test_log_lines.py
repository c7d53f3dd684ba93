"""Log lines that wait for a heartbeat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spo.observability.logs import MAX_WAITING, Line, waiting
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


def test_where_room_is_short_the_oldest_lines_give_way() -> None:
    waiting.extend(line(number) for number in range(2, MAX_WAITING + 1))

    ServiceProcess._give_back([line(0), line(1)])

    assert [each.at_unix_ms for each in waiting] == list(range(1, MAX_WAITING + 1))
