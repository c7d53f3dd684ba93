"""Environments of other packages behind our contract: how an episode in memory is served, the gRPC server of one
environment, its task file, and environments of OpenEnv.

An environment of another package keeps an episode in memory; our contract keeps none: the state is what the policy
wrote. Whoever still has the live episode goes on with it; whoever has not plays its actions again, which a seed makes
the same episode. What was said then is compared, so that an environment which does not repeat itself is an error, not a
reward.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import httpx
from blake3 import blake3

from services.verifier.environments.service import (
    Environments,
    EnvironmentService,
    OpenState,
    Reply,
    Said,
    Setup,
    State,
)
from spo.errors import InternalError
from spo.observability import configure_logs, get_logger
from spo.rpc.server import RpcServer
from spo.v1.environment_service_pb2_grpc import add_EnvironmentServiceServicer_to_server
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

MOST_LIVE = 1024
_ROUNDING = 1e-6
SCHEMA_SECONDS = 30.0
# The type of a field in a JSON schema -> how a bare reply is read as it.
_READ = {"integer": int, "number": float}

log = get_logger("foreign")

# No program: the environment decides about every episode, and the answer is asked about none.
_DECIDED = {"expected": ["decided by the environment"]}


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


class OpenEnvServer:
    """One OpenEnv server by its base address."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._schema: dict[str, Any] = {}

    def start(self, setup: Setup, seed: int) -> OpenEnvEpisode:
        """Open an episode; the job's and the row's arguments go to the server's reset."""
        if not self._schema:
            reply = httpx.get(f"{self.url}/schema", timeout=SCHEMA_SECONDS)
            reply.raise_for_status()
            self._schema = reply.json()["action"]
        row = setup.problem.get("arguments")
        reset = {**setup.arguments, **(row if isinstance(row, dict) else {}), "seed": seed}
        return OpenEnvEpisode(self.url, self._schema, reset)


class OpenEnvEpisode:
    """One session: actions are what the policy writes, observations what it reads, rewards are summed."""

    def __init__(self, url: str, schema: dict[str, Any], reset: dict[str, Any]) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=url).sync()
        self._schema, self._reset = schema, reset
        self._reward = 0.0

    def opening(self) -> Said:
        self._client.connect()
        result = self._client.reset(**self._reset)
        said = self._said(result.observation, result.reward, done=result.done)
        fields = json.dumps(self._schema.get("properties", {}), sort_keys=True)
        return Said(f"{said.text}\n\nAn action is a JSON object with these fields: {fields}", said.done, said.reward)

    def act(self, action: str) -> Said:
        try:
            read = action_in(action, self._schema)
        except ValueError as error:
            return Said(f"This is no action: {error}")
        result = self._client.step(read)
        return self._said(result.observation, result.reward, done=result.done)

    def close(self) -> None:
        self._client.close()

    def _said(self, shown: object, reward: float | None, *, done: bool) -> Said:
        self._reward += float(reward or 0.0)
        # An observation that is one text is read as that text.
        text = shown if isinstance(shown, str) else json.dumps(shown, sort_keys=True, ensure_ascii=False)
        return Said(text, bool(done), self._reward)


def action_in(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The action that a reply is: a JSON object, in a fence or not, or the value of the one field that is required.

    Raises ValueError where it is none.
    """
    reply = text.strip()
    if "```" in reply:
        inside = reply.split("```")[-2 if reply.count("```") > 1 else -1]
        label, newline, body = inside.partition("\n")
        reply = (body if newline and label.strip().isalnum() else inside).strip()
    try:
        found = json.loads(reply)
    except (ValueError, RecursionError):
        found = reply
    if isinstance(found, dict):
        return found
    required = schema.get("required", [])
    if len(required) != 1:
        raise ValueError(f"it must be a JSON object with {', '.join(required) or 'the fields of an action'}")
    (name,) = required
    kind = schema.get("properties", {}).get(name, {}).get("type")
    if kind == "string":
        return {name: text.strip()}
    if kind in _READ and not isinstance(found, str | int | float):
        raise ValueError(f"{name} must be of the type {kind}")
    return {name: _READ[kind](found) if kind in _READ else found}


def serve(asked: argparse.Namespace) -> int:
    """Answer until SIGTERM."""
    configure_logs("environment", "info", "json")
    start, decider = _source(asked)
    environment = JournalledEnvironment(start, Worth(decider, asked.low, asked.high, asked.passes))
    host, _, port = asked.listen.rpartition(":")
    server = RpcServer(host, int(port))
    service = EnvironmentService(Environments({asked.name: environment}), OpenState())
    add_EnvironmentServiceServicer_to_server(service, server.server)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server.start()
    server.set_serving(True)
    log.info("serving", environment=asked.name, decider=decider, address=server.address)
    stop.wait()
    server.stop(5)
    environment.close()
    return 0


def print_tasks(asked: argparse.Namespace) -> int:
    """Print JSON lines, one per task: its prompt as the statement, and the arguments by which it is found."""
    if asked.openenv:
        rows: list[dict[str, object]] = [{"statement": f"{asked.name} {number}"} for number in range(asked.count)]
    else:
        from services.verifier.environments.foreign.verifiers_package import Hosted

        hosted = Hosted(asked.verifiers, json.loads(asked.options), asked.role)
        rows = hosted.rows(asked.count)
    for row in rows:
        print(json.dumps({**row, "answer": _DECIDED}, ensure_ascii=False))
    return 0


def _source(asked: argparse.Namespace) -> tuple[StartEpisode, str]:
    """What opens its episodes, and who decides about them."""
    if asked.openenv:
        return OpenEnvServer(asked.openenv).start, f"openenv {version('openenv-core')} {asked.name}"
    from services.verifier.environments.foreign.verifiers_package import Hosted

    hosted = Hosted(asked.verifiers, json.loads(asked.options), asked.role)
    return hosted.start, f"verifiers {version('verifiers')} {asked.verifiers}"
