"""Environment `python`: the last Python block of an action runs in the judge's sandbox, and its output is the answer.

An action without one ends the episode; the judge decides about it. Each run begins anew: nothing of a run before it
is left, so a call brings what it needs.
"""

from __future__ import annotations

from services.verifier.environments.calls import fenced_call, tagged_call
from services.verifier.environments.environment import Reply, Setup, State
from services.verifier.environments.sandbox import Sandbox
from spo.v1.verdict_pb2 import CHECKER_TOKENS, Limits, TestCase, TestSet

TOOL = "python"
MOST_OUTPUT_BYTES = 16 << 10


class PythonTool:
    """Runs Python on request. Arguments: calls ("fenced": ```python blocks, "tag": <python>), seconds, output_bytes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def begin(self, setup: Setup, seed: int) -> Reply:
        """Nothing to say before the first call."""
        _limits(setup)
        return Reply()

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """What the last call prints, or how it failed."""
        is_tag = setup.text("calls", "fenced", ("fenced", "tag")) == "tag"
        program = tagged_call(action, TOOL) if is_tag else fenced_call(action, ("python", "py", "python3"))
        if program is None:
            return Reply(done=True)
        most = setup.number("output_bytes", 4096, 1, MOST_OUTPUT_BYTES)
        printed = self._sandbox.output(program, _limits(setup), setup.seconds, most)
        return Reply(printed or "(no output)", label=TOOL)


def _limits(setup: Setup) -> TestSet:
    setup.only("calls", "seconds", "output_bytes")
    seconds = setup.number("seconds", 5, 1, 20)
    limits = Limits(cpu_seconds=seconds, wall_seconds=2 * seconds)
    return TestSet(tests=[TestCase(public=True)], checker=CHECKER_TOKENS, limits=limits)
