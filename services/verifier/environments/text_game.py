"""Environment `text_game`: a number is to be guessed, and each guess is called too low or too high.

It decides its episodes itself: won, or lost, with the guesses that were needed.
"""

from __future__ import annotations

import random
import re

from services.verifier.environments.environment import Reply, Setup, State, bad_argument
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

# The judge of these episodes, for everybody who compares verdicts.
DECIDED_BY = "text_game/1"
_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)


class TextGame:
    """Guess a number between `low` and `high` in at most `guesses` actions, whose last number is the guess."""

    def begin(self, setup: Setup, seed: int) -> Reply:
        """The rules; the seed decides the number."""
        low, high, guesses = _rules(setup)
        number = random.Random(seed).randint(low, high)
        text = f"Guess a whole number from {low} to {high}. You have {guesses} guesses."
        return Reply(text, {"number": number, "used": 0}, verdict=_lost("no guess was right"))

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """Whether the number is higher or lower, or the end."""
        _, _, guesses = _rules(setup)
        number, used = int(state["number"]), int(state["used"]) + 1
        found = _NUMBER.findall(action)
        if found and int(found[-1]) == number:
            won = Verdict(
                outcome=OUTCOME_ACCEPTED, judge_version=DECIDED_BY, detail=f"guessed with guess {used}", runs=1
            )
            return Reply(done=True, score=1.0, verdict=won, label="guess")
        verdict = _lost("no guess was right")
        if used >= guesses:
            return Reply(done=True, score=0.0, verdict=verdict, label="guess")
        answer = "That is no number." if not found else "Higher." if int(found[-1]) < number else "Lower."
        left = guesses - used
        text = f"{answer} {left} {'guess is' if left == 1 else 'guesses are'} left."
        return Reply(text, {"number": number, "used": used}, score=0.0, verdict=verdict, label="guess")


def _rules(setup: Setup) -> tuple[int, int, int]:
    setup.only("low", "high", "guesses")
    low = setup.number("low", 1, -(10**9), 10**9)
    high = setup.number("high", 100, -(10**9), 10**9)
    if low > high:
        raise bad_argument("high", "must be at least low")
    return low, high, setup.number("guesses", 7, 1, 100)


def _lost(detail: str) -> Verdict:
    return Verdict(outcome=OUTCOME_WRONG_ANSWER, judge_version=DECIDED_BY, detail=detail, runs=1)
