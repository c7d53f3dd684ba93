"""Tables on narrow terminals: whole where they fit, else a line for each column."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from spo import console as shown
from spo.console import Output, print_rows
from spo.testing.peers import wait_until

ROWS = [
    {"run": "job_01JXXXXXXXXXXXXXXXXXXXXXXX", "kind": "job", "trajectories": 13_248, "licence": "", "size": 4.5e9},
    {"run": "my-import", "kind": "import", "trajectories": 7, "licence": "Apache-2.0 [with a note]", "size": 1.0},
]
COLUMNS = ("run", "kind", "trajectories", "licence", "size", "parents", "complete")


def printed(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setattr(shown, "console", Console(width=width))
    print_rows(ROWS, COLUMNS, Output.TABLE)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_wide_terminal_shows_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(120, monkeypatch, capsys)

    assert lines[0].split() == list(COLUMNS)
    assert len(lines) == 3


def test_a_narrow_one_shows_a_line_for_each_column_that_holds_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(80, monkeypatch, capsys) == [
        "job_01JXXXXXXXXXXXXXXXXXXXXXXX",
        "  kind: job",
        "  trajectories: 13248",
        "  size: 4.5e+09",
        "my-import",
        "  kind: import",
        "  trajectories: 7",
        "  licence: Apache-2.0 [with a note]",
        "  size: 1",
    ]


def test_no_word_of_a_table_is_cut_into_letters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for width in (40, 60, 80, 100, 120):
        found = printed(width, monkeypatch, capsys)
        assert any("13248" in line for line in found), width
        assert any(ROWS[0]["run"] in line for line in found), width


def test_times_are_to_the_second_and_whole_at_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"id": "job_01JXXXXXXXXXXXXXXXXXXXXXXX", "state": "running", "created_at": "2026-11-28T19:45:30.081Z"}
    monkeypatch.setattr(shown, "console", Console(width=80))
    print_rows([row], ("id", "state", "created_at"), Output.TABLE)

    assert capsys.readouterr().out.splitlines()[1].split(maxsplit=2)[2].strip() == "2026-11-28 19:45:30"


def test_who_waits_for_the_checks_of_a_submission_sees_that_they_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for is_terminal, words in ((False, "problems, 0 s so far"), (True, "0:00:0")):
        with (tmp_path / "seen").open("w") as file:
            monkeypatch.setattr(shown, "error_console", Console(file=file, force_terminal=is_terminal, width=100))
            monkeypatch.setattr(shown, "CHECKED_LOG_SECONDS", 0.01)
            with shown.while_checked():
                wait_until(lambda words=words: words in (tmp_path / "seen").read_text(), "it is shown", 20)  # type: ignore[misc]
