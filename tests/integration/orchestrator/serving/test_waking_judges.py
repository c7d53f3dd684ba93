"""Judges that were scaled to zero are wanted again as soon as stored trajectories wait for a verdict."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.orchestrator.http.platform import refresh_gauges
from spo.observability import WANTED_REPLICAS
from spo.rpc import pools
from spo.tasks.verifier import VERIFIER
from spo.testing.peers import ServiceDoubles, wait_until
from tests.conftest import free_port
from tests.integration.orchestrator.serving.conftest import Counter


@pytest.fixture
def port() -> int:
    """Where nobody listens yet."""
    return free_port()


def put(counter: Counter, name: str, **fields: Any) -> dict[str, Any]:
    tasks = counter.context.jobs.spec(counter.job_id).tasks
    problem = counter.context.library.load(tasks).train[0]
    body = json.dumps({"statement": problem.statement, "response_text": "right", **fields})
    response = counter.ask(
        "POST",
        "/v1/experience/import",
        params={"name": name, "tasks": tasks.model_dump_json()},
        content=body,
        headers={"Content-Type": "application/x-ndjson"},
    )
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


def asked(counter: Counter, path: str, **body: Any) -> Any:
    tasks = counter.context.jobs.spec(counter.job_id).tasks.model_dump(mode="json")
    response = counter.ask("POST", path, json={**body, "tasks": tasks})
    assert response.status_code == 200, response.text
    return response.json()["judged"]


def imported(counter: Counter) -> Any:
    return put(counter, "unscored")["judged"]


def collected(counter: Counter) -> Any:
    return asked(counter, "/v1/capture/collect", name="traffic", judge_unscored=True)


def rejudged(counter: Counter) -> Any:
    return asked(counter, "/v1/experience/rejudge", name="again", run="scored")


@pytest.mark.parametrize("work", [imported, collected, rejudged])
def test_what_waits_for_a_verdict_wakes_the_judges_and_gets_it(
    open_counter: Callable[..., Counter], port: int, work: Callable[[Counter], Any]
) -> None:
    counter = open_counter(sandbox_judge_address=f"127.0.0.1:{port}")
    autoscaling, clock = counter.context.autoscaling, itertools.count(0.0, 2.0)
    # What is scored already, or is never to be scored, wakes nobody.
    put(counter, "scored", reward=-1.0)
    problem = counter.context.library.load(counter.context.jobs.spec(counter.job_id).tasks).train[0]
    counter.chat(problem.statement, headers={"X-SPO-Capture": "true"})
    assert counter.ask("POST", "/v1/capture/collect", json={"name": "unjudged"}).status_code == 200
    assert autoscaling.observe(next(clock))["sandbox-judge"] == 0

    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(work, counter)
        wait_until(lambda: autoscaling.observe(next(clock))["sandbox-judge"] >= 1, "a judge is wanted")
        assert autoscaling.wanted["verifier"] == 0
        refresh_gauges(counter.context)
        assert WANTED_REPLICAS.labels(pool="sandbox-judge")._value.get() >= 1
        with ServiceDoubles(port):
            assert answer.result(60) == 1


def test_the_verifiers_are_wanted_by_what_they_decide_and_for_a_while_after(
    open_counter: Callable[..., Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = open_counter().context
    with context.judges.needed_for({VERIFIER}):
        with context.judges.needed_for({VERIFIER}):
            pass
        assert context.autoscaling.observe(0.0)["verifier"] == 1
    # Whoever gave up waiting comes back within that time.
    assert context.autoscaling.observe(2.0)["verifier"] == 1

    monkeypatch.setattr(pools, "NEEDED_SECONDS", 0.0)
    with context.judges.needed_for({VERIFIER}):
        pass
    wanted = context.autoscaling.observe(4.0)
    assert (wanted["verifier"], wanted["sandbox-judge"]) == (0, 0)
