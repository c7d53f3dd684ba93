"""Environment `retry_with_errors`: a program is run on the public tests, what fails is shown, and it is written again.

Hidden tests are not run here at all, so nothing of them is ever shown; the judge decides about the last attempt.
"""

from __future__ import annotations

from services.verifier.environments.environment import Reply, Setup, State
from services.verifier.environments.sandbox import Sandbox
from spo.errors import InvalidInput
from spo.tasks.problem import extract_program
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED

ATTEMPTS = 3
MESSAGE = "The program is wrong. {detail}\nWrite the whole program again."


class RetryWithErrors:
    """Up to `attempts` programs for one problem; `message` says what is wrong with one, {detail} being the judge's."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def begin(self, setup: Setup, seed: int) -> Reply:
        """The statement says all."""
        setup.only("attempts", "message")
        setup.number("attempts", ATTEMPTS, 1, 100)
        setup.text("message", MESSAGE)
        _public_tests(setup)
        return Reply(state={"attempts": 0})

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """What is wrong with the program; the end when the public tests pass or there is no further attempt."""
        language = str(setup.problem.get("language", "python"))
        program = extract_program(action, str(setup.problem.get("response_format", "raw")), language)
        verdict = self._sandbox.verdict(program, language, _public_tests(setup), setup.seconds)
        attempts = int(state["attempts"]) + 1
        passed = verdict.public_tests_passed / max(1, verdict.public_tests_total)
        label = "passes the public tests" if verdict.outcome == OUTCOME_ACCEPTED else "fails a public test"
        if verdict.outcome == OUTCOME_ACCEPTED or attempts >= setup.number("attempts", ATTEMPTS, 1, 100):
            return Reply(done=True, score=passed, label=label)
        text = setup.text("message", MESSAGE).replace("{detail}", verdict.detail)
        return Reply(text, {"attempts": attempts}, score=passed, label=label)


def _public_tests(setup: Setup) -> str:
    digest = setup.problem.get("public_tests_digest")
    if not isinstance(digest, str) or not digest:
        raise InvalidInput("the problem has no public tests whose outcome could be shown", code="no_public_tests")
    return digest
