"""One program on its tests, in order: built, run, each output compared, hard-coded answers suspected.

Does an output answer a test? Bytes in, the first difference out; no locale, no unicode digits, no surprises.
tokens            the same sequence of words between ASCII whitespace
exact             the same bytes; a newline at the very end may be missing
float             tokens, except that two decimal numbers may differ by absolute + relative * |expected|; nan equals
                  only nan, an infinity only itself
unordered lines   the same lines (as tokens, blank ones dropped) in any order
case insensitive  tokens, ASCII letters alike

Does a program that is right on the public tests and wrong on hidden ones merely print remembered answers?
Two signs count: it prints the same whatever it reads, or its source holds the public tests' answers as literals
together with their inputs, or answers too peculiar to stand there by chance. A program that is right on a hidden test
whose answer no public test has is cleared: it computes something. The flag is a suspicion for people who look after
tests and rewards; it changes no outcome.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import threading
import tokenize
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice

from blake3 import blake3

from services.sandbox_judge.executor import (
    BUILD_LIMITS,
    CompileFailed,
    JudgeFault,
    Language,
    ProgramRun,
    RunEnding,
    RunLimits,
    language_of,
    limits_of,
)
from services.sandbox_judge.isolation import Executable, Freedom
from services.sandbox_judge.sandbox_worker import PreparedProgram, Role, SandboxWorker
from spo.redis_keys import digest
from spo.tasks.answer import Number, is_close
from spo.v1.verdict_pb2 import Checker, Outcome, TestCase, TestResult, TestSet, Verdict

DEFAULT_TOLERANCE = 1e-6
_SHOWN_BYTES = 80
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?|[+-]?inf(inity)?|[+-]?nan", re.IGNORECASE | re.ASCII)

SUSPICIOUS = (Outcome.OUTCOME_WRONG_ANSWER, Outcome.OUTCOME_RUNTIME_ERROR)
FURTHER_TESTS = 5
# So many characters of answers that hidden tests do not have stand in no source by chance.
PECULIAR_CHARACTERS = 6
# A string literal that is a public test's whole input is no accident from this length on.
SPEAKING_INPUT_CHARACTERS = 2
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LITERALS = re.compile(r'"((?:[^"\\\n]|\\.)*)"|(-?\d+(?:\.\d+)?)')

RunOnce = Callable[[bytes], ProgramRun]
Check = Callable[[TestCase, bytes], str | None]

_KEPT_BYTES = 256 << 20

DETAIL_CHARACTERS = 500
OUTPUT_BYTES = 200
CHECKER_LIMITS = RunLimits(cpu_seconds=10, wall_seconds=20)
# What testlib's checkers exit with.
_CHECKER_ACCEPTS, _CHECKER_REFUSES = 0, (1, 2)

_OUTCOMES = {
    RunEnding.SIGNALLED: Outcome.OUTCOME_RUNTIME_ERROR,
    RunEnding.CPU_TIME_LIMIT: Outcome.OUTCOME_CPU_TIME_LIMIT,
    RunEnding.WALL_TIME_LIMIT: Outcome.OUTCOME_WALL_TIME_LIMIT,
    RunEnding.MEMORY_LIMIT: Outcome.OUTCOME_MEMORY_LIMIT,
    RunEnding.OUTPUT_LIMIT: Outcome.OUTCOME_OUTPUT_LIMIT,
    RunEnding.SECURITY_VIOLATION: Outcome.OUTCOME_SECURITY_VIOLATION,
}

_TIME_LIMITS = (Outcome.OUTCOME_CPU_TIME_LIMIT, Outcome.OUTCOME_WALL_TIME_LIMIT)
# A program that has met its time limit so often will not be right any more; its remaining tests are skipped.
MOST_TIME_LIMITS = 20

# Where an output first goes wrong, None when it is right.
ProgramJudgeCheck = Callable[[TestCase, bytes], str | None]


def first_difference(test_set: TestSet, expected: bytes, actual: bytes) -> str | None:
    """None when actual is right under the test set's checker, otherwise where it first goes wrong.

    Raises ValueError for CHECKER_SPECIAL, which is a program and not a comparison.
    """
    match test_set.checker:
        case Checker.CHECKER_EXACT:
            same = expected.removesuffix(b"\n") == actual.removesuffix(b"\n")
            return None if same else _lines_differ(expected.split(b"\n"), actual.split(b"\n"))
        case Checker.CHECKER_FLOAT:
            return _floats_differ(test_set, expected.split(), actual.split())
        case Checker.CHECKER_UNORDERED_LINES:
            return _multisets_differ(_normalised_lines(expected), _normalised_lines(actual))
        case Checker.CHECKER_CASE_INSENSITIVE:
            return _tokens_differ(expected.lower().split(), actual.lower().split())
        case Checker.CHECKER_TOKENS | Checker.CHECKER_UNSPECIFIED:
            return _tokens_differ(expected.split(), actual.split())
        case other:
            raise ValueError(f"checker {Checker.Name(other)} is not a comparison")


def _tokens_differ(expected: list[bytes], actual: list[bytes]) -> str | None:
    if expected == actual:
        return None
    for position, (right, found) in enumerate(zip(expected, actual, strict=False)):
        if right != found:
            return f"token {position + 1}: expected {_shown(right)}, found {_shown(found)}"
    return _counts_differ("tokens", len(expected), len(actual))


def _floats_differ(test_set: TestSet, expected: list[bytes], actual: list[bytes]) -> str | None:
    absolute, relative = test_set.absolute_tolerance, test_set.relative_tolerance
    if absolute == 0 and relative == 0:
        absolute = relative = DEFAULT_TOLERANCE
    for position, (right, found) in enumerate(zip(expected, actual, strict=False)):
        if right != found and not _close(right, found, absolute, relative):
            return f"token {position + 1}: expected {_shown(right)}, found {_shown(found)}"
    if len(expected) != len(actual):
        return _counts_differ("tokens", len(expected), len(actual))
    return None


def _close(right: bytes, found: bytes, absolute: float, relative: float) -> bool:
    if not (_NUMBER.fullmatch(right) and _NUMBER.fullmatch(found)):
        return False
    wanted, got = Decimal(right.decode()), Decimal(found.decode())
    if wanted.is_nan() or got.is_nan():
        return wanted.is_nan() and got.is_nan()
    if wanted.is_infinite() or got.is_infinite():
        return wanted == got
    return is_close(Number(wanted), Number(got), absolute, relative)


def _normalised_lines(text: bytes) -> list[bytes]:
    return [b" ".join(tokens) for line in text.split(b"\n") if (tokens := line.split())]


def _multisets_differ(expected: list[bytes], actual: list[bytes]) -> str | None:
    missing = Counter(expected)
    missing.subtract(Counter(actual))
    for line, count in missing.items():
        if count:
            return f"line {_shown(line)} {'is missing' if count > 0 else 'should not be there'}"
    return None


def _lines_differ(expected: list[bytes], actual: list[bytes]) -> str:
    for position, (right, found) in enumerate(zip(expected, actual, strict=False)):
        if right != found:
            return f"line {position + 1}: expected {_shown(right)}, found {_shown(found)}"
    return _counts_differ("lines", len(expected), len(actual))


def _counts_differ(what: str, expected: int, actual: int) -> str:
    return f"expected {expected} {what}, found {actual}"


def _shown(text: bytes) -> str:
    shown = ascii(text[:_SHOWN_BYTES].decode(errors="replace"))
    return shown if len(text) <= _SHOWN_BYTES else f"{shown}... ({len(text)} bytes)"


def suspects(
    source: str, language: str, test_set: TestSet, results: Sequence[TestResult], run: RunOnce, check: Check
) -> bool:
    """Whether the failed program looks hard-coded; may run it a few more times. Raises JudgeFault."""
    public = [test for test in test_set.tests if test.public]
    if not public or len(public) == len(test_set.tests):
        return False
    judged = list(zip(test_set.tests, results, strict=False))
    if any(test.public and result.outcome != Outcome.OUTCOME_ACCEPTED for test, result in judged):
        return False
    if sum(test.public for test, _ in judged) < len(public):
        return False  # stopped before it had shown itself on all of them
    failed = next((test for test, result in judged if result.outcome in SUSPICIOUS), None)
    if failed is None:
        return False
    hidden = [test for test in test_set.tests if not test.public]
    if not (ignores_input(run, public[0], failed) or remembers(source, language, public, hidden)):
        return False
    answers = {_words(test.stdout) for test in public}
    new = (test for test in hidden if test is not failed and _words(test.stdout) not in answers)
    return not any(_passes(run(test.stdin), test, check) for test in islice(new, FURTHER_TESTS))


def ignores_input(run: RunOnce, public: TestCase, failed: TestCase) -> bool:
    """Whether the program says the same to nothing at all, to a public and to a hidden test."""
    outputs = set()
    for stdin in (b"", public.stdin, failed.stdin):
        seen = run(stdin)
        if seen.ending is not RunEnding.EXITED or seen.code != 0:
            return False
        outputs.add(seen.stdout)
        if len(outputs) > 1:
            return False
    return True


def remembers(source: str, language: str, public: Sequence[TestCase], hidden: Sequence[TestCase]) -> bool:
    """Whether literals of the source hold every public answer, with its input or with peculiar words of its own."""
    strings, numbers = _python_literals(source) if language.startswith("py") else _other_literals(source)
    texts = {_words(text.encode(errors="replace")) for text in strings}
    words = {number.encode() for number in numbers}.union(*texts)
    if not all(words.issuperset(_words(test.stdout)) for test in public):
        return False
    inputs = [_words(test.stdin) for test in public]
    if all(words_of in texts and sum(map(len, words_of)) >= SPEAKING_INPUT_CHARACTERS for words_of in inputs):
        return True
    seen = {word for test in public for word in _words(test.stdout)}
    if all(words.issuperset(words_of) for words_of in inputs):
        seen.update(*inputs)
    ordinary = {word for test in hidden for word in _words(test.stdout)}
    return sum(len(word) for word in seen - ordinary if len(word) > 1) >= PECULIAR_CHARACTERS


def _words(text: bytes) -> tuple[bytes, ...]:
    return tuple(text.split())


def _passes(seen: ProgramRun, test: TestCase, check: Check) -> bool:
    return seen.ending is RunEnding.EXITED and seen.code == 0 and check(test, seen.stdout) is None


def _python_literals(source: str) -> tuple[list[str], list[str]]:
    """Strings and numbers of a program, without strings that stand there as comments.

    By tokens, not by a syntax tree: a hostile source can crash an interpreter that builds one.
    """
    strings, numbers, before = [], [], ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.STRING and before not in ("", "\n"):
                strings.append(_text_of(token.string))
            elif token.type == tokenize.NUMBER:
                numbers += [token.string, "-" + token.string] if before == "-" else [token.string]
            if token.type == tokenize.NEWLINE:
                before = "\n"
            elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
                before = token.string
    except (tokenize.TokenError, SyntaxError):
        pass
    return strings, numbers


def _text_of(literal: str) -> str:
    try:
        value = ast.literal_eval(literal)
    except (SyntaxError, ValueError):
        return ""  # an f-string
    return value if isinstance(value, str) else bytes(value).decode(errors="replace")


def _other_literals(source: str) -> tuple[list[str], list[str]]:
    strings, numbers = [], []
    for text, number in _LITERALS.findall(_COMMENTS.sub(" ", source)):
        if number:
            numbers += [number, number.lstrip("-")]
        else:
            strings.append(text.replace("\\n", "\n"))
    return strings, numbers


class Binaries:
    """Built programs by digest of their source; the oldest go when they need too much memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0

    def built(self, language: Language, source: bytes, worker: SandboxWorker) -> bytes:
        """What the program's build has made. Raises CompileFailed, or JudgeFault when the compiler could not run."""
        key = digest(*language.build, blake3(source).hexdigest())
        with self._lock:
            binary = self._kept.get(key)
        if binary is None:
            binary = build(language, source, worker)
            self._keep(key, binary)
        return binary

    def _keep(self, key: str, binary: bytes) -> None:
        with self._lock:
            self._kept_bytes += len(binary) - len(self._kept.pop(key, b""))
            self._kept[key] = binary
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])


def command_of(language: Language, limits: RunLimits) -> Executable:
    """What runs a built program of a language that has a runtime."""
    command = tuple(word.replace("{memory_mib}", str(limits.memory_bytes >> 20)) for word in language.run)
    return Executable(command=command, environment=language.environment, freedom=Freedom.COMMAND)


def limits_in(language: Language, limits: RunLimits) -> RunLimits:
    """A program's limits with what the language's runtime takes itself."""
    return replace(
        limits,
        memory_bytes=limits.memory_bytes + language.allowance_bytes,
        processes=max(limits.processes, language.processes),
    )


def build(language: Language, source: bytes, worker: SandboxWorker) -> bytes:
    """The binary of a program, built inside a jail. Raises CompileFailed or JudgeFault."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": ".", "LC_ALL": "C.UTF-8", **language.environment}
    executable = Executable(command=language.command, environment=environment, freedom=Freedom.TOOLCHAIN)
    with worker.open(Role.COMPILER, executable, BUILD_LIMITS) as compiler:
        run = compiler.run(source)
    if run.ending is RunEnding.EXITED and run.code == 0 and run.stdout:
        return run.stdout
    if run.ending is RunEnding.EXITED and run.code == 127:
        raise JudgeFault(f"{language.build[0]} cannot be run in the jail: {run.stderr.decode(errors='replace')}")
    reason = "" if run.ending is RunEnding.EXITED else f"{run.ending.value} of the compiler: "
    raise CompileFailed(reason + run.stderr.decode(errors="replace"))


class Cancelled(Exception):
    """Nobody waits for this verdict any more."""


@dataclass(frozen=True)
class JudgeOptions:
    """Which tests to run and to report, and whether anybody still waits for the verdict.

    Without details nobody learns of the tests after a failure, so they are not run.
    """

    want_details: bool = False
    stop_early: bool = False
    # Of what each test printed, so much is reported.
    output_bytes: int = OUTPUT_BYTES
    wanted: Callable[[], bool] = lambda: True
    # Whose responses they are: groups of one run may share a process.
    run_id: str = ""

    @property
    def ends_at_failure(self) -> bool:
        return self.stop_early or not self.want_details


class ProgramJudge:
    """Judges programs on a sandbox worker; shared by all of them."""

    def __init__(self, max_source_bytes: int) -> None:
        self.max_source_bytes = max_source_bytes
        self.binaries = Binaries()

    def judge(
        self,
        worker: SandboxWorker,
        program: str,
        language: str,
        test_set: TestSet,
        options: JudgeOptions = JudgeOptions(),
    ) -> Verdict:
        """The verdict on one program. Raises JudgeFault when the judge, not the program, failed, and Cancelled."""
        source = encoded(program)
        if len(source) > self.max_source_bytes:
            reason = f"the program has {len(source)} bytes; at most {self.max_source_bytes} are judged"
            return _refused(test_set, reason, options)
        try:
            with contextlib.ExitStack() as stack:
                check = self._checker(worker, test_set, stack)
                prepared = stack.enter_context(self._prepared(worker, source, language, limits_of(test_set)))
                results = list(_results(prepared.run, check, test_set, options))
                verdict = summary_of(results, test_set, want_details=options.want_details)
                verdict.suspected_hard_coded = suspects(program, language, test_set, results, prepared.run, check)
                return verdict
        except CompileFailed as failure:
            return _refused(test_set, str(failure), options)

    def checker_fault(self, worker: SandboxWorker, test_set: TestSet) -> str | None:
        """Why the comparison fails on what is right, None where it decides on that: the fault was the output's."""
        try:
            with contextlib.ExitStack() as stack:
                check = self._checker(worker, test_set, stack)
                for test in test_set.tests[:1]:
                    check(test, test.stdout)
        except JudgeFault as fault:
            return str(fault)
        return None

    def _prepared(
        self, worker: SandboxWorker, source: bytes, language: str, limits: RunLimits
    ) -> contextlib.AbstractContextManager[PreparedProgram]:
        """The program in its jail, built before where its language says so."""
        known = language_of(language)
        if not known.run:
            return worker.open(Role.PROGRAM, self._executable(worker, source, known), limits)
        built = self.binaries.built(known, source, worker)
        return worker.open(Role.PROGRAM, command_of(known, limits), limits_in(known, limits), (built,))

    def _executable(self, worker: SandboxWorker, source: bytes, language: Language) -> Executable:
        if not language.build:
            return Executable(source=source)
        binary = self.binaries.built(language, source, worker)
        return Executable(binary=binary, command=("program",), freedom=Freedom.COMMAND)

    def _checker(self, worker: SandboxWorker, test_set: TestSet, stack: contextlib.ExitStack) -> ProgramJudgeCheck:
        """The comparison of a test set; a special judge runs in a jail of its own and gets the three files by path."""
        if test_set.checker != Checker.CHECKER_SPECIAL:
            return lambda test, output: first_difference(test_set, test.stdout, output)
        paths = ("checker", "/dev/fd/3", "/dev/fd/4", "/dev/fd/5")
        try:
            language = language_of(test_set.checker_language or "python")
            executable = self._executable(worker, test_set.checker_program, language)
            named = Executable(executable.source, executable.binary, paths, freedom=executable.freedom)
            prepared = stack.enter_context(worker.open(Role.CHECKER, named, CHECKER_LIMITS))
        except CompileFailed as failure:
            raise JudgeFault(f"the special judge does not compile: {failure}") from failure

        def check(test: TestCase, output: bytes) -> str | None:
            run = prepared.run(b"", (test.stdin, output, test.stdout))
            if run.ending is RunEnding.EXITED and run.code == _CHECKER_ACCEPTS:
                return None
            if run.ending is RunEnding.EXITED and run.code in _CHECKER_REFUSES:
                return f"special judge: {_tail(run.stderr + run.stdout)}"
            raise JudgeFault(f"the special judge failed: {run.ending.value} ({run.code}) {_tail(run.stderr)}")

        return check


def encoded(program: str) -> bytes:
    """The program's bytes; those that are not UTF-8 have come as surrogates."""
    return program.encode("utf-8", "surrogateescape")


def _results(
    run: Callable[[bytes], ProgramRun], check: ProgramJudgeCheck, test_set: TestSet, options: JudgeOptions
) -> Iterator[TestResult]:
    """The results of the tests in order; skipped tests appear only where details are wanted."""
    time_limits, skipped = 0, ""
    for position, test in enumerate(test_set.tests):
        if skipped:
            yield TestResult(outcome=Outcome.OUTCOME_SKIPPED, detail=skipped)
            continue
        if not options.wanted():
            raise Cancelled
        result = result_of(run(test.stdin), lambda output, test=test: check(test, output), options.output_bytes)  # type: ignore[misc]
        yield result
        time_limits += result.outcome in _TIME_LIMITS
        if result.outcome != Outcome.OUTCOME_ACCEPTED and options.ends_at_failure:
            skipped = f"not run: test {position + 1} had already failed"
        elif time_limits >= MOST_TIME_LIMITS:
            skipped = f"not run: the program had already met its time limit {time_limits} times"
        if skipped and not options.want_details:
            return


def result_of(
    run: ProgramRun, difference_in: Callable[[bytes], str | None], output_bytes: int = OUTPUT_BYTES
) -> TestResult:
    """What a run means for its test; only the output of a clean exit is looked at."""
    detail = ""
    if run.ending is RunEnding.EXITED and run.code == 0:
        difference = difference_in(run.stdout)
        outcome = Outcome.OUTCOME_ACCEPTED if difference is None else Outcome.OUTCOME_WRONG_ANSWER
        detail = difference or ""
    elif run.ending is RunEnding.EXITED:
        outcome = Outcome.OUTCOME_RUNTIME_ERROR
        detail = f"exit status {run.code}: {_tail(run.stderr)}"
    else:
        outcome = _OUTCOMES[run.ending]
        detail = f"{run.ending.value} ({run.code}): {_tail(run.stderr)}"
    return TestResult(
        outcome=outcome,
        cpu_seconds=run.cpu_seconds,
        wall_seconds=run.wall_seconds,
        memory_bytes=run.memory_bytes,
        detail=detail.removesuffix(": ")[:DETAIL_CHARACTERS],
        output=run.stdout[:output_bytes].decode(errors="replace"),
    )


def summary_of(results: Sequence[TestResult], test_set: TestSet, *, want_details: bool) -> Verdict:
    """One verdict from the results of the tests that were run: the first failure decides."""
    verdict = Verdict(outcome=Outcome.OUTCOME_ACCEPTED, tests_total=len(test_set.tests), runs=1)
    verdict.public_tests_total = sum(test.public for test in test_set.tests)
    for position, result in enumerate(results):
        verdict.cpu_seconds += result.cpu_seconds
        verdict.wall_seconds += result.wall_seconds
        verdict.memory_bytes = max(verdict.memory_bytes, result.memory_bytes)
        if result.outcome == Outcome.OUTCOME_ACCEPTED:
            verdict.tests_passed += 1
            verdict.public_tests_passed += test_set.tests[position].public
        elif verdict.outcome == Outcome.OUTCOME_ACCEPTED:
            verdict.outcome = result.outcome
            verdict.detail = f"test {position + 1}: {result.detail}"[:DETAIL_CHARACTERS]
    if want_details:
        verdict.tests.extend(results)
    return verdict


def _refused(test_set: TestSet, reason: str, options: JudgeOptions) -> Verdict:
    """The verdict on a source that does not compile; none of its tests was run."""
    verdict = summary_of((), test_set, want_details=False)
    verdict.outcome = Outcome.OUTCOME_COMPILE_ERROR
    verdict.detail = reason.encode(errors="replace").decode(errors="replace")[:DETAIL_CHARACTERS]
    if options.want_details:
        skipped = TestResult(outcome=Outcome.OUTCOME_SKIPPED, detail="not run: the program does not compile")
        verdict.tests.extend([skipped] * len(test_set.tests))
    return verdict


def _tail(stderr: bytes) -> str:
    """The end of what a program said about its failure: that is where the exception is."""
    return stderr[-DETAIL_CHARACTERS * 4 :].decode(errors="replace").strip()[-(DETAIL_CHARACTERS - 50) :]
