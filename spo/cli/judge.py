"""`spo judge`: judges program files from the shell, one row per program as soon as it is known."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape
from rich.progress import Progress

from spo.cli.judge_files import CHECKERS, ProgramFile, find_programs, read_tests
from spo.console import ExitCode, Output, console, error_console
from spo.errors import InvalidInput, SpoError
from spo.local.judge_client import AUTO, JudgeClient
from spo.spec.wire_enums import wire_name
from spo.v1.verdict_pb2 import Limits, Outcome, TestSet, Verdict

START_SECONDS = 60.0
LONGEST_SECONDS = 86_400.0
# As in the judge, which gives up a program after so many tests at their time limit.
MOST_TIME_LIMITS = 20

Row = dict[str, Any]


def judge(
    programs: Annotated[list[Path], typer.Argument(help="Source files.", metavar="PROGRAM...")],
    tests: Annotated[Path, typer.Option("--tests", help='JSON: a list of {"stdin": text, "stdout": text}.')],
    language: Annotated[
        str | None, typer.Option("--language", help="Of all programs; default: by each file's name.")
    ] = None,
    cpu_seconds: Annotated[float, typer.Option("--cpu-seconds", min=0.01, help="CPU time of one test.")] = 2.0,
    wall_seconds: Annotated[
        float | None,
        typer.Option("--wall-seconds", min=0.01, help="Time asleep in one test; default twice the CPU time and 1 s."),
    ] = None,
    memory_mib: Annotated[int, typer.Option("--memory-mib", min=1, help="Peak memory of one test.")] = 256,
    output_kib: Annotated[
        int | None,
        typer.Option("--output-kib", min=1, help="Output of one test; default 1024, or twice the longest right one."),
    ] = None,
    checker: Annotated[
        str, typer.Option("--checker", help=f"{', '.join(CHECKERS)}, or a special judge's source file.")
    ] = "tokens",
    absolute_tolerance: Annotated[float, typer.Option("--absolute-tolerance", min=0, help="Of checker float.")] = 0.0,
    relative_tolerance: Annotated[float, typer.Option("--relative-tolerance", min=0, help="Of checker float.")] = 0.0,
    *,
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="Skip a program's tests after its first failure.")
    ] = False,
    where: Annotated[
        str, typer.Option("--judge", help="auto (one that runs here, else embedded), embedded, or host:port.")
    ] = os.environ.get("SPO_SANDBOX_JUDGE_ADDRESS", AUTO),
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print.")] = Output.TABLE,
) -> None:
    """Judge programs by tests in the sandbox: one row, or one JSON object per line, for each.

    Exit status 0 when every program has its verdict, whatever it is; 1 when the judge failed on one.
    """
    limits = Limits(
        cpu_seconds=cpu_seconds,
        wall_seconds=wall_seconds or 2 * cpu_seconds + 1,
        memory_bytes=memory_mib << 20,
        output_bytes=(output_kib or 0) << 10,
    )
    files = find_programs(programs, language)
    test_set, unknown = read_tests(tests, limits, checker, absolute_tolerance, relative_tolerance)
    if unknown:
        ignored = ", ".join(sorted(unknown))
        error_console.print(f"[yellow]ignored[/] keys of {escape(str(tests))}: {escape(ignored)}", highlight=False)
    runs_path = Path(os.environ.get("SPO_LAUNCHER_RUNS_PATH", "runs"))
    with JudgeClient(test_set, where, runs_path) as client:
        _require_languages(files, client)
        faults = _print_all(_rows(files, client, test_set, stop_early=stop_early), len(files), _printer(output))
    if faults:
        raise typer.Exit(ExitCode.FAILURE)


def _require_languages(files: list[ProgramFile], client: JudgeClient) -> None:
    """Every judge runs Python; about others it is asked before anything is judged. Raises InvalidInput."""
    known = ["python"] if all(file.language == "python" for file in files) else list(client.describe().languages)
    for file in files:
        if file.language not in known:
            raise InvalidInput(
                f"this judge does not run {file.language!r} ({file.path}); it runs {', '.join(known)}",
                code="unknown_language",
            )


def _rows(files: list[ProgramFile], client: JudgeClient, test_set: TestSet, *, stop_early: bool) -> Iterator[Row]:
    """The rows in the order of the files; two programs per worker of the judge are in flight."""
    in_flight = 2 * client.workers
    limits, tests = test_set.limits, len(test_set.tests)
    slow_tests = min(tests, MOST_TIME_LIMITS)
    worst = START_SECONDS + tests * limits.cpu_seconds + slow_tests * (limits.cpu_seconds + limits.wall_seconds)
    deadline_seconds = min(LONGEST_SECONDS, worst * in_flight)
    row = functools.partial(_row, client, stop_early=stop_early, deadline_seconds=deadline_seconds)
    threads = ThreadPoolExecutor(in_flight, thread_name_prefix="judge")
    try:
        yield from threads.map(row, files)
    except BaseException:
        client.close()  # otherwise the threads would wait for what is still being judged
        raise
    finally:
        threads.shutdown(cancel_futures=True)


def _row(client: JudgeClient, file: ProgramFile, *, stop_early: bool, deadline_seconds: float) -> Row:
    try:
        verdict = client.judge(file.read(), file.language, stop_early=stop_early, deadline_seconds=deadline_seconds)
    except SpoError as error:
        row = {"program": str(file.path), "outcome": "internal_error", "tests": [], "isolation": ""}
        return {**row, "detail": error.message}
    return row_of(file.path, verdict)


def row_of(path: Path, verdict: Verdict) -> Row:
    """What is printed about a program; `detail` and `flags` only where there is something to say."""
    row: Row = {
        "program": str(path),
        "outcome": _name(verdict.outcome),
        "tests": [
            {
                "outcome": _name(test.outcome),
                "cpu_seconds": round(test.cpu_seconds, 6),
                "wall_seconds": round(test.wall_seconds, 6),
                "memory_bytes": test.memory_bytes,
                "detail": test.detail,
            }
            for test in verdict.tests
        ],
        "isolation": verdict.isolation,
    }
    if verdict.outcome == Outcome.OUTCOME_COMPILE_ERROR:
        row["detail"] = verdict.detail
    if verdict.suspected_hard_coded:
        row["flags"] = ["suspected_hard_coded"]
    return row


def _name(outcome: Outcome.ValueType) -> str:
    return wire_name(Outcome, outcome)


def _print_all(rows: Iterator[Row], total: int, show: Callable[[Row], None]) -> int:
    """Print every row as it comes; returns how many programs the judge failed on."""
    faults = 0
    bar = Progress(console=error_console, transient=True) if error_console.is_terminal else nullcontext()
    with bar as progress:
        task = progress.add_task("judging", total=total) if progress else None
        for row in rows:
            show(row)
            faults += row["outcome"] == "internal_error"
            if progress and task is not None:
                progress.advance(task)
    return faults


def _printer(output: Output) -> Callable[[Row], None]:
    match output:
        case Output.JSON:
            return lambda row: _write(json.dumps(row) + "\n")
        case Output.YAML:
            return lambda row: _write(yaml.safe_dump(row, sort_keys=False, allow_unicode=True, explicit_start=True))
        case Output.TABLE:
            return _print_line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_line(row: Row) -> None:
    """One line for people: the outcome, how many tests passed, the dearest of them, and why not."""
    tests = row["tests"]
    passed = sum(test["outcome"] == "accepted" for test in tests)
    slowest = max((test["cpu_seconds"] for test in tests), default=0.0)
    largest = max((test["memory_bytes"] for test in tests), default=0)
    colour = {"accepted": "green", "internal_error": "magenta"}.get(row["outcome"], "red")
    why = row.get("detail") or next(
        (
            f"test {number}: {test['outcome']}: {test['detail']}"
            for number, test in enumerate(tests, start=1)
            if test["outcome"] not in ("accepted", "skipped")
        ),
        "",
    )
    console.print(
        f"[{colour}]{row['outcome']:<18}[/] {passed}/{len(tests)}  {slowest:.3f} s  {largest >> 20} MiB  "
        f"[bold]{_safe(row['program'])}[/]  [dim]{_safe(' '.join([*row.get('flags', []), *why.split()]))}[/]",
        highlight=False,
        soft_wrap=True,
    )


def _safe(text: str) -> str:
    """What a program has said, without what would steer the terminal or the markup."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))
