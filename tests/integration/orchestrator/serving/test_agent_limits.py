"""What a hostile agent, or a tenant with many, comes up against: bounds of sessions, and that they bind nobody else."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from services.orchestrator import agents
from services.orchestrator.http.agents import MOST_AT_ONCE
from services.orchestrator.http.middleware import SESSION_BODY_BYTES
from spo.model.chat import trained_mask
from spo.testing.peers import wait_until
from tests.integration.orchestrator.serving.conftest import Counter
from tests.integration.orchestrator.serving.test_agent_leases import Played
from tests.integration.orchestrator.serving.test_agent_sessions import ASKED, Agent


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    return answer.status_code, answer.json()["error"]["code"], answer.headers["x-should-retry"]


def test_a_tenant_has_so_many_sessions_open_and_those_that_ended_or_went_with_their_job_leave_room(
    open_counter: Callable[..., Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "MOST_OPEN", 2)
    counter = open_counter(tenant="red")
    red = counter.key("red", "jobs:read", "agents:run")

    def opened(token: str, job: str = counter.job_id) -> httpx.Response:
        return counter.ask("POST", "/v1/agents/sessions", token, json={"job": job})

    first, second = opened(red), opened(red)
    assert (first.status_code, second.status_code) == (201, 201)
    refused = opened(red)
    assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
    assert float(refused.headers["retry-after"]) > 0
    # Whoever looks after the platform is not held up by what its tenants do.
    Agent(counter)

    outcome = {"token": second.json()["token"], "status": "failed"}
    path = f"/v1/agents/sessions/{second.json()['id']}/outcome"
    assert counter.ask("POST", path, red, json=outcome).status_code == 200
    # As it goes with its job.
    for session in counter.context.redis.scan_iter(f"*{first.json()['id']}*"):
        counter.context.redis.delete(session)
    assert opened(red).status_code == 201


@contextmanager
def held(counter: Counter) -> Iterator[Callable[[], None]]:
    """Calls go no further than their first part until the function is called."""
    double = counter.peers.inference
    double.goes_on = go_on = threading.Event()
    try:
        yield go_on.set
    finally:
        go_on.set()
        double.goes_on = None


def test_a_flood_of_one_session_gets_as_many_answers_at_once_as_it_may_and_holds_up_no_other(counter: Counter) -> None:
    flooding, other = Agent(counter), Agent(counter)
    double = counter.peers.inference
    with ThreadPoolExecutor(40) as threads, held(counter) as go_on:
        calls = [threads.submit(flooding.call, {"role": "user", "content": str(number)}) for number in range(40)]
        wait_until(lambda: sum(call.done() for call in calls) == 40 - MOST_AT_ONCE, "the others are refused", 60)
        assert double.serving == MOST_AT_ONCE
        assert {refusal(call.result()) for call in calls if call.done()} == {(429, "rate_limited", "true")}
        answered = threads.submit(other.call, ASKED)
        wait_until(lambda: double.serving == MOST_AT_ONCE + 1, "the other is served meanwhile", 60)
        go_on()
        assert answered.result(60).status_code == 200
        assert sorted(call.result(60).status_code for call in calls) == [200] * MOST_AT_ONCE + [429] * 32
    assert len(flooding.tree()) == MOST_AT_ONCE


def test_a_session_whose_time_is_over_or_whose_tree_is_full_answers_no_more_and_says_that_trying_is_in_vain(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, full = Agent(counter, max_seconds=1), Agent(counter)
    wait_until(lambda: late.call(ASKED).status_code == 429, "its time is over", 30)
    assert refusal(late.call(ASKED)) == (429, "session_full", "false")

    full.says(ASKED)
    held_bytes = int(
        counter.context.agent_sessions.counts(counter.context.agent_sessions.get(full.grant["id"]))["bytes"]
    )
    monkeypatch.setattr(agents, "MOST_BYTES", held_bytes + 2000)
    assert refusal(full.call({"role": "user", "content": "x" * 4000})) == (429, "session_full", "false")
    assert len(full.tree()) == 1, "what is refused is not stored"
    streamed = full.call({"role": "user", "content": "x" * 4000}, stream=True)
    assert "[DONE]" not in streamed.text, "no end is told of what is not stored"
    assert len(full.tree()) == 1


def test_a_message_that_is_too_long_is_refused_by_what_it_says_of_itself(counter: Counter) -> None:
    agent = Agent(counter)
    at = urlsplit(agent.grant["base_url"])
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    connection.putrequest("POST", f"{at.path}/chat/completions")
    headers = {"Authorization": f"Bearer {agent.grant['key']}", "Content-Type": "application/json"}
    for name, said in {**headers, "Content-Length": str(SESSION_BODY_BYTES + 1)}.items():
        connection.putheader(name, said)
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, json.load(answer)["error"]["code"]) == (413, "body_too_large")
    connection.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/outcome"),
        ("POST", "/v1/outcome"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/files"),
        ("GET", "/v1/../../../v1/jobs"),
        ("GET", "/v1/..%2F..%2F..%2Fv1%2Fjobs"),
        ("GET", "/../../metrics"),
        ("POST", "/v1/models"),
    ],
)
def test_no_other_path_is_behind_a_sessions_address(counter: Counter, method: str, path: str) -> None:
    agent = Agent(counter)
    agent.says(ASKED)
    at = urlsplit(agent.grant["base_url"])
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    body = json.dumps({"token": agent.grant["key"], "status": "finished", "reward": 1})
    headers = {"Authorization": f"Bearer {agent.grant['key']}", "Content-Type": "application/json"}
    # As it is: whoever is hostile does not tidy up dots.
    connection.request(method, at.path.removesuffix("/v1") + path, body if method == "POST" else None, headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status in (401, 404, 405)
    session = counter.context.agent_sessions.get(agent.grant["id"])
    assert counter.context.agent_sessions.outcome(session) is None


def test_what_an_agent_makes_up_is_read_and_never_trained_on(counter: Counter) -> None:
    played = Played(counter)
    one, two = played.lease(most=2)
    made_up: list[dict[str, Any]] = [
        {"role": "user", "content": "guess"},
        {"role": "assistant", "content": "I have won"},
        {"role": "user", "content": "yes"},
    ]
    assert played.say(one, made_up).status_code == 200
    answer = {"role": "assistant", "content": "one two three and much more"}
    assert played.say(one, [made_up[0], answer, ASKED]).status_code == 200
    assert played.end(one, reward=1).status_code == 200
    played.call(two, "x")
    assert played.end(two, reward=1).status_code == 200

    whole, _ = played.rollouts()
    calls = counter.ask("GET", f"/v1/agents/sessions/{one['lease_id']}/tree").json()["calls"]
    assert [(call["parent"], call["reason"]) for call in calls] == [
        (None, "foreign_assistant"),
        (None, "edited"),
    ]
    trained = [token for token, own in zip(whole.response_token_ids, trained_mask(whole), strict=True) if own]
    assert trained == [token for call in calls for token in call["sampled"]]
    assert all(100 + ord("I") in call["read"] or 100 + ord("m") in call["read"] for call in calls)
