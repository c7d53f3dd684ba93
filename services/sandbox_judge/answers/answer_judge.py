"""Verdicts on responses that are answers: compared here and now, or in a process of its own where time has no bound."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from services.sandbox_judge.answers.comparison_pool import ComparisonPool
from services.sandbox_judge.answers.frames import Finding
from services.sandbox_judge.program_judge import DETAIL_CHARACTERS
from spo.tasks.answer import fault_of
from spo.tasks.scoring.comparisons import UNBOUNDED
from spo.v1.verdict_pb2 import AnswerRule, Outcome, TestResult, Verdict

_SHOWN_CHARACTERS = 200
_OUTCOMES = {
    Finding.RIGHT: Outcome.OUTCOME_ACCEPTED,
    Finding.WRONG: Outcome.OUTCOME_WRONG_ANSWER,
    Finding.TIME: Outcome.OUTCOME_CPU_TIME_LIMIT,
    Finding.MEMORY: Outcome.OUTCOME_MEMORY_LIMIT,
    Finding.BROKEN: Outcome.OUTCOME_INTERNAL_ERROR,
}


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
        self, responses: Sequence[str], rule: AnswerRule, *, want_details: bool
    ) -> tuple[dict[str, Verdict], dict[str, Future[Verdict]]]:
        """The verdict on each distinct response, as if the rule were a single hidden test: those known at once, and
        those to come.

        A verdict raises NotReady where no process can be started for it; no response makes it raise.
        """

        def verdict(response: str, finding: Finding, reason: str) -> Verdict:
            found = verdict_of(response, finding, reason, want_details=want_details)
            found.judge_version = self.judge_version
            return found

        known: dict[str, Verdict] = {}
        awaited: dict[str, Future[Verdict]] = {}
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


def verdict_of(response: str, finding: Finding, reason: str, *, want_details: bool) -> Verdict:
    """The verdict on one response."""
    right = finding is Finding.RIGHT
    outcome = _OUTCOMES[finding]
    verdict = Verdict(
        outcome=outcome, tests_passed=int(right), tests_total=1, runs=1, detail=reason[:DETAIL_CHARACTERS]
    )
    if want_details:
        # Bytes that are not UTF-8 have come as surrogates, which a message cannot hold.
        shown = response[:_SHOWN_CHARACTERS].encode(errors="replace").decode()
        verdict.tests.append(TestResult(outcome=outcome, detail=verdict.detail, output=shown))
    return verdict
