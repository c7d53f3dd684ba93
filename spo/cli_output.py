"""How the command line prints: tables for people, JSON or YAML for programs; errors with what to do next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spo import errors

console = Console()
error_console = Console(stderr=True)


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class ExitCode:
    """Stable: scripts may rely on them. 2 is typer's for wrong usage."""

    FAILURE = 1
    INVALID_INPUT = 3
    NOT_FOUND = 4
    CONFLICT = 5
    UNREACHABLE = 6
    JOB_DID_NOT_SUCCEED = 7
    INTERRUPTED = 130


_EXIT_CODES: tuple[tuple[type[errors.SpoError], int], ...] = (
    (errors.InvalidInput, ExitCode.INVALID_INPUT),
    (errors.NotFound, ExitCode.NOT_FOUND),
    (errors.Conflict, ExitCode.CONFLICT),
    (errors.PreconditionFailed, ExitCode.CONFLICT),
    (errors.NotReady, ExitCode.UNREACHABLE),
    (errors.SpoError, ExitCode.FAILURE),
)
_NEXT_STEP = {
    ExitCode.INVALID_INPUT: "correct the fields named above and submit again",
    ExitCode.NOT_FOUND: "`spo job list` shows the jobs there are",
    ExitCode.CONFLICT: "`spo job get` shows the present state",
    ExitCode.UNREACHABLE: "`spo doctor` looks for the cause",
    ExitCode.FAILURE: "the service's log has the details (runs/<name>/logs)",
}
_NEXT_STEP_BY_CODE = {
    "platform_not_found": "`spo up` starts one",
    "already_running": "`spo down` stops it",
    "file_not_found": "check the path",
    "unknown_language": "say --language, or install what it needs: `spo doctor`",
    "no_isolation": "`make system-deps` installs bubblewrap and libseccomp; `spo doctor` says what works here",
}


def exit_code_of(error: errors.SpoError) -> int:
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


def print_error(error: errors.SpoError) -> None:
    """Message, faulty fields and the next step on standard error."""
    error_console.print(f"[bold red]error[/] {escape(error.message)} [dim]({escape(error.code)})[/]", highlight=False)
    for violation in error.violations:
        error_console.print(f"  [yellow]{escape(violation.pointer)}[/] {escape(violation.message)}", highlight=False)
    next_step = _NEXT_STEP_BY_CODE.get(error.code) or _NEXT_STEP[exit_code_of(error)]
    error_console.print(f"[dim]{next_step}[/]", highlight=False)


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: Output) -> None:
    """Rows as a table of these columns, or whole as JSON or YAML."""
    if output is not Output.TABLE:
        print_document([dict(row) for row in rows], output)
        return
    table = Table(box=None, header_style="bold")
    for position, column in enumerate(columns):
        # The first column names the row: whole, so that it can be copied.
        table.add_column(column, overflow="fold", no_wrap=position == 0)
    for row in rows:
        table.add_row(*(escape(_cell(row.get(column))) for column in columns))
    console.print(table)


def print_document(document: Any, output: Output) -> None:
    """One answer; people get YAML."""
    if output is Output.JSON:
        console.print_json(json.dumps(document))
    else:
        console.print(
            yaml.safe_dump(document, sort_keys=False, allow_unicode=True), markup=False, highlight=False, end=""
        )


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.4g}"
        case list():
            return ", ".join(str(each) for each in value)
        case _:
            return str(value)
