"""The official packages of OpenAI and Anthropic, unmodified: Responses and Messages, within sessions and without."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from services.orchestrator.agents import Standing
from services.orchestrator.auth import Principal
from services.orchestrator.http import agents
from spo.testing.peers import wait_until
from spo.v1.inference_service_pb2 import ServedCall
from tests.integration.orchestrator.serving.conftest import KEY, Counter
from tests.integration.orchestrator.serving.test_agent_sessions import ASKED, Agent

CALL = ServedCall(id="c0", name="weather", arguments_json='{"place": "Oslo"}')
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
CUSTOM: Any = {"name": "weather", "input_schema": PARAMETERS}


@pytest.fixture(name="anthropic", scope="module")
def package_of_anthropic() -> Any:
    """Loaded where it is used: its 3,000 modules took every worker five CPU seconds."""
    import anthropic

    return anthropic


@pytest.fixture
def agent(counter: Counter) -> Agent:
    return Agent(counter)


def asked(counter: Counter) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = json.loads(counter.peers.inference.asked.messages_json)
    return turns


@pytest.mark.parametrize("streams", [False, True])
def test_an_episode_in_responses_is_one_path(agent: Agent, *, streams: bool) -> None:
    double = agent.counter.peers.inference
    double.calls = [CALL]
    with openai.OpenAI(base_url=agent.grant["base_url"], api_key=agent.grant["key"], max_retries=0) as client:

        def respond(said: Any) -> Any:
            beside: Any = {"tools": [FUNCTION, {"type": "web_search"}], "instructions": "be brief", "store": False}
            if not streams:
                return client.responses.create(model="policy", input=said, **beside)
            with client.responses.stream(model="policy", input=said, **beside) as stream:
                return stream.get_final_response()

        said: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]
        first = respond(said)
        assert (first.output_text, first.status) == ("one two three", "completed")
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments), call.call_id) == ("weather", {"place": "Oslo"}, "c0")
        assert first.usage.input_tokens + first.usage.output_tokens == first.usage.total_tokens > 3
        double.calls = []
        said += [item.model_dump(exclude_none=True) for item in first.output]
        said += [{"type": "function_call_output", "call_id": "c0", "output": "rain"}]
        assert respond(said).output_text == "one two three"
    assert [(node["parent"], node["reason"]) for node in agent.tree()] == [(None, ""), (0, "")]
    assert [turn["role"] for turn in asked(agent.counter)] == ["system", "user", "assistant", "tool"]
    assert [tool["function"]["name"] for tool in json.loads(double.asked.tools_json)] == ["weather"]


@pytest.mark.parametrize("streams", [False, True])
def test_an_episode_in_messages_is_one_path(agent: Agent, anthropic: Any, *, streams: bool) -> None:
    double = agent.counter.peers.inference
    double.calls = [CALL]
    url = agent.grant["base_url"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=agent.grant["key"], max_retries=0) as client:

        def say(said: Any, billed: str) -> Any:
            system: Any = [
                {"type": "text", "text": f"x-anthropic-billing-header: {billed}"},
                {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
            ]
            beside: Any = {"tools": [CUSTOM], "system": system, "max_tokens": 50}
            if not streams:
                return client.messages.create(model="claude-9", messages=said, **beside)
            with client.messages.stream(model="claude-9", messages=said, **beside) as stream:
                return stream.get_final_message()

        said: list[Any] = [{"role": "user", "content": "x"}]
        first = say(said, "nonce 1")
        text, use = first.content
        assert (text.text, first.stop_reason) == ("one two three", "tool_use")
        assert (use.id, use.name, use.input) == ("c0", "weather", {"place": "Oslo"})
        assert first.usage.output_tokens == 3
        double.calls = []
        result = [{"type": "tool_result", "tool_use_id": "c0", "content": [{"type": "text", "text": "rain"}]}]
        said += [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [*result, {"type": "text", "text": "and?"}]},
        ]
        second = say(said, "nonce 2")
        assert (second.content[0].text, second.stop_reason) == ("one two three", "end_turn")
    assert [(node["parent"], node["reason"]) for node in agent.tree()] == [(None, ""), (0, "")]
    assert [turn["role"] for turn in asked(agent.counter)] == ["system", "user", "assistant", "tool", "user"]
    assert asked(agent.counter)[0]["content"] == "be brief"


def test_served_policies_answer_in_both_without_a_session_and_refuse_in_the_words_of_each(
    counter: Counter, anthropic: Any
) -> None:
    with openai.OpenAI(base_url=f"{counter.url}/v1", api_key=KEY, max_retries=0) as client:
        assert client.responses.create(model=counter.job_id, input="x").output_text == "one two three"
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=counter.job_id, input="x", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
        choice: Any = {"type": "function", "name": "weather"}
        client.responses.create(model=counter.job_id, input="x", tools=[FUNCTION], tool_choice=choice)
        assert json.loads(counter.peers.inference.asked.tool_choice_json)["function"] == {"name": "weather"}
        client.responses.create(
            model=counter.job_id, input="x", text={"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}
        )
        assert json.loads(counter.peers.inference.asked.answer_schema_json) == PARAMETERS
    with anthropic.Anthropic(base_url=counter.url, api_key=KEY, max_retries=0) as client:
        said: Any = [{"role": "user", "content": "x"}]
        assert client.messages.create(model=counter.job_id, messages=said, max_tokens=9).content[0].type == "text"
        client.messages.create(
            model=counter.job_id, messages=said, max_tokens=9, tools=[CUSTOM], tool_choice={"type": "any"},
            stop_sequences=["END"],
        )  # fmt: skip
        assert (counter.peers.inference.asked.tool_choice_json, counter.peers.inference.asked.stop) == (
            '"required"',
            ["END"],
        )
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="nobody", messages=said, max_tokens=9)
        image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        with pytest.raises(anthropic.BadRequestError, match="image"):
            client.messages.create(model=counter.job_id, messages=image, max_tokens=9)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("responses", {"input": [{"type": "item_reference", "id": "a"}]}, "input/0/type"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input/0/content/0"),
        ("responses", {"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ("responses", {"input": "x", "background": True}, "background"),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "tool_call_id"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages/0/content/0/type"),
        ("messages", {"messages": [{"role": "nobody", "content": "x"}]}, "role"),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_what_no_policy_reads_is_refused_by_name(counter: Counter, path: str, body: dict[str, Any], named: str) -> None:
    refused = counter.ask("POST", f"/v1/{path}", json={"model": counter.job_id, "max_tokens": 9, **body})
    if path == "responses":
        refused = counter.ask("POST", f"/v1/{path}", json={"model": counter.job_id, **body})
    assert refused.status_code == 400, refused.text
    assert named in refused.text.replace(".", "/")


def test_the_packages_try_again_what_passes_and_stop_at_what_does_not(counter: Counter, anthropic: Any) -> None:
    full, long, busy = Agent(counter, max_calls=1), Agent(counter, max_tokens=5), Agent(counter)
    asked_of = Requests(counter)
    for agent in (full, long):
        agent.says(ASKED)

    for fault, code in ((openai.RateLimitError, "session_full"), (openai.BadRequestError, "context_length_exceeded")):
        agent = full if code == "session_full" else long
        with openai.OpenAI(base_url=agent.grant["base_url"], api_key=agent.grant["key"], max_retries=3) as client:
            for ask in (
                lambda client=client: client.chat.completions.create(model="x", messages=[ASKED]),
                lambda client=client: client.responses.create(model="x", input="x"),
            ):
                with asked_of.counted(1), pytest.raises(fault) as refused:
                    ask()
                assert refused.value.code == code
    for agent, other in ((full, anthropic.RateLimitError), (long, anthropic.BadRequestError)):
        url = agent.grant["base_url"].removesuffix("/v1")
        with (
            anthropic.Anthropic(base_url=url, api_key=agent.grant["key"], max_retries=3) as client,
            asked_of.counted(1),
            pytest.raises(other),
        ):
            client.messages.create(model="x", messages=[ASKED], max_tokens=9)

    # As many calls as may be under way together; one of them ends while the package waits.
    url, key = busy.grant["base_url"], busy.grant["key"]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=3) as client, busy_for_a_moment(busy, asked_of):
        client.chat.completions.create(model="x", messages=[ASKED])
    with (
        anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=3) as client,
        busy_for_a_moment(busy, asked_of),
    ):
        client.messages.create(model="x", messages=[ASKED], max_tokens=9)


@contextmanager
def busy_for_a_moment(agent: Agent, asked_of: Requests) -> Iterator[None]:
    """As many calls as may be are under way until one more has been refused."""
    session = agent.grant["id"]
    agents._AT_ONCE[session] = agents.MOST_AT_ONCE
    refused = agent.call(ASKED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
    assert float(refused.headers["retry-after"]) > 0
    before = asked_of.count

    def end_one() -> None:
        wait_until(lambda: asked_of.count > before, "the package has asked")
        # Long enough for that to be refused, and shorter than what it waits then.
        time.sleep(0.3)
        agents._AT_ONCE.pop(session)

    ending = threading.Thread(target=end_one)
    ending.start()
    yield
    ending.join(60)
    assert asked_of.count - before >= 2, "it was refused and asked again"


class Requests:
    """Counts the requests to sessions."""

    def __init__(self, counter: Counter) -> None:
        self.sessions = counter.context.agent_sessions
        self.count, admitted = 0, self.sessions.admitted

        def noted(session_id: str, key: str) -> tuple[Principal, Standing]:
            self.count += 1
            return admitted(session_id, key)

        self.sessions.admitted = noted  # type: ignore[method-assign]

    @contextmanager
    def counted(self, expected: int) -> Iterator[None]:
        before = self.count
        yield
        assert self.count - before == expected
