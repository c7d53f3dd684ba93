"""Environments that keep an episode in memory, behind a contract that keeps none: the state is what the policy wrote.

Whoever still has the live episode goes on with it; whoever has not plays its actions again, which a seed makes the same
episode. What was said then is compared, so that an environment which does not repeat itself is an error, not a reward.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from services.verifier.environments.service import Reply, Setup, State
from spo.errors import InternalError
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

MOST_LIVE = 1024
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Said:
    """What a live episode says: text for the policy, or its end with what the whole of it earned (any number)."""

    text: str = ""
    done: bool = False
    reward: float = 0.0


class LiveEpisode(Protocol):
    """One episode of another package's environment, in this process."""

    def opening(self) -> Said:
        """What it says first."""

    def act(self, action: str) -> Said:
        """What it answers."""

    def close(self) -> None:
        """Let go of it, whether it is over or not."""


StartEpisode = Callable[[Setup, int], LiveEpisode]


@dataclass(frozen=True)
class Worth:
    """What rewards of an environment are worth: `low` is a score of 0, `high` one of 1; from `passes` on it is right.

    version names who decided, for everybody who compares verdicts.
    """

    version: str
    low: float = 0.0
    high: float = 1.0
    passes: float = 1.0

    def verdict(self, reward: float) -> Verdict:
        """The verdict of an episode that is over. Raises InternalError on a reward outside of the range."""
        score = (reward - self.low) / (self.high - self.low)
        # False for NaN as well.
        if not -_ROUNDING <= score <= 1 + _ROUNDING:
            message = f"the episode earned {reward:g}, which is not between {self.low:g} and {self.high:g}"
            raise InternalError(message, code="environment_broken")
        score = min(1.0, max(0.0, score))
        right = score >= self.passes - _ROUNDING
        outcome = OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER
        return Verdict(outcome=outcome, score=score, detail=f"earned {reward:g}", judge_version=self.version, runs=1)

    def cut(self) -> Verdict:
        """The verdict of an episode that ends before the environment has decided."""
        detail = "cut before the environment had decided"
        return Verdict(outcome=OUTCOME_WRONG_ANSWER, score=0.0, detail=detail, judge_version=self.version, runs=1)


class JournalledEnvironment:
    """An environment whose episodes `start` opens in memory, under our contract of values."""

    def __init__(self, start: StartEpisode, worth: Worth) -> None:
        self._start = start
        self._worth = worth
        self._live: OrderedDict[bytes, LiveEpisode] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, setup: Setup, seed: int) -> Reply:
        """Open an episode. Raises what the package raises."""
        episode = self._start(setup, seed)
        try:
            said = episode.opening()
        except BaseException:
            episode.close()
            raise
        return self._reply(episode, said, {"seed": seed, "actions": [], "said": _digest("", said)}, setup)

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        """Go on with an episode; one that is not live here is played again first."""
        episode = self._taken(setup, state) or self._played_again(setup, state)
        try:
            said = episode.act(action)
        except BaseException:
            episode.close()
            raise
        follows = {
            "seed": state["seed"],
            "actions": [*state["actions"], action],
            "said": _digest(state["said"], said),
        }
        return self._reply(episode, said, follows, setup)

    def close(self) -> None:
        """Let go of all live episodes."""
        with self._lock:
            episodes = list(self._live.values())
            self._live.clear()
        for episode in episodes:
            episode.close()

    def _reply(self, episode: LiveEpisode, said: Said, state: State, setup: Setup) -> Reply:
        if said.done:
            episode.close()
            verdict = self._worth.verdict(said.reward)
            return Reply(said.text, done=True, score=verdict.score, verdict=verdict)
        with self._lock:
            self._live[_key(setup, state)] = episode
            forgotten = [self._live.popitem(last=False)[1] for _ in range(len(self._live) - MOST_LIVE)]
        for one in forgotten:
            one.close()
        return Reply(said.text, state, verdict=self._worth.cut())

    def _taken(self, setup: Setup, state: State) -> LiveEpisode | None:
        """The live episode, for this turn alone: a turn that is repeated finds none and plays it again."""
        with self._lock:
            return self._live.pop(_key(setup, state), None)

    def _played_again(self, setup: Setup, state: State) -> LiveEpisode:
        episode = self._start(setup, int(state["seed"]))
        try:
            digest = _digest("", episode.opening())
            for action in _actions(state):
                digest = _digest(digest, episode.act(action))
            if digest != state["said"]:
                message = "the environment does not repeat itself: the same seed and actions led to another episode"
                raise InternalError(message, code="environment_broken")
        except BaseException:
            episode.close()
            raise
        return episode


def _actions(state: State) -> Sequence[str]:
    return [str(action) for action in state["actions"]]


def _digest(before: str, said: Said) -> str:
    written = f"{before}\0{said.done}\0{said.text}".encode("utf-8", "surrogatepass")
    return str(blake3(written).hexdigest()[:32])


def _key(setup: Setup, state: State) -> bytes:
    written = repr((sorted(setup.arguments.items()), sorted(setup.problem.items()), sorted(state.items())))
    return blake3(written.encode("utf-8", "surrogatepass")).digest()
