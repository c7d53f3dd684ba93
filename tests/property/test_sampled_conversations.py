"""What is trained on is what was sampled: over whole conversations, with a real environment service in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from services.inference.engine import Sample
from services.inference.environment_pool import EnvironmentPool
from services.inference.episodes import Episode, start_episodes
from services.verifier.environments.service import Environments, EnvironmentService, Reply, Setup, State, StateSeal
from spo.rpc.server import RpcServer
from spo.spec.tasks import ConversationSetup
from spo.v1.environment_service_pb2_grpc import add_EnvironmentServiceServicer_to_server
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_REFERENCE, SOURCE_UNSPECIFIED, Source
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION, Trajectory
from tests.support.conversations import ScriptedEngine, assignment, conversation_group

CHATTER = ("sum", "list(", "b=[", "<eos>", "<sep>", "maximum", "0", "1", "\n", " ", "print(", "<unk>", "halves")


class OneKey:
    """The command of Redis that a seal needs."""

    def eval(self, script: str, numkeys: int, name: str, value: bytes) -> bytes:
        return b"k" * 32


class Chatter:
    """Says something random, ends at random, and says what it heard in its state."""

    def begin(self, setup: Setup, seed: int) -> Reply:
        return Reply("", {"seed": seed, "turn": 0})

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        generator = random.Random(f"{state} {action}")
        if generator.random() < 0.2:
            return Reply(done=True, score=0.5)
        text = "".join(generator.choices(CHATTER, k=generator.randint(0, 12)))
        return Reply(text, {**state, "turn": state["turn"] + 1}, label="chatter")


class Drawn:
    """Says what it has drawn."""

    def begin(self, setup: Setup, seed: int) -> Reply:
        return Reply(str(random.Random(seed).randint(1, 10**6)))

    def step(self, setup: Setup, state: State, action: str) -> Reply:
        return Reply(done=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    server = RpcServer("127.0.0.1", 0)
    service = EnvironmentService(Environments({"chatter": Chatter(), "drawn": Drawn()}), StateSeal(OneKey()))  # type: ignore[arg-type]
    add_EnvironmentServiceServicer_to_server(service, server.server)
    server.start()
    pool = EnvironmentPool(server.address)
    yield pool
    pool.close()
    server.stop(1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    max_tokens=st.integers(1, 120),
    max_turns=st.integers(1, 6),
    most=st.integers(1, 20),
    template=st.sampled_from(["auto", "none"]),
    stop=st.sampled_from([[], ["\n"]]),
)
def test_the_engine_is_fed_exactly_what_was_sampled_and_is_trained_on(
    pool: EnvironmentPool, seed: int, max_tokens: int, max_turns: int, most: int, template: str, stop: list[str]
) -> None:
    generator = random.Random(seed)

    def speak(request: Any, turn: int) -> Sample:
        # Tokens as a model samples them, which no tokenizer would write so.
        length = min(request.max_tokens, generator.randint(1, 12))
        tokens = (*(generator.randrange(5, vocabulary) for _ in range(length - 1)), eos)
        stopped = length < request.max_tokens or generator.random() < 0.5
        return Sample(tokens, tuple(-generator.random() - 0.01 for _ in tokens), stopped, turn, turn + 1)

    engine = ScriptedEngine(speak)
    held = assignment(engine, chat={"template": template}, stop=stop)
    vocabulary, eos = len(held.tokenizer), held.tokenizer.eos_token_id
    setup = ConversationSetup(max_turns, most)
    group = conversation_group("chatter", setup, samples=3, max_tokens=max_tokens, seed=seed)
    found = start_episodes(held, pool, group, None, alone=False).result(20).trajectories

    assert len(found) == 3
    for trajectory in found:
        check(trajectory, engine, held.tokenizer, setup, max_tokens)


def check(trajectory: Trajectory, engine: ScriptedEngine, tokenizer: Any, setup: ConversationSetup, room: int) -> None:
    fed = [pair for pair in engine.fed if abs(pair[0].temperature - trajectory.temperature) < 1e-6]
    prompt, response = list(trajectory.prompt_token_ids), list(trajectory.response_token_ids)
    kinds = [segment.kind for segment in trajectory.segments]
    assert kinds[0] == kinds[-1] == SEGMENT_KIND_ACTION
    assert all({left, right} == {SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION} for left, right in pairwise(kinds))
    assert kinds.count(SEGMENT_KIND_ACTION) == len(fed) <= setup.max_turns
    assert sum(segment.tokens for segment in trajectory.segments) == len(response) <= room
    assert sum(segment.characters for segment in trajectory.segments) == len(trajectory.response_text)
    assert len(trajectory.sampling_logprobs) == len(response)

    at, character, turns = 0, 0, iter(fed)
    for segment in trajectory.segments:
        tokens = response[at : at + segment.tokens]
        logprobs = list(trajectory.sampling_logprobs[at : at + segment.tokens])
        if segment.kind == SEGMENT_KIND_ACTION:
            request, sample = next(turns)
            assert list(request.prompt_token_ids) == prompt + response[:at]
            assert request.max_tokens == room - at
            assert tokens == list(sample.token_ids)
            assert logprobs == pytest.approx(sample.logprobs)
        else:
            assert not any(logprobs)
        at, character = at + segment.tokens, character + segment.characters
    # Each turn is drawn anew.
    assert len({request.seed for request, _ in fed}) == len(fed)
    assert (trajectory.policy_version_first, trajectory.policy_version_last) == (0, len(fed))
    if trajectory.finish_reason == FINISH_REASON_STOP:
        assert trajectory.segments[-1].score == 0.5


def test_samples_that_are_compared_play_one_game_and_those_of_an_estimate_play_their_own(pool: EnvironmentPool) -> None:
    def games(seed: int, source: Source) -> set[tuple[int, ...]]:
        engine = ScriptedEngine(lambda request, turn: Sample((5, 6), (-0.1, -0.1), True, 0, 0))
        group = conversation_group("drawn", ConversationSetup(), samples=4, seed=seed)
        group.source = source
        found = start_episodes(assignment(engine), pool, group, None, alone=False).result(20).trajectories
        assert len({each.seed for each in found}) == len(found) == 4, "each is sampled by its own seed"
        return {tuple(each.prompt_token_ids) for each in found}

    assert len(games(1, SOURCE_ONLINE)) == 1
    assert games(1, SOURCE_ONLINE) != games(2, SOURCE_ONLINE)
    assert len(games(1, SOURCE_UNSPECIFIED)) == len(games(1, SOURCE_REFERENCE)) == 4


def test_a_turn_that_cannot_be_asked_for_ends_its_group_and_leaves_nobody_waiting(
    pool: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Episode.request

    def broken(episode: Episode) -> Any:
        if episode.turns:
            raise RuntimeError("the second turn cannot be asked for")
        return ask(episode)

    monkeypatch.setattr(Episode, "request", broken)
    engine = ScriptedEngine(lambda request, turn: Sample((5, 6), (-0.1, -0.1), True, 0, 0))
    # The environment ends a fifth of the conversations at once, but never all of eight with these seeds.
    group = conversation_group("chatter", ConversationSetup(6, 20), samples=8, seed=1)
    with pytest.raises(RuntimeError, match="second turn"):
        start_episodes(assignment(engine), pool, group, None, alone=False).result(20)
