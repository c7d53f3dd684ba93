"""How the command line prints: tables for people, JSON or YAML for programs; errors with what to do next."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum

import yaml
from pydantic import BaseModel
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spo import errors
from spo.errors import catalogue

# Columns of longer cells may be cut into lines of so many characters, and no shorter ones.
NARROWEST_COLUMN = 20
# What a column's name does not say to people who are new here.
HEADINGS = {"reward": "reward (0: solved)"}

# As the API writes times; people read them to the second.
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?Z")
# Rows beside the first that has a fault are named, so many.
SHOWN_PLACES = 5
_ROW = re.compile(r"\b(?:line|row) \d+\b")
CHECKED_LOG_SECONDS = 10.0

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
EXIT_CODES = (
    (0, "done"),
    (ExitCode.FAILURE, "failure; the log of the service says more"),
    (2, "wrong usage of the command line"),
    (ExitCode.INVALID_INPUT, "invalid input; each faulty field is named"),
    (ExitCode.NOT_FOUND, "not found"),
    (ExitCode.CONFLICT, "conflict: not possible in the present state"),
    (ExitCode.UNREACHABLE, "unreachable or not ready; may be tried again"),
    (ExitCode.JOB_DID_NOT_SUCCEED, "the job did not succeed, or evaluations of it never came"),
    (ExitCode.INTERRUPTED, "interrupted"),
)
_NEXT_STEP = {
    ExitCode.INVALID_INPUT: "correct the fields named above and submit again",
    ExitCode.NOT_FOUND: "`spo job list` shows the jobs there are",
    ExitCode.CONFLICT: "`spo job get` shows the present state",
    ExitCode.UNREACHABLE: "`spo doctor` looks for the cause",
    ExitCode.FAILURE: "the service's log has the details (runs/<name>/logs)",
}


@contextmanager
def while_checked() -> Iterator[None]:
    """A bar with the time while the platform checks what is submitted: the model, its tokenizer, all problems.

    On standard error; where that is no terminal, a line every CHECKED_LOG_SECONDS.
    """
    what, over = "the platform checks the model and the problems", threading.Event()

    def tell() -> None:
        began = time.monotonic()
        while not error_console.is_terminal and not over.wait(CHECKED_LOG_SECONDS):
            error_console.print(f"{what}, {time.monotonic() - began:.0f} s so far", highlight=False)

    told = threading.Thread(target=tell, name="while-checked", daemon=True)
    told.start()
    columns = (TextColumn(what), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=error_console, transient=True, disable=not error_console.is_terminal) as bar:
            bar.add_task("", total=None)
            yield
    finally:
        over.set()
        told.join()


def exit_code_of(error: errors.SpoError) -> int:
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


def print_error(error: errors.SpoError) -> None:
    """Message, faulty fields and the next step on standard error."""
    error_console.print(f"[bold red]error[/] {escape(error.message)} [dim]({escape(error.code)})[/]", highlight=False)
    for alike in grouped(error.violations):
        first = alike[0]
        error_console.print(f"  [yellow]{escape(first.pointer)}[/] {escape(first.message)}", highlight=False)
        if len(alike) > 1:
            places = [found[0] for each in alike[1:] if (found := _ROW.search(f"{each.pointer} {each.message}"))]
            where = (
                f": {', '.join(places[:SHOWN_PLACES])}{', ...' if len(places) > SHOWN_PLACES else ''}" if places else ""
            )
            error_console.print(f"    [dim]and {len(alike) - 1} more like it{where}[/]", highlight=False)
    # The step of an exit code fits no error exactly; the catalogue's does.
    entry = catalogue().get(error.code)
    next_step = entry.remedy if entry else _NEXT_STEP[exit_code_of(error)]
    error_console.print(f"[dim]{escape(next_step)}[/]", highlight=False)


def grouped(violations: Sequence[errors.FieldViolation]) -> list[list[errors.FieldViolation]]:
    """Violations that differ only in their row together, in the order of the first of each."""
    groups: dict[tuple[str, str], list[errors.FieldViolation]] = {}
    for violation in violations:
        groups.setdefault((_ROW.sub("", violation.pointer), _ROW.sub("", violation.message)), []).append(violation)
    return list(groups.values())


def print_failure(code: str, message: str) -> None:
    """Why a job failed and what to do, on standard error."""
    error_console.print(f"[bold red]failed[/] {escape(message)} [dim]({escape(code)})[/]", highlight=False)
    if code in catalogue():
        error_console.print(f"[dim]{escape(catalogue()[code].remedy)}[/]", highlight=False)


def print_rows(rows: Sequence[Mapping[str, object] | BaseModel], columns: Sequence[str], output: Output) -> None:
    """Rows as a table of these columns, or whole as JSON or YAML."""
    documents = [_plain(row) for row in rows]
    if output is not Output.TABLE:
        print_document(documents, output)
        return
    cells = [[_cell(document.get(column)) for column in columns] for document in documents]
    if _is_readable(columns, cells):
        table = Table(box=None, header_style="bold")
        for position, column in enumerate(columns):
            # The first column names the row: whole, so that it can be copied.
            table.add_column(HEADINGS.get(column, column), overflow="fold", no_wrap=position == 0)
        for row in cells:
            table.add_row(*map(escape, row))
        console.print(table)
        return
    for row in cells:
        _print_entry_by_lines(columns, row)


def print_document(document: object, output: Output) -> None:
    """One answer; people get YAML."""
    if isinstance(document, BaseModel):
        document = _plain(document)
    if output is Output.JSON:
        console.print_json(json.dumps(document))
    else:
        console.print(
            yaml.safe_dump(document, sort_keys=False, allow_unicode=True), markup=False, highlight=False, end=""
        )


def print_entry(document: BaseModel, output: Output) -> None:
    """One of a stream of answers: a line of JSON, or a YAML document."""
    plain = _plain(document)
    text = json.dumps(plain) if output is Output.JSON else "---\n" + yaml.safe_dump(plain, sort_keys=False)
    console.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)


def _is_readable(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> bool:
    """Whether the terminal is wide enough for a table: short cells whole, a word or two of long ones on a line."""
    widths = [
        max([cell_len(HEADINGS.get(column, column)), *(cell_len(row[place]) for row in cells)])
        for place, column in enumerate(columns)
    ]
    needed = widths[:1] + [min(width, NARROWEST_COLUMN) for width in widths[1:]]
    return sum(needed) + 2 * len(columns) <= console.width


def _print_entry_by_lines(columns: Sequence[str], row: Sequence[str]) -> None:
    """A row as one line for each column that holds something, indented below the first."""
    console.print(row[0], style="bold", markup=False, highlight=False, soft_wrap=True)
    for column, cell in zip(columns[1:], row[1:], strict=True):
        if cell:
            console.print(f"  {HEADINGS.get(column, column)}: {cell}", markup=False, highlight=False, soft_wrap=True)


def _plain(document: Mapping[str, object] | BaseModel) -> dict[str, object]:
    """A document as JSON has it; of a model the fields that were sent, those that this release does not know too."""
    return document.model_dump(mode="json", exclude_unset=True) if isinstance(document, BaseModel) else dict(document)


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.0f}" if 1000 <= abs(value) < 1_000_000 else f"{value:.3g}"
        case list():
            return ", ".join(str(member) for member in value)
        case str() if moment := _MOMENT.fullmatch(value):
            return f"{moment[1]} {moment[2]}"
        case _:
            return str(value)
