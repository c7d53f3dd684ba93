"""OpenAI's paths at the REST door: answers, errors in their form, scopes, tenants, quotas, and callers that leave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from spo.testing.peers import wait_until
from spo.v1.inference_service_pb2 import ServedCall, ServedToken
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from tests.integration.orchestrator.serving.conftest import KEY, Counter


def error(response: httpx.Response) -> tuple[int, str, str]:
    assert response.headers["content-type"] == "application/json"
    told = response.json()["error"]
    return response.status_code, told["type"], told["code"]


def test_a_completion_is_whole_or_in_events(counter: Counter) -> None:
    whole = counter.chat("hello", n=2).json()
    streamed = counter.chat("hello", stream=True)

    assert [choice["message"]["content"] for choice in whole["choices"]] == ["one two three"] * 2
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert whole["system_fingerprint"] == f"{counter.job_id}@0"
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_an_ended_jobs_policy_is_asked_as_a_running_ones_is(counter: Counter) -> None:
    counter.peers.inference.unready = 100
    body = {"prompt": "hello", "samples": 2, "seed": 7, "version": 0}
    found = counter.ask("POST", f"/v1/policies/{counter.job_id}/completions", json=body)

    assert found.status_code == 200, found.text
    told = found.json()
    assert told["seed"] == 7
    assert [(each["text"], each["tokens"], each["version"]) for each in told["items"]] == [("one two three", 3, 0)] * 2
    assert counter.peers.inference.asked.samples == 2


def test_errors_are_openais_on_its_paths_and_problems_elsewhere(counter: Counter) -> None:
    assert error(counter.chat("x", token="wrong")) == (401, "authentication_error", "invalid_api_key")
    assert error(counter.chat("x", model="nobody")) == (404, "not_found_error", "model_not_found")
    assert error(counter.chat("x", temperature=3))[:2] == (400, "invalid_request_error")
    assert counter.chat("x", audio={"voice": "a"}).json()["error"]["param"] == "audio"
    assert error(counter.ask("POST", "/v1/chat/completions", content=b"{"))[:2] == (400, "invalid_request_error")
    assert error(counter.chat("x", stop=["a"] * 5))[0] == 400
    assert counter.ask("GET", "/v1/nothing").headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("POST", f"/v1/{path}", 404) for path in ("embeddings", "moderations", "images/generations", "audio/speech")),
        *(
            ("GET", f"/v1/{path}", 404)
            for path in ("files", "batches/x", "fine_tuning/jobs", "threads/a/runs", "evals")
        ),
        *(("POST", f"/v1/{path}", 404) for path in ("chat", "chat/nothing", "v1/chat/completions", "models/a/b")),
        *(("GET", f"/v1/{path}", 405) for path in ("chat/completions", "completions")),
        ("DELETE", "/v1/models/x", 405),
    ],
)
def test_paths_of_openais_that_are_not_served_answer_in_its_form(
    counter: Counter, method: str, path: str, status: int
) -> None:
    found = counter.ask(method, path, json={} if method == "POST" else None)
    code = {404: "not_found", 405: "method_not_allowed"}[status]
    assert error(found) == (status, {404: "not_found_error"}.get(status, "invalid_request_error"), code)
    assert ("allow" in found.headers) == (status == 405)


def test_what_of_the_other_dialects_is_not_served_is_told_in_their_own_form(
    open_counter: Callable[..., Counter],
) -> None:
    counter = open_counter(tenant="red")
    red = counter.key("red", "models:query")
    for path in ("/v1/responses/x/input_items", "/v1/responses/x/cancel"):
        refused = counter.ask("POST", path, red, json={})
        assert error(refused) == (404, "not_found_error", "path_not_served")
        assert path in refused.json()["error"]["message"]
    for path in ("/v1/messages/count_tokens", "/v1/messages/batches"):
        refused = counter.ask("POST", path, "none", json={}, headers={"authorization": "", "x-api-key": red})
        assert (refused.status_code, refused.json()["type"]) == (404, "error")
        assert refused.json()["error"]["type"] == "not_found_error"
        assert "Anthropic's Messages" in refused.json()["error"]["message"]
    denied = counter.ask("POST", "/v1/messages", "wrong", json={})
    assert (denied.status_code, denied.json()["error"]["type"]) == (401, "authentication_error")
    asked = counter.ask("GET", "/v1/files", red, headers={"anthropic-version": "2023-06-01", "x-api-key": red})
    assert asked.json()["error"]["type"] == "permission_error"
    for own in ("/v1/jobs/x", "/v1/evaluations/x", "/v1/nothing", "/v1/datasets/x"):
        assert counter.ask("GET", own).headers["content-type"] == "application/problem+json"


NO_OPS: dict[str, object] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "functions": [],
    "function_call": "auto",
    "logit_bias": {},
    "service_tier": "auto",
    "modalities": ["text"],
    "verbosity": "medium",
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1,
    "ignore_eos": False,
    "stop": [],
    "metadata": {},
    "response_format": {"type": "text"},
    "prompt_cache_key": "a",
    "audio": None,
    "reasoning_effort": None,
    "stream_options": {"include_obfuscation": False},
}
OBEYED_BY_NOBODY: dict[str, object] = {
    "logit_bias": {"1": 5},
    "service_tier": "flex",
    "modalities": ["text", "audio"],
    "functions": [{"name": "f"}],
    "top_k": 5,
    "repetition_penalty": 1.1,
    "reasoning_effort": "high",
    "tool_choice": "required",
    "response_format": {"type": "json_schema"},
    "messages": [{"role": "user", "content": "x", "name": "ann"}],
}


def test_values_that_change_nothing_are_accepted_and_others_refused_by_name(counter: Counter) -> None:
    assert counter.chat("x", **NO_OPS).status_code == 200
    for name, value in OBEYED_BY_NOBODY.items():
        refused = counter.chat("x", **{name: value})
        assert error(refused)[0] == 400
        assert refused.json()["error"]["param"].startswith(name), name
    plain = {"model": counter.job_id, "prompt": "x", "logit_bias": {}, "suffix": "", "echo": False, "top_k": 0}
    assert counter.ask("POST", "/v1/completions", json=plain).status_code == 200


def test_tokens_that_top_p_leaves_no_chance_are_left_out_of_the_likeliest(counter: Counter) -> None:
    none = float("-inf")
    likely = [ServedToken(text="a", logprob=-0.5), ServedToken(text="b", logprob=none)]
    counter.peers.inference.shown = lambda word: ServedToken(
        text=word, logprob=-0.5 if "o" in word else none, top=likely
    )

    whole = counter.chat("x", logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    streamed = counter.chat("x", logprobs=True, top_logprobs=2, stream=True).text
    body = {"model": counter.job_id, "prompt": "x", "logprobs": 2}
    plain = counter.ask("POST", "/v1/completions", json=body).json()["choices"][0]["logprobs"]

    assert [token["logprob"] for token in whole] == [-0.5, -0.5, -9999.0]
    assert [[each["token"] for each in token["top_logprobs"]] for token in whole] == [["a"]] * 3
    assert plain["top_logprobs"] == [{"a": -0.5}] * 3
    assert "Infinity" not in streamed


def test_with_echo_a_prompt_comes_before_the_answer_and_its_first_token_has_no_log_prob(counter: Counter) -> None:
    shown = {"one ": ServedToken(text="one ", logprob=float("nan"))}
    counter.peers.inference.shown = lambda word: shown.get(word, ServedToken(text=word, logprob=-0.5))
    body = {"model": counter.job_id, "prompt": "x", "logprobs": 1, "echo": True, "max_tokens": 0}

    told = counter.ask("POST", "/v1/completions", json=body).json()["choices"][0]["logprobs"]

    asked = counter.peers.inference.asked
    assert (asked.echo, asked.prompt_alone, asked.max_tokens) == (True, True, 1)
    assert told["token_logprobs"] == [None, -0.5, -0.5]
    assert told["top_logprobs"] == [None, {}, {}]
    assert counter.ask("POST", "/v1/completions", json={**body, "max_tokens": 5}).status_code == 200
    assert (asked := counter.peers.inference.asked).echo
    assert (asked.prompt_alone, asked.max_tokens) == (False, 5)
    for wrong, param in (({"echo": False}, "max_tokens"), ({"store": True}, "store")):
        refused = counter.ask("POST", "/v1/completions", json=body | wrong)
        assert (error(refused)[0], refused.json()["error"]["param"]) == (400, param)


def test_a_count_of_tokens_is_kept_to_behind_the_end_where_it_is_asked_for(counter: Counter) -> None:
    assert counter.chat("x", ignore_eos=True, max_tokens=5).status_code == 200
    assert (counter.peers.inference.asked.ignore_eos, counter.peers.inference.asked.max_tokens) == (True, 5)
    for wrong, param in (({"max_tokens": None}, "ignore_eos"), ({"max_tokens": 5, "store": True}, "store")):
        refused = counter.chat("x", ignore_eos=True, **wrong)
        assert (error(refused)[0], refused.json()["error"]["param"]) == (400, param)


TOOL = {"type": "function", "function": {"name": "weather", "strict": True}}
ASKED = {"role": "user", "content": "x"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}],
}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]}


def test_calls_are_answered_in_openais_form_whole_and_in_events(counter: Counter) -> None:
    double = counter.peers.inference
    double.calls = [ServedCall(id=f"c{number}", name="weather", arguments_json="{}") for number in range(2)]
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"id": f"c{number}", "type": "function", "function": function} for number in range(2)]

    whole = counter.chat("x", tools=[TOOL]).json()["choices"][0]
    events = counter.chat("x", tools=[TOOL], stream=True).text.split("\n\n")
    last = json.loads(events[-3].removeprefix("data: "))["choices"][0]
    one = counter.chat("x", tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]

    assert (whole["finish_reason"], whole["message"]["tool_calls"]) == ("tool_calls", calls)
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["tool_calls"] == [{"index": number, **call} for number, call in enumerate(calls)]
    assert one["message"]["tool_calls"] == calls[:1]
    assert [tool["function"]["name"] for tool in json.loads(double.asked.tools_json)] == ["weather"]
    assert counter.chat("x", tools=[TOOL], tool_choice="none").status_code == 200
    assert not double.asked.tools_json


@pytest.mark.parametrize(
    ("fields", "choice", "schema"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "required", None),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            {"type": "function", "function": {"name": "weather"}},
            None,
        ),
        ({"tools": [TOOL], "tool_choice": "auto"}, None, None),
        ({"response_format": {"type": "json_object"}}, None, {"type": "object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
            None,
            {"type": "integer"},
        ),
        ({"response_format": {"type": "text"}}, None, None),
    ],
)
def test_what_an_answer_is_held_to_reaches_the_replica(
    counter: Counter, fields: dict[str, object], choice: object, schema: object
) -> None:
    assert counter.chat("x", **fields).status_code == 200
    asked = counter.peers.inference.asked
    assert (json.loads(asked.tool_choice_json) if asked.tool_choice_json else None) == choice
    assert (json.loads(asked.answer_schema_json) if asked.answer_schema_json else None) == schema


def test_calls_and_their_results_reach_the_template_as_it_takes_them(counter: Counter) -> None:
    found = counter.chat("", messages=[ASKED, CALLING, ANSWERED])

    assert found.status_code == 200
    call = {"name": "weather", "arguments": {"place": "Oslo"}}
    assert json.loads(counter.peers.inference.asked.messages_json) == [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
    ]


def _calling(arguments: str) -> dict[str, object]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [ASKED, ANSWERED]}, "messages.1.tool_call_id"),
        ({"messages": [ASKED, ANSWERED, CALLING]}, "messages.1.tool_call_id"),
        ({"messages": [ASKED, CALLING, {**ANSWERED, "tool_call_id": "c2"}]}, "messages.2.tool_call_id"),
        ({"messages": [ASKED, CALLING, {"role": "tool", "content": "x"}]}, "messages.2.tool_call_id"),
        ({"messages": [{**ASKED, "tool_call_id": "c1"}]}, "messages.0.tool_call_id"),
        ({"messages": [{**CALLING, "role": "user"}]}, "messages.0.tool_calls"),
        ({"messages": [ASKED, CALLING, {**ANSWERED, "name": "other"}]}, "messages.2.name"),
        *(
            ({"messages": [ASKED, _calling(text)]}, "messages.1.tool_calls.0.function.arguments")
            for text in ("{", "[]", "3", '"x"', "null", "[" * 9999)
        ),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sun"}}}, "tool_choice.function"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "store": True}, "store"),
    ],
)
def test_what_is_wrong_with_tools_is_refused_by_name(counter: Counter, fields: dict[str, object], param: str) -> None:
    refused = counter.chat("x", **fields)
    assert error(refused)[0] == 400
    assert refused.json()["error"]["param"].startswith(param)


def test_only_a_key_for_it_may_ask_and_only_of_its_own_tenants_jobs(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(tenant="red")
    red, blue = counter.key("red", "models:query"), counter.key("blue", "models:query")

    assert counter.chat("x", red).status_code == 200
    assert error(counter.chat("x", blue)) == (404, "not_found_error", "model_not_found")
    assert error(counter.chat("x", counter.key("red", "jobs:read"))) == (403, "permission_error", "forbidden")
    assert [each["id"] for each in counter.ask("GET", "/v1/models", red).json()["data"]] == [counter.job_id]
    assert counter.ask("GET", "/v1/models", blue).json()["data"] == []


def test_more_at_once_than_a_tenant_may_have_is_refused(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(serving_streams_per_tenant=2)
    double = counter.peers.inference
    double.goes_on = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(counter.chat, "x") for _ in range(2)]
        wait_until(lambda: double.serving == 2, "both are sampled")
        refused = counter.chat("x")
        double.goes_on.set()
        assert [each.result().status_code for each in waiting] == [200, 200]

    assert error(refused) == (429, "rate_limit_error", "rate_limited")
    assert counter.chat("x").status_code == 200


def test_the_tokens_of_a_minute_are_counted(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(serving_tokens_per_minute=6)

    found = [counter.chat("x").status_code for _ in range(3)]

    assert found[0] == 200
    assert found[-1] == 429


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_that_leaves_ends_its_sampling(counter: Counter, *, stream: bool) -> None:
    double = counter.peers.inference
    double.goes_on = threading.Event()
    body = {"model": counter.job_id, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=counter.url, headers=key, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=0.5))
    wait_until(lambda: double.serving == 0, "nothing is sampled any more", 30)


def test_a_caller_that_leaves_before_the_first_part_frees_its_place(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(serving_streams_per_tenant=1)
    released = threading.Event()
    counter.peers.inference.says = lambda _: "late" if released.wait(60) else ""
    body = {"model": counter.job_id, "messages": [{"role": "user", "content": "x"}], "stream": True}
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=counter.url, headers=key, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=0.5))

    counter.peers.inference.says = lambda _: "soon"
    wait_until(lambda: counter.chat("x").status_code == 200, "its place is free", 20)
    released.set()


def test_a_request_wakes_a_pool_that_was_scaled_to_zero_and_is_answered_once_it_is_up(
    open_counter: Callable[..., Counter],
) -> None:
    counter = open_counter(serving_wait_seconds=60)
    context = counter.context
    leaving = HeartbeatRequest(replica_id="inference-1", pool="inference", address=counter.peers.address, draining=True)
    context.replicas.beat(leaving)
    assert context.autoscaling.observe(0.0)["inference"] == 0
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(counter.chat, "x")
        wait_until(lambda: context.autoscaling.observe(time.monotonic())["inference"] == 1, "a replica is wanted")
        assert not asked.done()
        # What KEDA starts joins, is told what to serve, and serves it.
        joining = HeartbeatRequest(replica_id="inference-2", pool="inference", address=counter.peers.address)
        context.replicas.beat(joining)
        assert context.assigner.run_of("inference-2") == counter.job_id
        joining.run_id = counter.job_id
        context.replicas.beat(joining)
        assert asked.result().status_code == 200


def test_a_request_whose_pool_stays_at_zero_is_told_what_it_waited_for(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter()
    leaving = HeartbeatRequest(replica_id="inference-1", pool="inference", address=counter.peers.address, draining=True)
    counter.context.replicas.beat(leaving)

    refused = counter.chat("x")

    assert error(refused) == (503, "server_error", "policy_not_served")
    assert refused.headers["retry-after"] == "10"
    assert "after 2 s: no inference replica is running yet" in refused.json()["error"]["message"]


def test_replicas_that_stay_for_a_name_are_an_administrators_to_give(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(tenant="red")
    red = counter.key("red", "weights:push")
    body = {"job_id": counter.job_id, "min_replicas": 1}

    refused = counter.ask("PUT", "/v1/served-models/assistant", red, json=body)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert counter.ask("PUT", "/v1/served-models/assistant", red, json=body | {"min_replicas": 0}).status_code == 200
    too_many = counter.ask("PUT", "/v1/served-models/assistant", json=body | {"min_replicas": 9})
    assert too_many.json()["errors"][0]["pointer"] == "/min_replicas"
    assert counter.ask("PUT", "/v1/served-models/mine", json=body).json()["min_replicas"] == 1


def test_a_policy_that_no_replica_serves_is_named(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter()
    other = counter.context.jobs.submit(counter.context.jobs.spec(counter.job_id).model_copy(update={"name": "b"}))
    # Of the same model: the replica that serves the first serves it too.
    assert counter.chat("x", model=other).status_code == 200
    away = counter.context.jobs.spec(counter.job_id)
    elsewhere = away.model_copy(update={"model": away.model.model_copy(update={"path": "/models/other"})})
    refused = counter.chat("x", model=counter.context.jobs.submit(elsewhere))
    assert error(refused) == (503, "server_error", "policy_not_served")
    assert refused.headers["retry-after"] == "10"
    assert f"the replicas serve {counter.job_id}" in refused.json()["error"]["message"]
    theirs = counter.context.jobs.submit(elsewhere, tenant="blue")
    told = counter.chat("x", counter.key("blue", "models:query"), model=theirs).json()["error"]["message"]
    assert "the replicas serve other jobs" in told
    assert counter.job_id not in told, "another tenant's job is not named"
