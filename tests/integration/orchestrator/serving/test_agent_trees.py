"""Random trees of an agent's calls through every dialect: what is trained on stands after exactly what the engine read.

The engine emits ids that no tokenizer would write for its texts, so a token that was made from text anew would show.
What a client does to its history (branches, edits, forgets, tries again, renames the ids of calls, changes white space,
changes the dialect) is drawn at random, and a model of the tree says which call each one goes on from.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from services.orchestrator.agent_episodes import AgentEpisode, trajectory_of
from services.orchestrator.agents import CallNode, trained_leaves
from spo.v1.inference_service_pb2 import ServedCall, ServedToken, ServeRequest
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import SEGMENT_KIND_ACTION, SEGMENT_KIND_BRANCH, Trajectory
from tests.integration.orchestrator.serving.conftest import Counter
from tests.integration.orchestrator.serving.test_agent_sessions import written
from tests.support.budget import ALL

CALLS_OF_A_SESSION = 25
EVERYTHING = ALL in os.environ
SESSIONS = 400 if EVERYTHING else 10
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"place": {"type": "string"}}}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "what it is like", "parameters": PARAMETERS}
DIALECTS = ("chat/completions", "responses", "messages")


@dataclass(frozen=True)
class Said:
    """A turn of a history. node: the call whose answer it is; None: somebody else's, or what has been made of one."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    node: int | None = None


History = tuple[Said, ...]


def alike(history: History) -> tuple[object, ...]:
    """What a history says, however its answers are written."""
    return tuple(
        said if said.node is None else (said.node, said.text.strip(), tuple(text for _, text in said.calls))
        for said in history
    )


def asked(dialect: str, history: History, *, spaced: bool) -> dict[str, Any]:
    """A request in a dialect. spaced: with arguments as another writer of JSON has them."""
    turns = [turn for said in history for turn in _TURNS[dialect](said, spaced)]
    system = history[0].text
    if dialect == "responses":
        tools: list[Any] = [{"type": "function", **FUNCTION}]
        return {"model": "gpt-9", "input": turns, "instructions": system, "tools": tools, "store": False}
    if dialect == "messages":
        tool = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": PARAMETERS}
        return {"model": "claude-9", "messages": turns, "system": system, "tools": [tool], "max_tokens": 50}
    system_turn = {"role": "system", "content": system}
    return {"model": "x", "messages": [system_turn, *turns], "tools": [{"type": "function", "function": FUNCTION}]}


def _arguments(text: str, spaced: bool) -> str:
    return json.dumps(json.loads(text), indent=2) if spaced else text


def _chat_turns(said: Said, spaced: bool) -> Iterator[dict[str, Any]]:
    if said.role == "tool":
        yield {"role": "tool", "tool_call_id": said.calls[0][0], "content": said.text}
    elif said.role != "system":
        calls = [
            {"id": name, "type": "function", "function": {"name": "weather", "arguments": _arguments(text, spaced)}}
            for name, text in said.calls
        ]
        yield {"role": said.role, "content": said.text} | ({"tool_calls": calls} if calls else {})


def _responses_turns(said: Said, spaced: bool) -> Iterator[dict[str, Any]]:
    if said.role == "tool":
        yield {"type": "function_call_output", "call_id": said.calls[0][0], "output": said.text}
    elif said.role != "system":
        kind = "output_text" if said.role == "assistant" else "input_text"
        yield {"type": "message", "role": said.role, "content": [{"type": kind, "text": said.text}]}
        for name, text in said.calls:
            yield {"type": "function_call", "call_id": name, "name": "weather", "arguments": _arguments(text, spaced)}


def _messages_turns(said: Said, spaced: bool) -> Iterator[dict[str, Any]]:
    if said.role == "tool":
        result = {"type": "tool_result", "tool_use_id": said.calls[0][0], "content": said.text}
        yield {"role": "user", "content": [result]}
    elif said.role != "system":
        uses = [
            {"type": "tool_use", "id": name, "name": "weather", "input": json.loads(text)} for name, text in said.calls
        ]
        yield {"role": said.role, "content": [{"type": "text", "text": said.text}, *uses]}


_TURNS = {"chat/completions": _chat_turns, "responses": _responses_turns, "messages": _messages_turns}


def answer_of(dialect: str, document: Any, node: int) -> Said:
    """What a client makes of an answer."""
    if dialect == "responses":
        texts = [part["text"] for item in document["output"] if item["type"] == "message" for part in item["content"]]
        made = [(item["call_id"], item["arguments"]) for item in document["output"] if item["type"] == "function_call"]
    elif dialect == "messages":
        texts = [block["text"] for block in document["content"] if block["type"] == "text"]
        uses = [block for block in document["content"] if block["type"] == "tool_use"]
        made = [(block["id"], json.dumps(block["input"])) for block in uses]
    else:
        message = document["choices"][0]["message"]
        texts = [message["content"]]
        made = [(each["id"], each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
    return Said("assistant", "".join(texts), tuple(made), node)


@dataclass
class Client:
    """An agent that does what it likes with the histories that it has, and what the engine read and sampled."""

    counter: Counter
    rng: random.Random
    fed: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
    known: dict[int | None, tuple[object, ...]] = field(default_factory=dict)
    expected: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        double = self.counter.peers.inference
        double.prompt_of = self._written
        double.ids_of = self._ids_of
        double.shown = lambda word: ServedToken(text=word, logprob=-0.5)
        double.says = lambda request: f"answer {len(self.fed)} of {self.rng.randrange(1000)}"
        self.grant = self.counter.ask("POST", "/v1/agents/sessions", json={"job": self.counter.job_id}).json()
        headers = {"Authorization": f"Bearer {self.grant['key']}", "anthropic-version": "2023-06-01"}
        self.http = httpx.Client(base_url=self.grant["base_url"], headers=headers, timeout=60, trust_env=False)

    def _written(self, request: ServeRequest) -> list[int]:
        self.fed.append(written(request))
        self.sampled.append([])
        return self.fed[-1]

    def _ids_of(self, number: int) -> list[int]:
        # A word is any number of tokens, none of which its text would be made into.
        found = [self.rng.randrange(1000, 9000) for _ in range(self.rng.randint(1, 3))]
        self.sampled[-1] += found
        return found

    def play(self) -> None:
        """One call, or one that is tried again."""
        history = self._next()
        # It goes on from the last answer before which all is as it was then.
        places = [place for place, said in enumerate(history) if said.node is not None]
        same = [place for place in places if alike(history[: place + 1]) == self.known[history[place].node]]
        self.expected.append(history[same[-1]].node if same else None)
        # Behind it all answers are what the client says: other white space makes another prompt of them.
        known = same[-1] + 1 if same else 0
        history = (*history[:known], *(replace(said, node=None) for said in history[known:]))
        calls = [
            ServedCall(id=f"c{len(self.fed)}{number}", name="weather", arguments_json='{"place": "Oslo"}')
            for number in range(self.rng.choice((0, 0, 1, 2)))
        ]
        self.counter.peers.inference.calls = calls
        dialect = self.rng.choice(DIALECTS)
        body = asked(dialect, history, spaced=self.rng.random() < 0.3)
        number = len(self.fed)
        document = self._post(dialect, body, {"Idempotency-Key": str(number)})
        assert len(self.fed) == number + 1
        self.histories.append((*history, answer_of(dialect, document, number)))
        self.known[number] = alike(self.histories[-1])
        if self.rng.random() < 0.1:
            again = self._post(dialect, body, {"Idempotency-Key": str(number)})
            assert answer_of(dialect, again, number) == self.histories[-1][-1]
            assert len(self.fed) == number + 1, "what is tried again is not sampled again"

    def _post(self, dialect: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        found = self.http.post(f"/{dialect}", json=body, headers=headers)
        assert found.status_code == 200, found.text
        return found.json()

    def _next(self) -> History:
        """The history of the next call."""
        rng = self.rng
        if not self.histories or rng.random() < 0.1:
            return (Said("system", "be brief"), Said("user", f"problem {rng.randrange(10**6)}"))
        history = self.histories[-1] if rng.random() < 0.6 else rng.choice(self.histories)
        places = [place for place, said in enumerate(history) if said.role == "assistant"]
        if rng.random() < 0.2:
            history = history[: rng.choice(places) + 1]
            places = [place for place in places if place < len(history)]
        if rng.random() < 0.15:
            history = self._changed(history, rng.choice(places))
        results = [Said("tool", f"rain {rng.randrange(10**6)}", (call,)) for call in history[-1].calls]
        more = [Said("user", f"go on {rng.randrange(10**6)}")] if not results or rng.random() < 0.3 else []
        return (*history, *results, *more)

    def _changed(self, history: History, place: int) -> History:
        """The history with one answer otherwise: in what it says, or only in how it is written."""
        said = history[place]
        match self.rng.choice(("edited", "spaces", "renamed", "dropped")):
            case "edited":
                other = replace(said, text=f"{said.text} not", node=None)
            case "spaces":
                other = replace(said, text=f"\n{said.text}  ")
            case "renamed" if place == len(history) - 1:
                other = replace(said, calls=tuple((f"other{name}", text) for name, text in said.calls))
            case "dropped" if said.calls and place == len(history) - 1:
                other = replace(said, calls=(), node=None)
            case _:
                other = said
        return (*history[:place], other, *history[place + 1 :])

    def nodes(self) -> list[CallNode]:
        context = self.counter.context
        return context.agent_sessions.tree(context.agent_sessions.get(self.grant["id"])).nodes()

    def trajectory(self) -> tuple[Trajectory, set[int]]:
        """The episode as it is trained on, and the calls that are trained on."""
        context, nodes = self.counter.context, self.nodes()
        session = context.agent_sessions.get(self.grant["id"])
        tree = context.agent_sessions.tree(session)
        paths = [tree.path(leaf) for leaf in trained_leaves(nodes)]
        episode = AgentEpisode(session.job_id, "g", 0, reward=1.0)
        request = PromptGroup(run_id=session.job_id, group_id="g")
        return trajectory_of(request, episode, session, paths), {node.number for path in paths for node in path}


@pytest.fixture
def counter(open_counter: Any) -> Counter:
    return open_counter(replica_silence_seconds=3600)


@pytest.mark.cpu_seconds(900 if EVERYTHING else 60)
@pytest.mark.timeout(3000 if EVERYTHING else 300)
def test_every_trained_token_stands_after_exactly_what_the_engine_had_read(counter: Counter) -> None:
    for seed in range(SESSIONS):
        client = Client(counter, random.Random(seed))
        for _ in range(CALLS_OF_A_SESSION):
            client.play()

        nodes = client.nodes()
        assert [node.parent for node in nodes] == client.expected, seed
        before: dict[int, list[int]] = {}
        for node in nodes:
            read = [*(before[node.parent] if node.parent is not None else ()), *node.read]
            assert read == client.fed[node.number], (seed, node.number)
            assert list(node.sampled) == client.sampled[node.number], (seed, node.number)
            before[node.number] = [*read, *node.sampled]

        trajectory, trained = client.trajectory()
        assert trained_in(trajectory) == sorted((client.fed[each], client.sampled[each]) for each in trained), seed
        client.http.close()


def trained_in(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """What each action of a trajectory stands after, and its tokens; sorted."""
    found, at = [], 0
    before = list(trajectory.prompt_token_ids)
    for part in trajectory.segments:
        tokens = list(trajectory.response_token_ids[at : at + part.tokens])
        at += part.tokens
        if part.kind == SEGMENT_KIND_ACTION:
            found.append((before, tokens))
        before = tokens if part.kind == SEGMENT_KIND_BRANCH else [*before, *tokens]
    assert at == len(trajectory.response_token_ids) == len(trajectory.sampling_logprobs)
    return sorted(found)
