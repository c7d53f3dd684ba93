"""Responses scored by a function in the sandbox, several in one fork: each within the limits, each with its verdict.

What the function does wrong is its own fault, never a score: the response is tried again, and then the verdict says so.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.sandbox_judge.backends.zygote import Executable
from services.sandbox_judge.executor import ProgramRun, RunEnding, RunLimits, limits_of
from services.sandbox_judge.jail.loading import Sent
from services.sandbox_judge.program_judge import DETAIL_CHARACTERS, Cancelled, JudgeOptions
from services.sandbox_judge.sandbox_worker import PreparedProgram, Role, SandboxWorker
from services.sandbox_judge.scoring.packages import REASONING_GYM, role_of
from spo.spec.reward import reaches
from spo.tasks.answer import answer_in
from spo.tasks.scoring.numbers import LONGEST_ANSWER
from spo.v1.verdict_pb2 import AnswerExtraction, Outcome, PartScore, TestResult, TestSet, Verdict

# Responses that share a fork: what starting it costs is a small part of what they cost.
MOST_TOGETHER = 32
ATTEMPTS = 3
# A function that took too long for so many responses is not asked about the rest.
MOST_TIMES_TOO_LONG = 3
_SIGALRM, _SIGPROF = 14, 27
_WAITING = 10
_LINE_BYTES = 16 << 10
_TIME_LIMITS = (Outcome.OUTCOME_CPU_TIME_LIMIT, Outcome.OUTCOME_WALL_TIME_LIMIT)
_OUTCOMES = {
    RunEnding.CPU_TIME_LIMIT: Outcome.OUTCOME_CPU_TIME_LIMIT,
    RunEnding.WALL_TIME_LIMIT: Outcome.OUTCOME_WALL_TIME_LIMIT,
    RunEnding.MEMORY_LIMIT: Outcome.OUTCOME_MEMORY_LIMIT,
    RunEnding.SECURITY_VIOLATION: Outcome.OUTCOME_SECURITY_VIOLATION,
}


def score_responses(
    worker: SandboxWorker, responses: Sequence[str], test_set: TestSet, options: JudgeOptions
) -> list[Verdict]:
    """A verdict for each response. Raises JudgeFault when the judge itself failed, and Cancelled."""
    role = role_of(test_set)
    assert role is not None
    texts = list(responses)
    known: dict[int, Verdict] = {}
    if role is Role.MATHEMATICS:
        texts = [answer_in(test_set.answer, response) for response in responses]
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
    test_set: TestSet
    limits: RunLimits
    wanted: Callable[[], bool]

    def score(self, prepared: PreparedProgram, texts: Sequence[str]) -> list[Verdict]:
        """A verdict for each; a fork that died goes on, anew, behind the response that it died of."""
        verdicts: list[Verdict] = []
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

    def _found(self, run: ProgramRun, name: str, wanted: int) -> tuple[list[Verdict], Verdict | None]:
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


def sent_to(role: Role, test_set: TestSet, limits: RunLimits, texts: list[str]) -> Sent:
    function = test_set.scoring_function
    sent: Sent = {
        "responses": [text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in texts],
        "cpu_seconds": limits.cpu_seconds,
        # On a busy machine what computes waits as well.
        "wall_seconds": limits.wall_seconds + _WAITING * limits.cpu_seconds,
        "arguments_json": function.arguments_json,
    }
    if role is Role.MATHEMATICS:
        whole = test_set.answer.extraction == AnswerExtraction.ANSWER_EXTRACTION_WHOLE
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


def read_line(line: bytes, role: Role, name: str) -> Verdict | None:
    """The verdict that a line of the fork's is; None says that the function is loaded."""
    try:
        kind, *rest = json.loads(line)
        if kind == "ready":
            return None
        if kind == "refused":
            return Verdict(outcome=Outcome.OUTCOME_WRONG_ANSWER, score=0.0, detail=rest[0])
        if kind == "fault" and role is Role.MATHEMATICS:
            # The expected answers were read: what the package cannot do with this one makes it no right one.
            return Verdict(outcome=Outcome.OUTCOME_WRONG_ANSWER, score=0.0, detail=rest[0])
        if kind in ("fault", "broken"):
            return _fault(rest[0])
        score, parts, cpu_seconds = rest
        if not 0 <= score <= 1:
            raise ValueError(score)
        verdict = Verdict(outcome=Outcome.OUTCOME_ACCEPTED, score=float(score), cpu_seconds=float(cpu_seconds))
        verdict.parts.extend(PartScore(name=name, score=float(value)) for name, value in parts.items())
        return verdict
    except (ValueError, TypeError, IndexError, AttributeError, KeyError):
        return _fault(f"{name}: its process said something that is no score: {line[:80]!r}")


def _death(run: ProgramRun, role: Role, limits: RunLimits, name: str, *, loading: bool) -> Verdict:
    """What the end of a fork means for the response that it was scoring."""
    outcome, reason = _OUTCOMES.get(run.ending, Outcome.OUTCOME_RUNTIME_ERROR), run.ending.value
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
        return Verdict(outcome=outcome, score=0.0, detail=f"math-verify: {reason} on this answer")
    return _fault(f"{name}: {reason}{' while it was loaded' if loading else ''}")


def _fault(detail: str) -> Verdict:
    return Verdict(outcome=Outcome.OUTCOME_INTERNAL_ERROR, detail=detail[:DETAIL_CHARACTERS])


def _copy(verdict: Verdict) -> Verdict:
    copied = Verdict()
    copied.CopyFrom(verdict)
    return copied


def is_fault(verdict: Verdict) -> bool:
    return verdict.outcome == Outcome.OUTCOME_INTERNAL_ERROR


def _unread(answer: str, test_set: TestSet) -> Verdict | None:
    """The verdict on what is no answer at all."""
    if 0 < len(answer) <= LONGEST_ANSWER:
        return None
    extraction = AnswerExtraction.Name(test_set.answer.extraction).removeprefix("ANSWER_EXTRACTION_").lower()
    detail = f"the answer has {len(answer)} characters; at most {LONGEST_ANSWER} are compared"
    detail = detail if answer else f"no answer found: {extraction}"
    return Verdict(outcome=Outcome.OUTCOME_WRONG_ANSWER, score=0.0, detail=detail)


def complete(verdict: Verdict, test_set: TestSet, response: str, *, want_details: bool) -> None:
    """What follows from the score: whether it passes, and the counts of a single hidden test."""
    verdict.runs = 1
    if is_fault(verdict):
        return
    verdict.tests_total = 1
    if verdict.outcome == Outcome.OUTCOME_ACCEPTED and not reaches(verdict.score, test_set.pass_score):
        verdict.outcome = Outcome.OUTCOME_WRONG_ANSWER
        verdict.detail = verdict.detail or f"score {verdict.score:g}; {test_set.pass_score or 1.0:g} passes"
    verdict.tests_passed = int(verdict.outcome == Outcome.OUTCOME_ACCEPTED)
    if want_details:
        shown = response[:200].encode(errors="replace").decode()
        verdict.tests.append(TestResult(outcome=verdict.outcome, detail=verdict.detail, output=shown))
