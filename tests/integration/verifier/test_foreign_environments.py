"""Environments in a process of their own: by the contract that the adapters of other packages answer.

The packages themselves are no part of these tests (verifiers alone installs 560 MB): what is tested is what stands
between them and the platform, with an episode that lives in memory as theirs do. docs/conversations.md says with which
versions the adapters were tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import pytest
import redis

from services.verifier.environments.foreign.server import JournalledEnvironment, Worth, action_in
from services.verifier.environments.service import (
    TURNS_AT_ONCE,
    Environments,
    EnvironmentService,
    OpenState,
    RemoteEnvironment,
    Said,
    Setup,
    StateSeal,
)
from spo.errors import InternalError, InvalidInput, NotReady, Unreachable
from spo.rpc.client import HEADER, RpcClient, show_token
from spo.rpc.server import RpcServer
from spo.spec.tasks import ConversationSetup
from spo.v1 import environment_service_pb2 as wire
from spo.v1.environment_service_pb2_grpc import EnvironmentServiceStub, add_EnvironmentServiceServicer_to_server
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER

SETUP = ConversationSetup(problem={"arguments": {"from": 3}})
WORTH = Worth("countdown 1", low=-1, high=1, passes=0.75)


@dataclass
class Countdown:
    """Counts down from the row's number while it is told to; knows nothing but what it keeps."""

    left: int
    open: bool = True
    opens: bool = True
    opening_seconds: float = 0

    def opening(self) -> Said:
        time.sleep(self.opening_seconds)
        if not self.opens:
            raise RuntimeError("it does not open")
        return Said(f"{self.left} left")

    def act(self, action: str) -> Said:
        self.left -= action == "next"
        return Said(f"{self.left} left") if self.left else Said(done=True, reward=1.0)

    def close(self) -> None:
        self.open = False


@dataclass
class Shelf:
    """Opens episodes, and remembers them."""

    opened: list[Countdown] = field(default_factory=list)
    jitter: int = 0
    opens: bool = True
    opening_seconds: float = 0

    def start(self, setup: Setup, seed: int) -> Countdown:
        row = setup.problem["arguments"]
        left = row["from"] + seed + self.jitter * len(self.opened)
        self.opened.append(Countdown(left, opens=self.opens, opening_seconds=self.opening_seconds))
        return self.opened[-1]


@dataclass
class Pool:
    """The verifiers as samplers see them, and the environment's own process behind them."""

    client: RpcClient
    shelf: Shelf
    environment: JournalledEnvironment
    server: RpcServer

    def begin(self, seed: int = 0) -> wire.Observation:
        request = wire.BeginRequest(environment="countdown", environment_json=SETUP.to_json(), seeds=[seed])
        return self.client.call("Begin", request).observations[0]

    def step(self, said: wire.Observation, action: str) -> wire.Observation:
        turn = wire.Turn(state=said.state, action=action)
        request = wire.StepRequest(environment="countdown", environment_json=SETUP.to_json(), turns=[turn])
        return self.client.call("Step", request).observations[0]


def served(service: EnvironmentService) -> RpcServer:
    server = RpcServer("127.0.0.1", 0)
    add_EnvironmentServiceServicer_to_server(service, server.server)
    server.start()
    return server


@pytest.fixture
def pools(redis_client: redis.Redis) -> Iterator[Callable[..., Pool]]:
    made: list[tuple[RpcServer, RpcServer, RpcClient]] = []

    def build(worth: Worth = WORTH, jitter: int = 0) -> Pool:
        shelf = Shelf(jitter=jitter)
        environment = JournalledEnvironment(shelf.start, worth)
        inner = served(EnvironmentService(Environments({"countdown": environment}), OpenState()))
        remote = RemoteEnvironment("countdown", inner.address)
        outer = served(EnvironmentService(Environments({"countdown": remote}), StateSeal(redis_client)))
        client = RpcClient("verifier", outer.address, EnvironmentServiceStub)
        made.append((inner, outer, client))
        return Pool(client, shelf, environment, inner)

    yield build
    for inner, outer, client in made:
        client.close()
        outer.stop(0)
        inner.stop(0)


def test_an_episode_is_played_in_its_own_process_and_decided_there(pools: Callable[..., Pool]) -> None:
    pool = pools()
    said = pool.begin()

    assert (said.text, said.done, said.verdict.outcome) == ("3 left", False, OUTCOME_WRONG_ANSWER)
    assert "cut before" in said.verdict.detail
    said = pool.step(pool.step(said, "next"), "next")
    assert said.text == "1 left"
    last = pool.step(said, "next")

    assert (last.done, last.state, last.score) == (True, b"", 1.0)
    assert (last.verdict.outcome, last.verdict.score) == (OUTCOME_ACCEPTED, 1.0)
    assert last.verdict.judge_version == "countdown 1"
    assert [episode.open for episode in pool.shelf.opened] == [False], "one live episode took all turns"


def test_an_episode_that_does_not_open_is_let_go_of(pools: Callable[..., Pool]) -> None:
    pool = pools()
    pool.shelf.opens = False

    with pytest.raises(InternalError, match="it does not open"):
        pool.begin()

    assert [episode.open for episode in pool.shelf.opened] == [False]


def test_episodes_that_nobody_waits_for_any_more_are_not_begun(pools: Callable[..., Pool]) -> None:
    pool = pools()
    pool.shelf.opening_seconds = 0.4
    seeds = list(range(8 * TURNS_AT_ONCE))
    request = wire.BeginRequest(environment="countdown", environment_json=SETUP.to_json(), seeds=seeds)

    with pytest.raises(Unreachable):
        pool.client.call("Begin", request, 1.0)

    pool.shelf.opening_seconds = 0
    assert pool.begin(seed=1).text == "4 left"  # behind all that was asked before
    assert len(pool.shelf.opened) < len(seeds)


def test_a_turn_that_is_repeated_and_a_process_that_forgot_lead_to_the_same_episode(
    pools: Callable[..., Pool],
) -> None:
    pool = pools()
    said = pool.step(pool.begin(seed=2), "next")
    first = pool.step(said, "wait")

    assert pool.step(said, "wait") == first
    pool.environment.close()
    assert pool.step(first, "next").text == "3 left"
    assert len(pool.shelf.opened) == 3


def test_an_environment_that_does_not_repeat_itself_is_an_error_and_no_reward(pools: Callable[..., Pool]) -> None:
    pool = pools(jitter=1)
    said = pool.step(pool.begin(), "next")
    pool.environment.close()

    with pytest.raises(InternalError, match="does not repeat itself"):
        pool.step(said, "next")
    assert not any(episode.open for episode in pool.shelf.opened)


def test_a_reward_outside_of_what_was_said_is_an_error(pools: Callable[..., Pool]) -> None:
    pool = pools(Worth("countdown 1", low=0, high=0.5))
    said = pool.step(pool.step(pool.begin(), "next"), "next")

    with pytest.raises(InternalError, match=r"not between 0 and 0\.5"):
        pool.step(said, "next")


def test_the_platforms_token_is_not_shown_to_it(pools: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    answer = EnvironmentService.Begin

    def remember(
        self: EnvironmentService, request: wire.BeginRequest, context: grpc.ServicerContext
    ) -> wire.BeginResponse:
        shown.append(str(dict(context.invocation_metadata()).get(HEADER)))
        return answer(self, request, context)

    monkeypatch.setattr(EnvironmentService, "Begin", remember)
    show_token("secret")
    try:
        pools().begin()
    finally:
        show_token("")

    assert shown == ["Bearer secret", "None"]


def test_a_server_that_is_away_is_waited_for_and_a_state_of_its_own_making_is_refused(
    pools: Callable[..., Pool],
) -> None:
    pool = pools()
    said = pool.begin()
    forged = wire.Observation(state=OpenState().seal("", {"seed": 0, "actions": [], "said": ""}))
    with pytest.raises(InvalidInput) as caught:
        pool.step(forged, "next")
    assert caught.value.code == "bad_environment_state"
    pool.server.stop(0)

    with pytest.raises(NotReady):
        pool.step(said, "next")


SCHEMA = {"required": ["move"], "properties": {"move": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("reply", "schema", "action"),
    [
        ('{"move": 3}', SCHEMA, {"move": 3}),
        ('I go right:\n```json\n{"move": 3}\n```\n', SCHEMA, {"move": 3}),
        (" 3 ", SCHEMA, {"move": 3}),
        ("hello", {"required": ["message"], "properties": {"message": {"type": "string"}}}, {"message": "hello"}),
        ("12", {"required": ["message"], "properties": {"message": {"type": "string"}}}, {"message": "12"}),
    ],
)
def test_a_reply_is_read_as_an_action_of_the_environments_schema(
    reply: str, schema: dict[str, object], action: dict[str, object]
) -> None:
    assert action_in(reply, schema) == action


@pytest.mark.parametrize("reply", ["right", "[1, 2]", ""])
def test_a_reply_that_is_no_action_is_said_so(reply: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        action_in(reply, SCHEMA)
    with pytest.raises(ValueError, match="x, y"):
        action_in("5", {"required": ["x", "y"]})
