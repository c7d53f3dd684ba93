"""Sessions of agents against a real orchestrator: what continues, what branches, and whose key opens what."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from services.orchestrator.container import AppContext
from spo.v1.inference_service_pb2 import ServedCall, ServedToken, ServeRequest
from tests.integration.orchestrator.serving.conftest import Counter

ASKED: dict[str, Any] = {"role": "user", "content": "x"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c0", "content": "rain"}


def written(request: ServeRequest) -> list[int]:
    """The prompt as a replica makes it: what was sampled and read as it is, then the rest, a token a byte."""
    turns = json.loads(request.messages_json)
    rest = "".join(f"<{turn['role']}>{turn['content']}" for turn in turns[request.context_turns :])
    return [*request.context_token_ids, *(100 + byte for byte in rest.encode())]


class Agent:
    """A session of a job, and its calls as any HTTP client makes them."""

    def __init__(self, counter: Counter, **fields: object) -> None:
        self.counter = counter
        counter.peers.inference.prompt_of = written
        counter.peers.inference.shown = lambda word: ServedToken(text=word, logprob=-0.5)
        opened = counter.ask("POST", "/v1/agents/sessions", json={"job": counter.job_id, **fields})
        assert opened.status_code == 201, opened.text
        self.grant: dict[str, Any] = opened.json()

    def call(self, *messages: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "gpt-9", "messages": list(messages), **fields}
        with httpx.Client(timeout=60, trust_env=False) as client:
            return client.post(
                f"{self.grant['base_url']}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {self.grant['key']}", **(headers or {})},
            )

    def says(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        found = self.call(*messages, **fields)
        assert found.status_code == 200, found.text
        message: dict[str, Any] = found.json()["choices"][0]["message"]
        return message

    def tree(self) -> list[dict[str, Any]]:
        return self.counter.ask("GET", f"/v1/agents/sessions/{self.grant['id']}/tree").json()["calls"]

    def end(self, token: str | None = None, **outcome: object) -> httpx.Response:
        body = {"token": token or self.grant["token"], "status": "finished", **outcome}
        return self.counter.ask("POST", f"/v1/agents/sessions/{self.grant['id']}/outcome", json=body)


@pytest.fixture
def agent(counter: Counter) -> Agent:
    return Agent(counter)


def test_what_was_sampled_is_fed_again_whatever_a_client_makes_of_the_same_answer(agent: Agent) -> None:
    double = agent.counter.peers.inference
    double.calls = [ServedCall(id="c0", name="weather", arguments_json='{"place": "Oslo",  "days": 3}')]
    first = agent.says(ASKED, tools=[TOOL])
    same = {**first, "content": f"{first['content']}\n"}
    (call,) = first["tool_calls"]
    spaced = {**call, "function": {"name": "weather", "arguments": '{"days":3,"place":"Oslo"}'}}
    renamed = [{**first, "tool_calls": [{**call, "id": "other"}]}, {**RESULT, "tool_call_id": "other"}]

    for answer in (first, same, {**first, "tool_calls": [spaced]}):
        agent.says(ASKED, answer, RESULT, tools=[TOOL])
    agent.says(ASKED, *renamed, tools=[TOOL])

    root, *others = agent.tree()
    assert [node["parent"] for node in others] == [0] * 4
    assert [node["reason"] for node in others] == [""] * 4
    fed = [*root["read"], *root["sampled"]]
    assert list(double.asked.context_token_ids) == fed
    assert double.asked.context_turns == 2
    assert all(node["read"] == [100 + byte for byte in b"<tool>rain"] for node in others)


def test_an_episode_of_many_turns_is_one_path_in_which_every_prompt_begins_with_all_before(agent: Agent) -> None:
    said: list[dict[str, Any]] = [ASKED]
    for turn in range(5):
        said += [agent.says(*said), {"role": "user", "content": f"go on {turn}"}]
        fed = agent.counter.peers.inference.asked
        path = [token for node in agent.tree()[:-1] for token in (*node["read"], *node["sampled"])]
        assert list(fed.context_token_ids) == path
    assert [node["parent"] for node in agent.tree()] == [None, 0, 1, 2, 3]


def _edited(first: dict[str, Any]) -> list[dict[str, Any]]:
    return [ASKED, {**first, "content": "I never said that"}, ASKED]


@pytest.mark.parametrize(
    ("second", "tools", "parent", "reason"),
    [
        (lambda first: [ASKED, first, ASKED], [], 0, ""),
        (lambda first: [ASKED, first, ASKED, {"role": "assistant", "content": "y"}, ASKED], [], 0, "edited"),
        (_edited, [], None, "edited"),
        (lambda first: [{"role": "user", "content": "what a summary says"}], [], None, ""),
        (lambda first: [{"role": "system", "content": "s"}, ASKED, first, ASKED], [], None, "edited"),
        (lambda first: [ASKED, first, ASKED], [TOOL], None, "edited"),
    ],
)
def test_history_that_is_edited_begins_another_branch_or_root(
    agent: Agent,
    second: Callable[[dict[str, Any]], list[dict[str, Any]]],
    tools: list[Any],
    parent: int | None,
    reason: str,
) -> None:
    first = agent.says(ASKED)
    agent.says(*second(first), tools=tools)
    _, node = agent.tree()
    assert (node["parent"], node["reason"]) == (parent, reason)


def test_a_template_that_writes_earlier_turns_anew_begins_another_root(agent: Agent) -> None:
    first = agent.says(ASKED)
    agent.counter.peers.inference.prompt_of = lambda request: [7, 8, 9]
    agent.says(ASKED, first, ASKED)
    _, node = agent.tree()
    assert (node["parent"], node["reason"], node["read"]) == (None, "template_rewrites", [7, 8, 9])


def test_reasoning_that_the_template_leaves_out_is_not_read_again_where_a_session_says_so(counter: Counter) -> None:
    agent = Agent(counter, reasoning="as_template")
    first = agent.says(ASKED, tools=[TOOL])
    asked: dict[str, Any] = {"role": "user", "content": "and then?"}

    def without_reasoning(request: ServeRequest) -> list[int]:
        """Of a later question's prompt; results of tools go on from what was sampled."""
        return written(request) if request.context_turns else [7, 8, 9]

    counter.peers.inference.prompt_of = without_reasoning
    counter.peers.inference.calls = [ServedCall(id="c0", name="weather", arguments_json="{}")]
    second = agent.says(ASKED, first, asked, tools=[TOOL])
    agent.says(ASKED, first, asked, second, RESULT, tools=[TOOL])
    root, branch, result = agent.tree()
    assert (branch["parent"], branch["reason"], branch["read"]) == (None, "reasoning_dropped", [7, 8, 9])
    assert (result["parent"], result["reason"]) == (1, "")
    assert result["read"] == [100 + byte for byte in b"<tool>rain"]
    # Where nothing was left out it is one branch.
    fed = [*root["read"], *root["sampled"], 5]
    counter.peers.inference.prompt_of = lambda _: fed
    agent.says(ASKED, first, asked, tools=[TOOL])
    same = agent.tree()[-1]
    assert (same["parent"], same["reason"], same["read"]) == (0, "", [5])


def test_equal_requests_are_two_samples_unless_a_client_says_that_it_tries_again(agent: Agent) -> None:
    first = agent.call(ASKED).json()
    agent.says(ASKED)
    again = agent.call(ASKED, headers={"x-stainless-retry-count": "1"}).json()
    streamed = agent.call(ASKED, headers={"Idempotency-Key": "a"}, stream=True)
    assert again["choices"] == first["choices"]
    assert again["usage"] == first["usage"]
    assert "[DONE]" in streamed.text
    assert [node["parent"] for node in agent.tree()] == [None, None]


def test_the_openai_package_plays_an_episode_by_the_sessions_address_alone(agent: Agent) -> None:
    secret = agent.grant["key"].partition(".")[2]
    url = agent.grant["base_url"].replace("/v1", f".{secret}/v1")
    with openai.OpenAI(base_url=url, api_key="overwritten", max_retries=0) as client:
        said: Any = [ASKED]
        answer = client.chat.completions.create(model="policy", messages=said)
        said += [answer.choices[0].message.model_dump(), ASKED]
        with client.chat.completions.stream(model="tiny-fast", messages=said) as stream:
            assert stream.get_final_completion().choices[0].message.content == "one two three"
        assert [each.id for each in client.models.list()] == ["policy"]
    assert [node["parent"] for node in agent.tree()] == [None, 0]
    audited = json.dumps(agent.counter.ask("GET", "/v1/audit").json())
    assert secret not in audited


def test_a_sessions_key_calls_its_own_model_and_nothing_else(agent: Agent) -> None:
    counter, key = agent.counter, agent.grant["key"]
    other = Agent(counter)
    outcome = {"token": key, "status": "finished", "reward": 1}
    path = f"/v1/agents/sessions/{agent.grant['id']}"
    refusals = [
        counter.ask("GET", "/v1/jobs", key).status_code,
        counter.ask("POST", f"{path}/outcome", key, json=outcome).status_code,
        counter.ask("GET", f"{path}/tree", key).status_code,
        counter.ask("POST", "/v1/agents/leases", key, json={"pool": "default", "most": 1}).status_code,
        counter.ask("GET", "/metrics", key).status_code,
        counter.chat("x", key).status_code,
        counter.ask("GET", f"/s/{other.grant['id']}/v1/models", key).status_code,
        counter.ask("GET", f"/s/{agent.grant['id']}/v1/models", agent.grant["token"]).status_code,
    ]
    assert refusals == [401] * 8
    agent.says(ASKED)
    assert agent.end(token=key, reward=1).status_code == 403
    assert agent.end(token=other.grant["token"], reward=1).status_code == 403


def test_an_outcome_is_posted_once_by_the_runner_and_ends_the_session(agent: Agent) -> None:
    assert agent.end(reward=1).status_code == 422
    agent.says(ASKED)
    for wrong in ({"reward": 1.5}, {"reward": -0.1}, {"status": "failed", "reward": 0}, {"status": "won"}):
        assert agent.end(**wrong).status_code == 422
    assert agent.end(reward=0.25, metrics={"turns": 1}).json()["outcome"]["reward"] == 0.25
    assert agent.end(reward=0.25, metrics={"turns": 1}).status_code == 200
    assert agent.end(reward=0.5).status_code == 409
    closed = agent.call(ASKED)
    assert (closed.status_code, closed.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [({"max_calls": 1}, 429, "session_full"), ({"max_tokens": 5}, 400, "context_length_exceeded")],
)
def test_a_session_uses_no_more_than_it_may(counter: Counter, fields: dict[str, int], status: int, code: str) -> None:
    agent = Agent(counter, **fields)
    agent.says(ASKED)
    refused = agent.call(ASKED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert agent.call(ASKED, n=2).status_code == 400


def test_what_a_job_had_of_sessions_goes_with_it_and_other_tenants_see_none(
    open_counter: Callable[..., Counter],
) -> None:
    counter = open_counter(tenant="red")
    agent = Agent(counter)
    agent.says(ASKED)
    blue = counter.key("blue", "jobs:read", "agents:run")
    assert counter.ask("GET", f"/v1/agents/sessions/{agent.grant['id']}", blue).status_code == 404
    assert counter.ask("POST", "/v1/agents/sessions", blue, json={"job": counter.job_id}).status_code == 404
    assert counter.ask("GET", f"/v1/agents/sessions?job={counter.job_id}").json()["items"][0]["calls"] == 1
    context: AppContext = counter.context
    assert counter.ask("DELETE", f"/v1/jobs/{counter.job_id}").status_code in (200, 202, 204)
    context.deletion.sweep()
    assert not list(context.redis.scan_iter(f"*{agent.grant['id']}*"))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_kept_of_each_call_and_told_to_whoever_asks(agent: Agent, stream: bool) -> None:
    for asks in (False, True):
        body = agent.call({"role": "user", "content": f"{asks}"}, stream=stream, logprobs=asks).text
        assert ("-0.5" in body) is asks, body
    sessions = agent.counter.context.agent_sessions
    nodes = sessions.tree(sessions.get(agent.grant["id"])).nodes()
    assert [node.logprobs for node in nodes] == [(-0.5,) * 3] * 2
