"""Captured traffic: only what was asked for, redacted first, joined by feedback, and trajectories in the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from services.orchestrator.capture import CaptureStore, Feedback
from spo.errors import NotFound
from spo.experience.columns import StoredTrajectory
from tests.integration.orchestrator.serving.conftest import Counter

CANARY = "canary-5f2d"
ASKED = {"X-SPO-Capture": "true"}


def is_anywhere(client: redis.Redis, text: str) -> bool:
    return any(text.encode() in bytes(client.dump(key) or b"") for key in client.keys("*"))


def stored(counter: Counter, run: str) -> list[StoredTrajectory]:
    store = counter.context.experience
    return [row for file in store.files(run) for batch in store.batches(file) for row in batch]


def feedback(counter: Counter, completion: str, **said: Any) -> dict[str, Any]:
    response = counter.ask("POST", "/v1/feedback", json={"id": completion, **said})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def collected(counter: Counter, name: str = "traffic", **more: Any) -> dict[str, Any]:
    response = counter.ask("POST", "/v1/capture/collect", json={"name": name, **more})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_captured_without_being_asked_for(
    counter: Counter, redis_client: redis.Redis, *, stream: bool
) -> None:
    # Small texts are kept as they are in Redis' dumps, so the canary would be seen.
    counter.chat(CANARY, stream=stream)
    counter.chat(CANARY, stream=stream, headers={"X-SPO-Capture": "false"}, store=True)
    counter.chat(CANARY, counter.key("red", "models:query"), stream=stream)
    assert not is_anywhere(redis_client, CANARY)
    assert counter.ask("GET", "/v1/capture").json()["captured"] == 0

    counter.chat(CANARY, stream=stream, headers=ASKED)
    assert is_anywhere(redis_client, CANARY)
    counter.chat(CANARY, stream=stream, store=True)
    assert counter.ask("GET", "/v1/capture").json()["captured"] == 2


def test_a_key_can_ask_for_all_of_its_traffic(open_counter: Callable[..., Counter]) -> None:
    counter = open_counter(tenant="red")
    key = counter.key("red", "models:query", "models:capture", "trajectories:read")

    completion = counter.chat("hello", key).json()["id"]

    (line,) = counter.ask("GET", "/v1/capture/export", key).text.splitlines()
    kept = json.loads(line)
    assert (kept["id"], kept["statement"], kept["choices"][0]["token_ids"]) == (completion, "hello", [1, 2, 3])
    assert counter.ask("GET", "/v1/capture/export").text == ""


def test_what_a_rule_matches_is_stored_nowhere(counter: Counter, redis_client: redis.Redis) -> None:
    policy = {"redactions": [{"pattern": "canary-[0-9a-f]+"}], "licence": "CC-BY-4.0", "consent": "terms of 2026"}
    assert counter.ask("PUT", "/v1/capture", json=policy).status_code == 200

    completion = counter.chat(f"my name is {CANARY}", headers=ASKED, metadata={"who": CANARY}).json()["id"]
    feedback(counter, completion, thumbs="down", edited=f"hello {CANARY}", comment=CANARY)

    assert not is_anywhere(redis_client, CANARY)
    assert collected(counter)["human"] == 1
    sampled, human = sorted(stored(counter, "traffic"), key=lambda row: row.trajectory.reward)
    assert sampled.prompt.text == "my name is [redacted]"
    assert not sampled.trajectory.prompt_token_ids
    assert human.trajectory.response_text == "hello [redacted]"
    assert (human.trajectory.licence, human.trajectory.consent) == ("CC-BY-4.0", "terms of 2026")


def test_a_pattern_that_takes_for_ever_costs_the_capture_and_not_the_service(counter: Counter) -> None:
    slow = "^(.*?)(.*?)(.*?)(.*?)(.*?)[b-y]$"
    assert counter.ask("PUT", "/v1/capture", json={"redactions": [{"pattern": slow}]}).status_code == 200

    assert counter.chat("a" * 400, headers=ASKED).status_code == 200
    assert counter.ask("GET", "/v1/capture").json()["captured"] == 0
    refused = counter.ask(
        "PUT", "/v1/capture", json={"redactions": [{"pattern": "("}, {"pattern": ""}], "hook": "nobody's"}
    )
    pointers = [fault["pointer"] for fault in refused.json()["errors"]]
    assert pointers == ["/redactions/0/pattern", "/redactions/1/pattern", "/hook"]


def test_feedback_is_joined_by_id_and_again_is_no_change(counter: Counter) -> None:
    completion = counter.chat("hello", n=2, headers=ASKED).json()["id"]

    assert feedback(counter, completion, thumbs="up")["reward"] == 0.0
    assert feedback(counter, completion, thumbs="up")["reward"] == 0.0
    assert feedback(counter, completion, index=1, score=0.25)["reward"] == -0.75
    assert feedback(counter, completion, index=1, test="failed")["reward"] == -1.0
    unknown = counter.ask("POST", "/v1/feedback", json={"id": f"chatcmpl-{'0' * 26}", "thumbs": "up"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_captured")
    assert counter.ask("POST", "/v1/feedback", json={"id": completion}).status_code == 422
    other = counter.key("blue", "models:query")
    assert counter.ask("POST", "/v1/feedback", other, json={"id": completion, "thumbs": "up"}).status_code == 404


def meanwhile(captures: CaptureStore, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Somebody else acts once, after the completion is read and before anything is written."""
    read = captures.client.hgetall

    def then_act(key: str) -> dict[bytes, bytes]:
        found = read(key)
        monkeypatch.undo()
        act()
        return found

    monkeypatch.setattr(captures.client, "hgetall", then_act)


def test_what_two_say_at_once_of_a_completion_is_joined(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    captures, completion = counter.context.captures, counter.chat("hello", headers=ASKED).json()["id"]

    meanwhile(captures, monkeypatch, lambda: captures.give_feedback("", completion, 0, Feedback(thumbs="down")))
    captures.give_feedback("", completion, 0, Feedback(comment="wrong"))

    assert captures.get("", completion).feedback[0] == Feedback(comment="wrong", thumbs="down")


def test_feedback_brings_nothing_back_of_what_is_forgotten_meanwhile(
    counter: Counter, monkeypatch: pytest.MonkeyPatch, redis_client: redis.Redis
) -> None:
    captures, completion = counter.context.captures, counter.chat("hello", headers=ASKED).json()["id"]

    meanwhile(captures, monkeypatch, lambda: captures.forget("", completion))
    with pytest.raises(NotFound):
        captures.give_feedback("", completion, 0, Feedback(comment=CANARY))

    assert not is_anywhere(redis_client, CANARY)


def test_traffic_becomes_trajectories_once(counter: Counter) -> None:
    rated, edited, silent = (counter.chat(text, headers=ASKED).json()["id"] for text in ("a", "b", "c"))
    feedback(counter, rated, score=0.5)
    feedback(counter, edited, edited="better")

    first, again = collected(counter), collected(counter)

    assert (first["looked_at"], first["stored"], first["human"], first["unscored"]) == (3, 3, 1, 1)
    assert again["stored"] == first["stored"]
    found = [row.trajectory for row in stored(counter, "traffic")]
    rows = {row.group_id + row.response_text: row for row in found}
    assert len(rows) == 3
    assert rows[f"{rated}one two three"].reward == -0.5
    assert list(rows[f"{rated}one two three"].response_token_ids) == [1, 2, 3]
    human = rows[f"{edited}better"]
    assert human.reward == 0
    assert list(human.parents) == [rows[f"{edited}one two three"].trajectory_id]
    assert silent not in {row.group_id for row in rows.values()}


def test_what_nobody_scored_is_judged_by_the_tasks_verifier(counter: Counter) -> None:
    tasks = counter.context.jobs.spec(counter.job_id).tasks
    problem = counter.context.library.load(tasks).train[0]
    counter.peers.inference.says = lambda request: "right"
    counter.chat(problem.statement, headers=ASKED)
    counter.chat("of no task set", headers=ASKED)

    report = collected(counter, tasks=tasks.model_dump(mode="json"), judge_unscored=True)

    assert (report["judged"], report["unscored"], report["stored"]) == (1, 1, 1)
    (row,) = stored(counter, "traffic")
    assert (row.trajectory.prompt_id, row.trajectory.reward) == (problem.problem_id, 0.0)


def test_what_is_forgotten_is_gone(counter: Counter, redis_client: redis.Redis) -> None:
    completion = counter.chat(CANARY, headers=ASKED).json()["id"]

    assert counter.ask("DELETE", f"/v1/capture/completions/{completion}").status_code == 204
    assert counter.ask("DELETE", f"/v1/capture/completions/{completion}").status_code == 204
    assert not is_anywhere(redis_client, CANARY)


def test_of_what_is_asked_for_a_share_is_kept(counter: Counter) -> None:
    counter.ask("PUT", "/v1/capture", json={"sampling_rate": 0.0})
    counter.chat("hello", headers=ASKED)

    assert counter.ask("GET", "/v1/capture").json()["captured"] == 0


@pytest.mark.parametrize(
    ("metadata", "source"),
    [({}, "operator"), ({"source": "west"}, "west"), ({"source": "<b>we st/" + "x" * 100}, "_b_we_st_" + "x" * 55)],
)
def test_a_reward_is_the_opinion_of_the_source_that_its_request_named(
    counter: Counter, metadata: dict[str, str], source: str
) -> None:
    completion = counter.chat("hello", headers=ASKED, metadata=metadata).json()["id"]
    feedback(counter, completion, thumbs="up", edited="better")

    collected(counter)

    assert [row.trajectory.said_by for row in stored(counter, "traffic")] == [source, source]
