"""`spo judge` and `spo verifier`: program files judged from the shell, and how well a model as judge agrees with
people.
"""

from __future__ import annotations

import functools
import json
import math
import os
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.markup import escape
from rich.progress import Progress

from spo.console import ExitCode, Output, console, error_console, print_document, print_rows
from spo.errors import FieldViolation, InvalidInput, NotFound, SpoError
from spo.local.judge_client import AUTO, JudgeClient, running_verifier
from spo.rpc.client import RpcClient, show_token
from spo.service.settings import PlatformSettings
from spo.spec.section import wire_name
from spo.spec.tasks import ModelVerifier
from spo.tasks.verifier import VERIFIER, calibration_of
from spo.v1.judge_service_pb2 import PRIORITY_EVALUATION, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.verdict_pb2 import Checker, Limits, ModelScore, Outcome, TestCase, TestSet, Verdict

LARGEST_PROGRAM_BYTES = 1 << 20
# What one gRPC message carries, less some room.
LARGEST_TESTS_BYTES = 60 << 20
MOST_VIOLATIONS = 10
LANGUAGES_BY_SUFFIX = {
    ".py": "python",
    ".cpp": "cpp",
    ".cc": "cpp",
    ".cxx": "cpp",
    ".c++": "cpp",
    ".c": "c",
    ".java": "java",
}
CHECKERS = {
    Checker.Name(value).removeprefix("CHECKER_").lower(): value
    for value in Checker.values()
    if value not in (Checker.CHECKER_UNSPECIFIED, Checker.CHECKER_SPECIAL)
}
_TEST_KEYS = {"stdin", "stdout", "public"}

START_SECONDS = 60.0
LONGEST_SECONDS = 86_400.0
# As in the judge, which gives up a program after so many tests at their time limit.
MOST_TIME_LIMITS = 20

Row = dict[str, Any]

CALL_SECONDS = 3600.0

verifier = typer.Typer(no_args_is_help=True, help="Verifiers: how far to trust one.")


@dataclass(frozen=True)
class ProgramFile:
    """A program's file and the language it is judged in."""

    path: Path
    language: str

    def read(self) -> bytes:
        """The source. Raises NotFound when it has vanished, InvalidInput when it cannot be read."""
        try:
            with self.path.open("rb") as file:
                return file.read(LARGEST_PROGRAM_BYTES)
        except FileNotFoundError:
            raise _absent(self.path) from None
        except OSError as error:
            raise InvalidInput(f"cannot read {self.path}: {error.strerror}", code="unreadable_program") from None


def find_programs(paths: Sequence[Path], language: str | None) -> list[ProgramFile]:
    """The program files, all there and of a known language. Raises NotFound, InvalidInput."""
    return [ProgramFile(path, language or language_of(_require_file(path))) for path in map(_require_file, paths)]


def language_of(path: Path) -> str:
    """The language that a file's name tells. Raises InvalidInput (code "unknown_language")."""
    language = LANGUAGES_BY_SUFFIX.get(path.suffix.lower())
    if language is None:
        known = ", ".join(LANGUAGES_BY_SUFFIX)
        raise InvalidInput(
            f"cannot tell the language of {path} by its name (known: {known}); say --language", code="unknown_language"
        )
    return language


def read_tests(path: Path, limits: Limits, checker: str, absolute: float, relative: float) -> tuple[TestSet, set[str]]:
    """The test set of a tests.json and the keys in it that mean nothing here. Raises NotFound, InvalidInput.

    checker: one of CHECKERS, or the path of a special judge's source.
    """
    tests, unknown = _parse_tests(path)
    test_set = TestSet(tests=tests, limits=limits, absolute_tolerance=absolute, relative_tolerance=relative)
    if checker in CHECKERS:
        test_set.checker = CHECKERS[checker]
    elif Path(checker).suffix or Path(checker).exists():
        (program,) = find_programs([Path(checker)], None)
        test_set.checker = Checker.CHECKER_SPECIAL
        test_set.checker_program = program.read()
        test_set.checker_language = program.language
    else:
        known = ", ".join(CHECKERS)
        raise InvalidInput(f"no checker {checker!r}; known: {known}, or a program's file", code="unknown_checker")
    return test_set, unknown


def _parse_tests(path: Path) -> tuple[list[TestCase], set[str]]:
    try:
        size_bytes = _require_file(path).stat().st_size
        if size_bytes > LARGEST_TESTS_BYTES:
            raise _bad_tests(f"{path} has {size_bytes >> 20} MiB; at most {LARGEST_TESTS_BYTES >> 20} are judged by")
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise _bad_tests(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _bad_tests(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except (ValueError, RecursionError) as error:
        raise _bad_tests(f"{path} is not JSON: {error}") from None
    if not isinstance(document, list) or not document:
        found = "an empty list" if document == [] else f"a {type(document).__name__}"
        raise _bad_tests(f'{path} must be a list of {{"stdin": ..., "stdout": ...}}; it is {found}')
    violations = [violation for number, entry in enumerate(document) for violation in _wrong_with(number, entry)]
    if violations:
        raise InvalidInput(
            f'{path} must be a list of {{"stdin": text, "stdout": text}}',
            code="bad_tests",
            violations=tuple(violations[:MOST_VIOLATIONS]),
        )
    return [_test_case(entry) for entry in document], {key for entry in document for key in entry} - _TEST_KEYS


def _wrong_with(number: int, entry: Any) -> list[FieldViolation]:
    if not isinstance(entry, dict):
        return [FieldViolation(f"/{number}", f"must be an object, is {_named(entry)}")]
    wrong = [
        FieldViolation(f"/{number}/{key}", f"must be text, is {_named(entry[key])}" if key in entry else "is missing")
        for key in ("stdin", "stdout")
        if not _is_text(entry.get(key))
    ]
    if not isinstance(entry.get("public", False), bool):
        wrong.append(FieldViolation(f"/{number}/public", "must be true or false"))
    return wrong


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(value: Any) -> str:
    match value:
        case str():
            return "text with half a surrogate pair"
        case float() if not math.isfinite(value):
            return "no JSON number"
        case None:
            return "null"
        case _:
            return f"a {type(value).__name__}"


def _test_case(entry: dict[str, Any]) -> TestCase:
    return TestCase(
        stdin=entry["stdin"].encode(), stdout=entry["stdout"].encode(), public=bool(entry.get("public", False))
    )


def _require_file(path: Path) -> Path:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise _absent(path) from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {path}: {error}", code="unreadable_file") from None
    if not stat.S_ISREG(mode):
        raise InvalidInput(f"{path} is not a file", code="not_a_file")
    return path


def _absent(path: Path) -> NotFound:
    return NotFound(f"no file {path}", code="file_not_found")


def _bad_tests(message: str) -> InvalidInput:
    return InvalidInput(message, code="bad_tests")


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


@verifier.command("calibrate")
def calibrate(
    examples: Annotated[Path, typer.Argument(help="JSON lines: statement, response, label (0 to 1), reference.")],
    judge: Annotated[Path, typer.Argument(help="YAML file with a job's section tasks.verifier, of kind model.")],
    where: Annotated[str, typer.Option("--verifier", help="host:port; default: the one that runs here.")] = "",
    job: Annotated[str, typer.Option("--job", help="A running job whose pi0 judges, without an address.")] = "",
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print.")] = Output.TABLE,
) -> None:
    """Score labelled examples and tell agreement, confusion, order and what each score stands for."""
    rows = read_examples(examples)
    asked = read_judge(judge)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["statement"], row["reference"]].append(row)
    show_token(PlatformSettings().rpc_token.get_secret_value())
    client = RpcClient(VERIFIER, where or _running(), JudgeServiceStub)
    for (statement, reference), theirs in groups.items():
        model = ModelScore(
            rubric=asked.rubric,
            statement=statement,
            reference=reference,
            address=asked.address or "",
            model=asked.model,
            votes=asked.votes,
        )
        _score(client, TestSet(model=model, pass_score=asked.pass_score), theirs, job)
    client.close()
    found = calibration_of([row["score"] for row in rows], [row["label"] for row in rows], asked.pass_score)
    if output is not Output.TABLE:
        print_document(asdict(found), output)
        return
    told = asdict(found)
    bins = told.pop("bins")
    for name, value in told.items():
        console.print(f"{name.replace('_', ' ')}: {value if isinstance(value, int | None) else round(value, 3)}")
    print_rows(bins, ("low", "examples", "mean_score", "mean_label"), output)


def read_judge(path: Path) -> ModelVerifier:
    """The model as judge that a file describes. Raises InvalidInput with a pointer to each fault."""
    try:
        return ModelVerifier.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        faults = [("/".join(("", *map(str, each["loc"]))), each["msg"]) for each in error.errors()]
    except (yaml.YAMLError, UnicodeError) as error:
        faults = [("", str(error)[:200])]
    violations = tuple(FieldViolation(pointer, message) for pointer, message in faults)
    raise InvalidInput(f"{path} describes no model as judge", code="invalid_job_spec", violations=violations)


def read_examples(path: Path) -> list[dict[str, Any]]:
    """The labelled examples of a file. Raises InvalidInput naming each line that is none."""
    rows, faults = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            label = float(row["label"])
            if not 0 <= label <= 1 or not isinstance(row["response"], str):
                raise ValueError("the label must be from 0 to 1, the response a text")
            statement, reference = str(row.get("statement", "")), str(row.get("reference", ""))
            rows.append({"statement": statement, "reference": reference, "response": row["response"], "label": label})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            faults.append(FieldViolation(f"/{number}", f"{type(error).__name__}: {error}"[:200]))
    if faults or not rows:
        message = f"{path}: {len(faults)} lines are no labelled examples" if faults else f"{path} holds no example"
        raise InvalidInput(message, code="malformed_task", violations=tuple(faults[:20]))
    return rows


def _score(client: RpcClient, test_set: TestSet, rows: list[dict[str, Any]], job: str) -> None:
    (digest,) = client.call("UploadTests", UploadTestsRequest(test_sets=[test_set])).digests
    responses = list(dict.fromkeys(row["response"] for row in rows))
    request = JudgeRequest(
        programs=responses, language="text", tests_digest=digest, priority=PRIORITY_EVALUATION, run_id=job
    )
    reply: JudgeResponse = client.call("Judge", request, CALL_SECONDS)
    scores = {response: verdict.score for response, verdict in zip(responses, reply.verdicts, strict=True)}
    for row in rows:
        row["score"] = scores[row["response"]]


def _running() -> str:
    if address := running_verifier(Path(os.environ.get("SPO_LAUNCHER_RUNS_PATH", "runs"))):
        return address
    raise NotFound("no platform runs here: `spo up` starts one, --verifier names another's", code="platform_not_found")
