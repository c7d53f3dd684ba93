"""Responses that are no programs: answers compared, and functions or people's tests run in the sandbox, several
responses in one fork.

Responses scored by a function in the sandbox, several in one fork: each within the limits, each with its verdict.
What the function does wrong is its own fault, never a score: the response is tried again, and then the verdict says so.

Groups of one run and one function scored in one fork, since a fork costs as much as many responses of a quick one.
A fork in which anything goes wrong decides about none of its groups: each is then judged alone, so that what spoilt it
is told of the group that did it, and harms no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import marshal
import os
import re
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeVar

from services.sandbox_judge.comparison_child import Finding, read_frame, write_frame
from services.sandbox_judge.executor import JudgeFault, ProgramRun, RunEnding, RunLimits, limits_of
from services.sandbox_judge.isolation import Executable
from services.sandbox_judge.jail.loading import UNCOMPILABLE, Sent
from services.sandbox_judge.jail.program import STARVATION
from services.sandbox_judge.jail.running import ENDED, NOT_A_PROGRAM, WRONG, proof_of
from services.sandbox_judge.jail.tests_child import plan
from services.sandbox_judge.jail.wire import LOST
from services.sandbox_judge.program_judge import DETAIL_CHARACTERS, Cancelled, JudgeOptions, encoded, result_of
from services.sandbox_judge.sandbox_worker import PreparedProgram, Role, SandboxWorker
from spo.errors import NotReady
from spo.observability import get_logger
from spo.redis_keys import digest
from spo.spec.reward import reaches
from spo.tasks.answer import LONGEST_ANSWER, UNBOUNDED, answer_in, fault_of, is_close, number_of
from spo.tasks.separate_tests import is_shared
from spo.v1 import verdict_pb2 as wire

log = get_logger("scoring")

Result = TypeVar("Result")

PROCESSES = 2
# The child ends a comparison by its own clock of processor time; this one is for a machine or a child that hangs.
WALL_SECONDS = 30.0
_CHILD = "services.sandbox_judge.comparison_child"

_SHOWN_CHARACTERS = 200
_ANSWER_OUTCOMES = {
    Finding.RIGHT: wire.Outcome.OUTCOME_ACCEPTED,
    Finding.WRONG: wire.Outcome.OUTCOME_WRONG_ANSWER,
    Finding.TIME: wire.Outcome.OUTCOME_CPU_TIME_LIMIT,
    Finding.MEMORY: wire.Outcome.OUTCOME_MEMORY_LIMIT,
    Finding.BROKEN: wire.Outcome.OUTCOME_INTERNAL_ERROR,
}

MATH = wire.AnswerComparison.ANSWER_COMPARISON_MATH
REASONING_GYM = "reasoning_gym"
# Raise it when a change of `jail/scores_child.py` or `scoring.py` could change a verdict by this role.
_REVISIONS: Mapping[Role, str] = {Role.FUNCTION: "2", Role.MATHEMATICS: "4", Role.REASONING_GYM: "2"}
# Those whose responses are scored several at a time.
SCORING_ROLES = (Role.FUNCTION, Role.MATHEMATICS, Role.REASONING_GYM)
# By role: the module without which it cannot serve, and the distributions whose versions decide; empty: all that are
# installed, since people's functions may import any.
_NEEDED: Mapping[Role, tuple[str, tuple[str, ...]]] = {
    Role.TESTS: ("", ()),
    Role.RESPONSE: ("", ()),
    Role.PYTEST: ("pytest", ()),
    Role.FUNCTION: ("numpy", ()),
    Role.MATHEMATICS: (
        "math_verify",
        ("math-verify", "latex2sympy2-extended", "sympy", "mpmath", "antlr4-python3-runtime"),
    ),
    Role.REASONING_GYM: (REASONING_GYM, ("reasoning-gym", "sympy")),
}

NONCE_BYTES = 24
# One of the two processes, and what it is sent.
Side = tuple[PreparedProgram, dict[str, object]]
_TEST_OUTCOMES = {
    NOT_A_PROGRAM: wire.Outcome.OUTCOME_COMPILE_ERROR,
    WRONG: wire.Outcome.OUTCOME_WRONG_ANSWER,
    ENDED: wire.Outcome.OUTCOME_WRONG_ANSWER,
}

# Responses that share a fork: what starting it costs is a small part of what they cost.
MOST_TOGETHER = 32
ATTEMPTS = 3
# A function that took too long for so many responses is not asked about the rest.
MOST_TIMES_TOO_LONG = 3
_SIGALRM, _SIGPROF = 14, 27
_WAITING = 10
_LINE_BYTES = 16 << 10
_TIME_LIMITS = (wire.Outcome.OUTCOME_CPU_TIME_LIMIT, wire.Outcome.OUTCOME_WALL_TIME_LIMIT)
_SCORE_OUTCOMES = {
    RunEnding.CPU_TIME_LIMIT: wire.Outcome.OUTCOME_CPU_TIME_LIMIT,
    RunEnding.WALL_TIME_LIMIT: wire.Outcome.OUTCOME_WALL_TIME_LIMIT,
    RunEnding.MEMORY_LIMIT: wire.Outcome.OUTCOME_MEMORY_LIMIT,
    RunEnding.SECURITY_VIOLATION: wire.Outcome.OUTCOME_SECURITY_VIOLATION,
}

# A fork that has computed, or lived, for so long takes no further group.
SHARED_SECONDS = (0.1, 1.0)
_SHARING = (Role.FUNCTION, Role.REASONING_GYM)

# Responses, what they are scored by, and whether details are wanted.
Group = tuple[Sequence[str], wire.TestSet, bool]


class ComparisonPool:
    """Compares in up to PROCESSES children, started when first needed. Safe from several threads."""

    def __init__(self) -> None:
        self._idle: list[ComparisonProcess] = []
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(PROCESSES, "comparison")

    def compare(
        self,
        rule: wire.AnswerRule,
        futures: Mapping[str, Future[Result]],
        result: Callable[[str, Finding, str], Result],
    ) -> None:
        """Set each response's future to what `result` makes of (response, finding, reason), or to NotReady where no
        child can be started; a future that was cancelled is passed over."""
        self._threads.submit(self._compare_all, rule.SerializeToString(), futures, result)

    def close(self) -> None:
        """End the children; what waits is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _compare_all(
        self, rule: bytes, futures: Mapping[str, Future[Result]], result: Callable[[str, Finding, str], Result]
    ) -> None:
        for response, future in futures.items():
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(result(response, *self._compare(rule, response)))
            except Exception as error:
                future.set_exception(error)

    def _compare(self, rule: bytes, response: str) -> tuple[Finding, str]:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        found = child.compare(rule, response) if child else None
        if child is None or found is None:
            # What killed one that had lived for a while need not be this answer.
            if child is not None:
                child.close()
            child = ComparisonProcess()
            found = child.compare(rule, response)
        if found is None:
            log.warning("a comparison ended its process", status=child.close())
            return Finding.TIME, "the comparison did not come to an end"
        with self._lock:
            self._idle.append(child)
        return found


class ComparisonProcess:
    """One process that compares. Raises NotReady when it does not start."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ},
        )
        if self._answer() is None:
            status = self.close()
            raise NotReady(f"the process that compares answers did not start: status {status}", code="judge_fault")

    def compare(self, rule: bytes, response: str) -> tuple[Finding, str] | None:
        """What a response comes to; None when the process did not live to say."""
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, rule)  # type: ignore[arg-type]
            write_frame(self._process.stdin, response.encode("utf-8", "surrogatepass"))  # type: ignore[arg-type]
        except OSError:
            return None
        answer = self._answer()
        return None if not answer else (Finding(answer[:1]), answer[1:].decode("utf-8", "replace"))

    def close(self) -> int | None:
        """End it; returns its status."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        return self._process.wait()

    def _answer(self) -> bytes | None:
        assert self._process.stdout is not None
        waiting = select.poll()
        waiting.register(self._process.stdout, select.POLLIN)
        return read_frame(self._process.stdout) if waiting.poll(WALL_SECONDS * 1000) else None  # type: ignore[arg-type]


class AnswerJudge:
    """Judges answers without a sandbox, since no program of anybody is run."""

    def __init__(self, max_characters: int, judge_version: str = "") -> None:
        self.max_characters = max_characters
        self.judge_version = judge_version
        self.pool = ComparisonPool()

    def close(self) -> None:
        """End the processes that compare."""
        self.pool.close()

    def judge(
        self, responses: Sequence[str], rule: wire.AnswerRule, *, want_details: bool
    ) -> tuple[dict[str, wire.Verdict], dict[str, Future[wire.Verdict]]]:
        """The verdict on each distinct response, as if the rule were a single hidden test: those known at once, and
        those to come.

        A verdict raises NotReady where no process can be started for it; no response makes it raise.
        """

        def verdict(response: str, finding: Finding, reason: str) -> wire.Verdict:
            found = verdict_of(response, finding, reason, want_details=want_details)
            found.judge_version = self.judge_version
            return found

        known: dict[str, wire.Verdict] = {}
        awaited: dict[str, Future[wire.Verdict]] = {}
        unbounded = rule.comparison in UNBOUNDED
        # The same for all that are right, unless it shows them.
        right = None if want_details else verdict("", Finding.RIGHT, "")
        for response in dict.fromkeys(responses):
            if len(response) > self.max_characters:
                reason = f"the response has {len(response)} characters; at most {self.max_characters} are judged"
                known[response] = verdict(response, Finding.WRONG, reason)
            elif unbounded:
                awaited[response] = Future()
            elif fault := fault_of(rule, response):
                known[response] = verdict(response, Finding.WRONG, fault)
            else:
                known[response] = right or verdict(response, Finding.RIGHT, "")
        if awaited:
            self.pool.compare(rule, awaited, verdict)
        return known, awaited


def verdict_of(response: str, finding: Finding, reason: str, *, want_details: bool) -> wire.Verdict:
    """The verdict on one response."""
    right = finding is Finding.RIGHT
    outcome = _ANSWER_OUTCOMES[finding]
    verdict = wire.Verdict(
        outcome=outcome, tests_passed=int(right), tests_total=1, runs=1, detail=reason[:DETAIL_CHARACTERS]
    )
    if want_details:
        # Bytes that are not UTF-8 have come as surrogates, which a message cannot hold.
        shown = response[:_SHOWN_CHARACTERS].encode(errors="replace").decode()
        verdict.tests.append(wire.TestResult(outcome=outcome, detail=verdict.detail, output=shown))
    return verdict


def role_of(test_set: wire.TestSet) -> Role | None:
    """Which zygotes decide by this test set; None for what is not scored in the sandbox, or is a program's."""
    if test_set.HasField("answer"):
        return Role.MATHEMATICS if test_set.answer.comparison == MATH else None
    if test_set.HasField("code_tests"):
        return Role.PYTEST if test_set.code_tests.style == wire.CodeTestStyle.CODE_TEST_STYLE_PYTEST else Role.TESTS
    if test_set.HasField("scoring_function"):
        return Role.REASONING_GYM if test_set.scoring_function.library == REASONING_GYM else Role.FUNCTION
    return None


def missing_module(role: Role) -> str:
    """The module that this environment lacks for a role, '' when it has it."""
    name = _NEEDED[role][0]
    return name if name and importlib.util.find_spec(name) is None else ""


@cache
def behaviour_of_packages(role: Role) -> str:
    """What of this environment decides about a role's verdicts: part of the key of a cached one."""
    wanted = _NEEDED[role][1]
    versions = {
        _normalised(found.metadata["Name"] or ""): found.version for found in importlib.metadata.distributions()
    }
    names = tuple(map(_normalised, wanted)) or tuple(sorted(versions))
    revision = [_REVISIONS[role]] if role in _REVISIONS else []
    return digest(role.value, *revision, *(f"{name}=={versions.get(name, '')}" for name in names))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def judge_code(
    worker: SandboxWorker, response: str, test_set: wire.TestSet, max_source_bytes: int, *, want_details: bool
) -> wire.Verdict:
    """The verdict on one response. Raises JudgeFault when the judge, not the response, failed.

    Tests that are no program are their writer's fault: OUTCOME_INTERNAL_ERROR.
    """
    source = encoded(response)
    if len(source) > max_source_bytes:
        reason = f"the response has {len(source)} bytes; at most {max_source_bytes} are judged"
        return wire.Verdict(outcome=wire.Outcome.OUTCOME_COMPILE_ERROR, tests_total=1, runs=1, detail=reason)
    tests, role = test_set.code_tests, role_of(test_set)
    assert role is not None
    nonce, limits, shared = secrets.token_bytes(NONCE_BYTES), limits_of(test_set), is_shared(tests)
    module = {"style": int(tests.style), "before": tests.before, "entry_point": tests.entry_point}
    response_part = module | {"response": source.decode("utf-8", "replace")}
    tests_part = module | {"code": tests.code, "nonce": nonce, "shared": shared}
    if not shared:
        try:
            tests_part["plan"] = _plan(tests.style, tests.before, tests.code, tests.entry_point)
        except UNCOMPILABLE as error:
            broken = _no_program(f"{type(error).__name__}: {error}")
            broken.test_isolation = wire.TestIsolation.TEST_ISOLATION_SEPARATE
            return broken
    with worker.open(role, Executable(), limits if shared else _limits_of_waiting(limits)) as testing:
        if shared:
            run = testing.run(b"", (_packed(tests_part | response_part),))
        else:
            with worker.open(Role.RESPONSE, Executable(), limits) as responding:
                run = _run_apart((testing, tests_part), (responding, response_part), limits.wall_seconds)
    verdict = _verdict(run, proof_of(nonce), want_details=want_details)
    verdict.test_isolation = (
        wire.TestIsolation.TEST_ISOLATION_SHARED if shared else wire.TestIsolation.TEST_ISOLATION_SEPARATE
    )
    return verdict


# Responses to one problem come together.
_plan = lru_cache(maxsize=256)(plan)


def _no_program(reason: str) -> wire.Verdict:
    return wire.Verdict(
        outcome=wire.Outcome.OUTCOME_INTERNAL_ERROR, runs=1, detail=f"the tests are no program: {reason}"
    )


def _packed(part: dict[str, object]) -> bytes:
    return marshal.dumps(part, 2)


def _limits_of_waiting(limits: RunLimits) -> RunLimits:
    """Limits of tests that sleep while the response computes: its own limits bound that."""
    longest = limits.wall_seconds + STARVATION * limits.cpu_seconds
    return dataclasses.replace(limits, wall_seconds=2 * longest)


def _run_apart(tests_side: Side, response_side: Side, outlives_seconds: float) -> ProgramRun:
    """One run of the tests, and beside it the response that they call; what came of both. Raises JudgeFault."""
    (testing, tests_part), (responding, response_part) = tests_side, response_side
    ours, theirs = socket.socketpair()
    with ours, theirs:
        response = responding.start(None, (_packed(response_part),), theirs)
        try:
            tests = testing.start(b"", (_packed(tests_part),), ours)
        except JudgeFault:
            response.stop()
            responding.ended(response)
            raise
    # Each is gone for the other as soon as it has ended.
    tests.need(response, outlives_seconds)
    tests_run = testing.ended(tests)
    if tests_run.code != LOST:
        response.stop()
    return _together(tests_run, responding.ended(response))


def _together(tests: ProgramRun, response: ProgramRun) -> ProgramRun:
    """The tests' run, or the response's where that ended first and took the tests' answers along."""
    lost = tests.ending is RunEnding.EXITED and tests.code == LOST
    stopped = tests.ending is RunEnding.SIGNALLED and response.ending is not RunEnding.SIGNALLED
    deciding = response if lost or stopped else tests
    return dataclasses.replace(
        deciding,
        cpu_seconds=tests.cpu_seconds + response.cpu_seconds,
        wall_seconds=max(tests.wall_seconds, response.wall_seconds),
        memory_bytes=max(tests.memory_bytes, response.memory_bytes) if deciding is tests else response.memory_bytes,
        stdout=tests.stdout,
        stderr=tests.stderr,
    )


def _verdict(run: ProgramRun, proof: bytes, *, want_details: bool) -> wire.Verdict:
    printed, found, report = run.stdout.rpartition(b"\n" + proof)
    words = report.decode(errors="replace").split(maxsplit=1) if found else []
    passed, total = 0, 1
    if words[:1] == ["broken"]:
        return _no_program(words[1])
    if words[:1] == ["passed"] and run.ending is RunEnding.EXITED:
        passed, total = map(int, words[1].split())
    result = result_of(run, lambda _: None)
    if passed == total:
        result.outcome, result.detail = wire.Outcome.OUTCOME_ACCEPTED, ""
    elif run.ending is RunEnding.EXITED:
        said = run.stderr.decode(errors="replace").strip()[-DETAIL_CHARACTERS:]
        result.outcome = wire.Outcome.OUTCOME_WRONG_ANSWER if found else _TEST_OUTCOMES.get(run.code, result.outcome)
        result.detail = said or "the response ended the process before its tests were through"
    result.output = printed[:200].decode(errors="replace") if found else result.output
    return _of_result(result, passed, total, want_details=want_details)


def _of_result(result: wire.TestResult, passed: int, total: int, *, want_details: bool) -> wire.Verdict:
    verdict = wire.Verdict(
        outcome=result.outcome,
        tests_passed=passed,
        tests_total=total,
        cpu_seconds=result.cpu_seconds,
        wall_seconds=result.wall_seconds,
        memory_bytes=result.memory_bytes,
        detail=result.detail,
        runs=1,
    )
    if want_details:
        verdict.tests.append(result)
    return verdict


def score_responses(
    worker: SandboxWorker, responses: Sequence[str], test_set: wire.TestSet, options: JudgeOptions
) -> list[wire.Verdict]:
    """A verdict for each response. Raises JudgeFault when the judge itself failed, and Cancelled."""
    role = role_of(test_set)
    assert role is not None
    texts = list(responses)
    known: dict[int, wire.Verdict] = {}
    if role is Role.MATHEMATICS:
        texts = [_read_as_number(answer_in(test_set.answer, response), test_set.answer) for response in responses]
        known = {place: fault for place, text in enumerate(texts) if (fault := _unread(text, test_set))}
    scorer = _Scorer(role, test_set, limits_of(test_set), options.wanted)
    with worker.open(role, Executable(), fork_limits(scorer.limits)) as prepared:
        for _ in range(ATTEMPTS):
            pending = [place for place in range(len(texts)) if place not in known or is_fault(known[place])]
            verdicts = scorer.score(prepared, [texts[place] for place in pending])
            known |= zip(pending, verdicts, strict=True)
    for place, response in enumerate(responses):
        complete(known[place], test_set, response, want_details=options.want_details)
    return [known[place] for place in range(len(responses))]


@dataclass(frozen=True)
class _Scorer:
    """What scores responses in forks of one jail, under limits that hold for each of them."""

    role: Role
    test_set: wire.TestSet
    limits: RunLimits
    wanted: Callable[[], bool]

    def score(self, prepared: PreparedProgram, texts: Sequence[str]) -> list[wire.Verdict]:
        """A verdict for each; a fork that died goes on, anew, behind the response that it died of."""
        verdicts: list[wire.Verdict] = []
        too_long = 0
        while len(verdicts) < len(texts):
            if not self.wanted():
                raise Cancelled
            left = len(texts) - len(verdicts)
            sent = sent_to(self.role, self.test_set, self.limits, list(texts[len(verdicts) :]))
            run = prepared.run(b"", (marshal.dumps(sent, 2),))
            found, fault = self._found(run, sent["name"], left)
            verdicts += found
            too_long += fault is not None and bool(found)
            if fault is not None and (not found or too_long >= MOST_TIMES_TOO_LONG):
                # It concerns all of them, as far as anybody can tell.
                verdicts += [_copy(fault) for _ in range(len(texts) - len(verdicts))]
        return verdicts

    def _found(self, run: ProgramRun, name: str, wanted: int) -> tuple[list[wire.Verdict], wire.Verdict | None]:
        """The verdicts of a fork's first responses, and the function's fault when it died of the last of them; where
        the function could not even be loaded, or said too much, the fault alone."""
        lines = [read_line(line, self.role, name) for line in run.stdout.splitlines()]
        found = [line for line in lines if line is not None]
        if lines[:1] != [None]:
            return [], found[0] if found else _death(run, self.role, self.limits, name, loading=True)
        if len(found) > wanted:
            return [], _fault(f"{name}: {len(found)} scores for {wanted} responses")
        if len(found) == wanted:
            return found, None
        last = _death(run, self.role, self.limits, name, loading=False)
        return [*found, last], last if is_fault(last) else None


def sent_to(role: Role, test_set: wire.TestSet, limits: RunLimits, texts: list[str]) -> Sent:
    function = test_set.scoring_function
    sent: Sent = {
        "responses": [text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in texts],
        "cpu_seconds": limits.cpu_seconds,
        # On a busy machine what computes waits as well.
        "wall_seconds": limits.wall_seconds + _WAITING * limits.cpu_seconds,
        "arguments_json": function.arguments_json,
    }
    if role is Role.MATHEMATICS:
        whole = test_set.answer.extraction == wire.AnswerExtraction.ANSWER_EXTRACTION_WHOLE
        return sent | {
            "kind": "mathematics",
            "name": "math-verify",
            "expected": list(test_set.answer.expected),
            "whole": whole,
        }
    if role is Role.REASONING_GYM:
        name = f"{REASONING_GYM} {json.loads(function.arguments_json)['dataset']}"
        return sent | {"kind": REASONING_GYM, "name": name}
    return sent | {
        "kind": "function",
        "name": function.function,
        "source": function.source,
        "function": function.function,
    }


def fork_limits(limits: RunLimits) -> RunLimits:
    """The limits of a fork that scores several: each has its own, these only bound all of them."""
    return RunLimits(
        cpu_seconds=limits.cpu_seconds * (MOST_TOGETHER + 1),
        wall_seconds=(limits.wall_seconds + _WAITING * limits.cpu_seconds) * (MOST_TOGETHER + 1),
        memory_bytes=limits.memory_bytes,
        output_bytes=MOST_TOGETHER * _LINE_BYTES,
        processes=limits.processes,
    )


def read_line(line: bytes, role: Role, name: str) -> wire.Verdict | None:
    """The verdict that a line of the fork's is; None says that the function is loaded."""
    try:
        kind, *rest = json.loads(line)
        if kind == "ready":
            return None
        if kind == "refused":
            return wire.Verdict(outcome=wire.Outcome.OUTCOME_WRONG_ANSWER, score=0.0, detail=rest[0])
        if kind == "fault" and role is Role.MATHEMATICS:
            # The expected answers were read: what the package cannot do with this one makes it no right one.
            return wire.Verdict(outcome=wire.Outcome.OUTCOME_WRONG_ANSWER, score=0.0, detail=rest[0])
        if kind in ("fault", "broken"):
            return _fault(rest[0])
        score, parts, cpu_seconds = rest
        if not 0 <= score <= 1:
            raise ValueError(score)
        verdict = wire.Verdict(
            outcome=wire.Outcome.OUTCOME_ACCEPTED, score=float(score), cpu_seconds=float(cpu_seconds)
        )
        verdict.parts.extend(wire.PartScore(name=name, score=float(value)) for name, value in parts.items())
        return verdict
    except (ValueError, TypeError, IndexError, AttributeError, KeyError):
        return _fault(f"{name}: its process said something that is no score: {line[:80]!r}")


def _death(run: ProgramRun, role: Role, limits: RunLimits, name: str, *, loading: bool) -> wire.Verdict:
    """What the end of a fork means for the response that it was scoring."""
    outcome, reason = _SCORE_OUTCOMES.get(run.ending, wire.Outcome.OUTCOME_RUNTIME_ERROR), run.ending.value
    if run.ending is RunEnding.SIGNALLED and run.code in (_SIGPROF, _SIGALRM):
        of_cpu = run.code == _SIGPROF
        outcome = _TIME_LIMITS[not of_cpu]
        reason = (
            f"it took more than {limits.cpu_seconds:g} s of CPU"
            if of_cpu
            else f"it waited for more than {limits.wall_seconds:g} s"
        )
    elif run.ending in (RunEnding.EXITED, RunEnding.SIGNALLED):
        reason = f"its process ended ({run.ending.value} {run.code})"
    if role is Role.MATHEMATICS and not loading:
        return wire.Verdict(outcome=outcome, score=0.0, detail=f"math-verify: {reason} on this answer")
    return _fault(f"{name}: {reason}{' while it was loaded' if loading else ''}")


def _fault(detail: str) -> wire.Verdict:
    return wire.Verdict(outcome=wire.Outcome.OUTCOME_INTERNAL_ERROR, detail=detail[:DETAIL_CHARACTERS])


def _copy(verdict: wire.Verdict) -> wire.Verdict:
    copied = wire.Verdict()
    copied.CopyFrom(verdict)
    return copied


def is_fault(verdict: wire.Verdict) -> bool:
    return verdict.outcome == wire.Outcome.OUTCOME_INTERNAL_ERROR


def _read_as_number(answer: str, rule: wire.AnswerRule) -> str:
    """The expected answer in place of one that is the same number, in forms that math-verify does not know."""
    if rule.extraction == wire.AnswerExtraction.ANSWER_EXTRACTION_WHOLE or (number := number_of(answer)) is None:
        return answer
    for expected in rule.expected:
        wanted = number_of(expected) if ("%" in answer) == ("%" in expected) else None
        if wanted is not None and is_close(wanted, number, 0.0, 0.0):
            return expected
    return answer


def _unread(answer: str, test_set: wire.TestSet) -> wire.Verdict | None:
    """The verdict on what is no answer at all."""
    if 0 < len(answer) <= LONGEST_ANSWER:
        return None
    extraction = wire.AnswerExtraction.Name(test_set.answer.extraction).removeprefix("ANSWER_EXTRACTION_").lower()
    detail = f"the answer has {len(answer)} characters; at most {LONGEST_ANSWER} are compared"
    detail = detail if answer else f"no answer found: {extraction}"
    return wire.Verdict(outcome=wire.Outcome.OUTCOME_WRONG_ANSWER, score=0.0, detail=detail)


def complete(verdict: wire.Verdict, test_set: wire.TestSet, response: str, *, want_details: bool) -> None:
    """What follows from the score: whether it passes, and the counts of a single hidden test."""
    verdict.runs = 1
    if is_fault(verdict):
        return
    verdict.tests_total = 1
    if verdict.outcome == wire.Outcome.OUTCOME_ACCEPTED and not reaches(verdict.score, test_set.pass_score):
        verdict.outcome = wire.Outcome.OUTCOME_WRONG_ANSWER
        verdict.detail = verdict.detail or f"score {verdict.score:g}; {test_set.pass_score or 1.0:g} passes"
    verdict.tests_passed = int(verdict.outcome == wire.Outcome.OUTCOME_ACCEPTED)
    if want_details:
        shown = response[:200].encode(errors="replace").decode()
        verdict.tests.append(wire.TestResult(outcome=verdict.outcome, detail=verdict.detail, output=shown))


def shared_by(test_set: wire.TestSet, run_id: str) -> str:
    """The same text for what may be scored in one fork: of one run, by one function, within the same limits."""
    role = role_of(test_set)
    if role not in _SHARING or not run_id:
        return ""
    function = test_set.scoring_function
    return digest(run_id, role.value, function.source, function.function, repr(limits_of(test_set)))


def score_groups(worker: SandboxWorker, groups: Sequence[Group]) -> list[list[wire.Verdict] | None]:
    """The verdicts of each group, None for those to be judged alone. Raises JudgeFault when the judge itself failed."""
    role, limits = role_of(groups[0][1]), limits_of(groups[0][1])
    assert role is not None
    decided: list[list[wire.Verdict] | None] = []
    with worker.open(role, Executable(), fork_limits(limits)) as prepared:
        while len(decided) < len(groups):
            left = groups[len(decided) :]
            first, *others = (sent_to(role, test_set, limits, list(texts)) for texts, test_set, _ in left)
            sent = first | {"others": others, "shared_seconds": SHARED_SECONDS}
            run = prepared.run(b"", (marshal.dumps(sent, 2),))
            found = _found(run, role, first["name"], [len(texts) for texts, _, _ in left])
            if found is None:
                return [*decided, *(None for _ in left)]
            decided += found
    for (texts, test_set, want_details), verdicts in zip(groups, decided, strict=True):
        for text, verdict in zip(texts, verdicts or [], strict=True):
            complete(verdict, test_set, text, want_details=want_details)
    return decided


def _found(run: ProgramRun, role: Role, name: str, wanted: Sequence[int]) -> list[list[wire.Verdict]] | None:
    """The verdicts of the groups that a fork has scored, the first and as many as it took; None where it is spoilt."""
    found: list[list[wire.Verdict]] = []
    for line in run.stdout.splitlines():
        verdict = read_line(line, role, name)
        if verdict is None:
            found.append([])
        elif is_fault(verdict) or not found:
            return None
        else:
            found[-1].append(verdict)
    is_whole = [len(verdicts) for verdicts in found] == list(wanted[: len(found)])
    ended_well = run.ending is RunEnding.EXITED and run.code == 0
    return found if found and is_whole and ended_well else None
