"""The official `openai` package, unmodified, against a real orchestrator and a real inference replica."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from transformers import LlamaForCausalLM

from services.orchestrator.serving import Change, Target
from spo.testing.peers import wait_until
from spo.testing.trainer import write_random_llama
from tests.integration.orchestrator.serving.conftest import KEY, WAIT_SECONDS, Serving
from tests.support.scripted_model import CALLED, SCRIPT, TOOLS, hermes_tokenizer, write_scripted_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAID: Any = [{"role": "user", "content": "sum of the sorted numbers"}]


def test_the_openai_package_works_unmodified(
    serve_model: Callable[[dict[str, Any]], AbstractContextManager[Serving]], tmp_path: Path
) -> None:
    write_random_llama(tmp_path / "pi0", seed=0)
    config = tmp_path / "pi0" / "config.json"
    # Room for a completion that would go on for minutes.
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 8192}))
    fields = {"path": str(tmp_path / "pi0"), "max_prompt_tokens": 64, "max_response_tokens": 8000}
    with serve_model(fields) as serving:
        client, model = serving.client(), serving.job_id
        asks_and_is_answered(client, model)
        streams(client, model)
        tells_log_probs(client, model)
        echoes(client, model, tmp_path / "pi0")
        samples_several_and_stops(client, model)
        refuses_in_openais_words(serving, client, model)
        refuses_tools_that_the_template_leaves_out(client, model)
        serves_names(serving, client)
        fifty_at_once(client, model)
        a_caller_that_leaves_ends_its_sampling(serving, client, model)


def test_the_openai_package_calls_tools_and_answers_them(
    serve_model: Callable[[dict[str, Any]], AbstractContextManager[Serving]], tmp_path: Path
) -> None:
    write_scripted_model(tmp_path / "pi0")
    fields = {"path": str(tmp_path / "pi0"), "max_prompt_tokens": 1500, "max_response_tokens": 64}
    with serve_model(fields) as serving:
        client, model = serving.client(), serving.job_id
        whole = client.chat.completions.create(model=model, messages=SAID, tools=TOOLS, temperature=0)
        choice = whole.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look.\n"
        assert choice.message.tool_calls is not None
        assert [
            (call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls
        ] == CALLED
        streams_what_it_answers_whole(client, model, choice.message)
        second = answers_its_calls(client, model, choice.message)
        assert second.usage is not None
        assert whole.usage is not None
        assert second.usage.prompt_tokens > whole.usage.prompt_tokens + whole.usage.completion_tokens
        one = client.chat.completions.create(
            model=model, messages=SAID, tools=TOOLS, temperature=0, parallel_tool_calls=False
        )
        assert len(one.choices[0].message.tool_calls or ()) == 1
        cut = client.chat.completions.create(model=model, messages=SAID, tools=TOOLS, temperature=0, max_tokens=3)
        assert cut.choices[0].finish_reason == "length"
        assert cut.choices[0].message.tool_calls is None
        assert "<tool_call>" in (cut.choices[0].message.content or "")
        shy = client.chat.completions.create(model=model, messages=SAID, tools=TOOLS, tool_choice="none", temperature=0)
        assert shy.choices[0].message.tool_calls is None
        assert shy.usage is not None
        assert shy.usage.prompt_tokens < whole.usage.prompt_tokens
        calls_where_it_has_to(client, model)
        answers_by_a_schema(client, model)
        plays_an_episode_whose_calls_are_written_otherwise_than_they_were_sampled(serving)


def plays_an_episode_whose_calls_are_written_otherwise_than_they_were_sampled(serving: Serving) -> None:
    """The template would not write these calls as the model did; their own tokens are fed again."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=serving.url, headers=headers, timeout=WAIT_SECONDS, trust_env=False) as http:
        grant = http.post("/v1/agents/sessions", json={"job": serving.job_id, "temperature": 0}).json()
        client = openai.OpenAI(base_url=grant["base_url"], api_key=grant["key"], timeout=WAIT_SECONDS)
        first = client.chat.completions.create(model="any", messages=SAID, tools=TOOLS)
        message = first.choices[0].message
        second = answers_its_calls(client, "any", message)
        root, following = http.get(f"/v1/agents/sessions/{grant['id']}/tree").json()["calls"]
    assert first.usage is not None
    assert second.usage is not None
    assert [call["function"]["name"] for call in root["calls"]] == ["weather", "weather"]
    assert (following["parent"], following["reason"]) == (0, "")
    assert len(root["read"]) == first.usage.prompt_tokens
    assert len(root["sampled"]) == first.usage.completion_tokens
    known = len(root["read"]) + len(root["sampled"])
    assert second.usage.prompt_tokens == known + len(following["read"])
    tokenizer = hermes_tokenizer()
    assert tokenizer.decode(root["sampled"]) == "".join(SCRIPT[1:])
    assert tokenizer.decode(following["read"]) == "<turn>tool: rain<end>" * 2 + "<ask>"


def calls_where_it_has_to(client: openai.OpenAI, model: str) -> None:
    """The model would say something else first."""
    place = {"type": "object", "properties": {"place": {"enum": ["Oslo"]}}, "required": ["place"]}
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": place, "strict": True}}
        for name in ("sun", "rain")
    ]
    named: Any = {"type": "function", "function": {"name": "rain"}}
    for choice in ("required", named):
        found = client.chat.completions.create(
            model=model, messages=SAID, tools=tools, tool_choice=choice, temperature=0, parallel_tool_calls=False
        )
        (call,) = found.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"place": "Oslo"}
        assert call.function.name == "rain" or choice == "required"


def answers_by_a_schema(client: openai.OpenAI, model: str) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    found = client.chat.completions.create(model=model, messages=SAID, response_format=wanted, temperature=0)
    assert json.loads(found.choices[0].message.content or "") == {"n": 7}


def streams_what_it_answers_whole(client: openai.OpenAI, model: str, whole: ChatCompletionMessage) -> None:
    with client.chat.completions.stream(model=model, messages=SAID, tools=TOOLS, temperature=0) as stream:
        found = stream.get_final_completion().choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content == whole.content
    assert [call.function.arguments for call in found.message.tool_calls or ()] == [
        call.function.arguments for call in whole.tool_calls or ()
    ]


def answers_its_calls(client: openai.OpenAI, model: str, message: ChatCompletionMessage) -> ChatCompletion:
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls or ()]
    said = [*SAID, message.model_dump(), *results]
    return client.chat.completions.create(model=model, messages=said, tools=TOOLS, temperature=0)


def refuses_tools_that_the_template_leaves_out(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=SAID, tools=TOOLS)
    assert refused.value.code == "tools_not_taken"


def asks_and_is_answered(client: openai.OpenAI, model: str) -> None:
    found = client.chat.completions.create(model=model, messages=SAID, max_tokens=12, seed=7)
    again = client.chat.completions.create(model=model, messages=SAID, max_tokens=12, seed=7)

    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].message.content == again.choices[0].message.content
    assert found.usage is not None
    assert 1 <= found.usage.completion_tokens <= 12
    assert found.system_fingerprint == f"{model}@0"
    plain = client.completions.create(model=f"{model}@0", prompt="sum of", max_tokens=8, temperature=0)
    assert plain.choices[0].finish_reason in ("stop", "length")
    both = client.completions.create(model=f"{model}@0", prompt=["sum of", "sum"] * 3, max_tokens=8, temperature=0, n=2)
    assert [choice.index for choice in both.choices] == list(range(12))
    assert {choice.text for choice in both.choices[::4]} == {plain.choices[0].text}
    assert both.usage is not None
    assert both.usage.total_tokens == both.usage.prompt_tokens + both.usage.completion_tokens
    tokens = client.completions.create(model=f"{model}@0", prompt=[5, 6, 7], max_tokens=8, temperature=0)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3


def streams(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=SAID, max_tokens=40, seed=3)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=SAID, max_tokens=40, seed=3, stream=True, stream_options={"include_usage": True}
        )
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].system_fingerprint == whole.system_fingerprint
    with client.chat.completions.with_streaming_response.create(
        model=model, messages=SAID, max_tokens=8, seed=3, stream=True,
        stream_options={"include_usage": True}, extra_body={"stream_options": {"continuous_usage_stats": True}},
    ) as raw:  # fmt: skip
        assert raw.headers["cache-control"] == "no-cache"
        told = [json.loads(line[6:]) for line in raw.iter_lines() if line.startswith("data: {")]
    used = [chunk["usage"]["completion_tokens"] for chunk in told if "usage" in chunk]
    assert used == sorted(used)
    assert len(used) >= len(told) - 1


def tells_log_probs(client: openai.OpenAI, model: str) -> None:
    found = client.chat.completions.create(
        model=model, messages=SAID, max_tokens=5, seed=1, logprobs=True, top_logprobs=3
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert found.usage is not None
    assert len(logprobs.content) == found.usage.completion_tokens
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.top_logprobs[-1].logprob
    plain = client.completions.create(model=model, prompt="sum", max_tokens=4, logprobs=2, seed=1)
    told = plain.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert len(told.tokens) == len(told.token_logprobs)


def echoes(client: openai.OpenAI, model: str, folder: Path) -> None:
    """What the model itself gives each token of a prompt, however the rest is sampled: lm-eval reads it."""
    prompt = [5, 6, 7, 8, 9]
    fixed: Any = {"model": model, "seed": 1, "logprobs": 1}
    alone = client.completions.create(prompt=prompt, echo=True, max_tokens=0, **fixed).choices[0]
    cold: Any = {"temperature": 0.1, "top_p": 0.5, "max_tokens": 4}
    both = client.completions.create(prompt=prompt, echo=True, **cold, **fixed)
    parts = client.completions.create(prompt=prompt, echo=True, stream=True, **cold, **fixed)
    texts = client.completions.create(prompt="sum of", echo=True, max_tokens=1, model=model, n=2)

    whole = both.choices[0]
    assert alone.logprobs is not None
    assert alone.logprobs.tokens is not None
    assert alone.logprobs.token_logprobs is not None
    assert len(alone.logprobs.tokens) == len(prompt)
    assert alone.logprobs.token_logprobs[0] is None
    logits_TV = LlamaForCausalLM.from_pretrained(folder)(torch.tensor([prompt])).logits[0, :-1]
    known = logits_TV.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert alone.logprobs.token_logprobs[1:] == pytest.approx(known, abs=1e-3)
    assert whole.text.startswith(alone.text)
    assert whole.logprobs is not None
    assert whole.logprobs.token_logprobs is not None
    assert whole.logprobs.token_logprobs[1:5] == pytest.approx(alone.logprobs.token_logprobs[1:], abs=1e-4)
    assert both.usage is not None
    assert (both.usage.prompt_tokens, len(whole.logprobs.token_logprobs)) == (5, 5 + both.usage.completion_tokens)
    assert "".join(part.choices[0].text for part in parts) == whole.text
    assert [choice.text[:6] for choice in texts.choices] == ["sum of"] * 2


def samples_several_and_stops(client: openai.OpenAI, model: str) -> None:
    several = client.chat.completions.create(model=model, messages=SAID, max_tokens=30, n=4, seed=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in several.choices}) > 1
    text = several.choices[0].message.content or ""
    stop = text[len(text) // 2]
    stopped = client.chat.completions.create(model=model, messages=SAID, max_tokens=30, seed=5, stop=[stop])
    assert stopped.choices[0].message.content == text.partition(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"


def refuses_in_openais_words(serving: Serving, client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=SAID)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=SAID, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=model, messages=SAID, max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        serving.client("wrong").models.list()


def serves_names(serving: Serving, client: openai.OpenAI) -> None:
    serving.context.served_models.publish("", "assistant", Target(serving.job_id, 0), Change("test"))
    assert [each.id for each in client.models.list()] == ["assistant", serving.job_id]
    assert client.models.retrieve("assistant").id == "assistant"
    assert client.chat.completions.create(model="assistant", messages=SAID, max_tokens=3).model == "assistant"


def fifty_at_once(client: openai.OpenAI, model: str) -> None:
    together = threading.Barrier(50)

    def ask(seed: int) -> str:
        together.wait(WAIT_SECONDS)
        stream = client.chat.completions.create(model=model, messages=SAID, max_tokens=64, seed=seed, stream=True)
        return json.dumps([chunk.choices[0].delta.content for chunk in stream if chunk.choices])

    with ThreadPoolExecutor(50) as pool:
        assert len(list(pool.map(ask, range(50)))) == 50


def a_caller_that_leaves_ends_its_sampling(serving: Serving, client: openai.OpenAI, model: str) -> None:
    stream = client.completions.create(model=model, prompt="a", max_tokens=8000, n=8, stream=True)
    next(iter(stream))
    assert serving.running_sequences() > 0
    stream.close()
    wait_until(lambda: serving.running_sequences() == 0, "nothing is sampled any more", 60)
