"""The REST API over a really running server: submit, read, steer, and every way to be refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.settings import Settings
from spo import redis_keys
from spo.errors import NotReady
from spo.messaging.streams.entries import publish
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles
from spo.testing.runs import conversation
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

Document = dict[str, Any]
GHOST = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"


def submit(api: httpx.Client, document: Document, **headers: str) -> httpx.Response:
    return api.post("/v1/jobs", json=document, headers=headers)


def pointers(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"] == "application/problem+json"
    return [error["pointer"] for error in response.json()["errors"]]


def with_(document: Document, pointer: str, value: Any) -> Document:
    changed: Document = json.loads(json.dumps(document))
    *path, last = pointer.strip("/").split("/")
    place = changed
    for step in path:
        place = place.setdefault(step, {})
    place[last] = value
    return changed


def test_a_submitted_job_is_accepted_and_can_be_read(api: httpx.Client, document: Document) -> None:
    accepted = submit(api, document)
    job = accepted.json()

    assert accepted.status_code == 202
    assert accepted.headers["location"] == f"/v1/jobs/{job['id']}"
    assert accepted.headers["etag"]
    read = api.get(accepted.headers["location"]).json()
    assert (read["state"], read["name"], read["spec"]["value"]["samples"]) == ("queued", "test job", 128)
    assert [entry["id"] for entry in api.get("/v1/jobs").json()["items"]] == [job["id"]]


def test_a_trained_job_is_at_its_last_step_also_where_redis_lost_the_last_rows(
    context: AppContext, api: httpx.Client, document: Document
) -> None:
    job_id = submit(api, document).json()["id"]
    context.redis.zadd(f"spo:{job_id}:orchestrator:metrics", {json.dumps({"step": 116}): 116})
    assert api.get(f"/v1/jobs/{job_id}").json()["progress"]["step"] == 116
    context.redis.hset(f"spo:{job_id}:orchestrator:job", "trained_steps", 120)
    assert api.get(f"/v1/jobs/{job_id}").json()["progress"]["step"] == 120
    assert [entry["step"] for entry in api.get("/v1/jobs").json()["items"]] == [120]


def test_a_list_shows_the_reward_of_rollouts_where_a_batch_holds_more_than_these(
    context: AppContext, api: httpx.Client, document: Document
) -> None:
    job_id = submit(api, document).json()["id"]
    for step, row in ((1, {"reward": -0.5}), (2, {"reward": -0.4, "reward/online": -0.9})):
        context.redis.zadd(f"spo:{job_id}:orchestrator:metrics", {json.dumps({"step": step, **row}): step})
        (listed,) = [entry["metrics"] for entry in api.get("/v1/jobs").json()["items"]]
        assert listed == {"reward": row.get("reward/online", row["reward"])}


def patiently(api: httpx.Client, document: Document) -> httpx.Response:
    """The answer to a submission, asked again while the models of others are tried."""
    while True:
        answer = submit(api, document, **{"Idempotency-Key": "one"})
        if answer.status_code != 503:
            return answer
        assert answer.json()["code"] == "checks_busy"
        time.sleep(int(answer.headers["retry-after"]))


def test_fifty_parallel_identical_posts_make_one_job(api: httpx.Client, document: Document) -> None:
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: patiently(api, document), range(50)))

    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(api.get("/v1/jobs").json()["items"]) == 1


def test_a_key_used_for_another_body_is_refused(api: httpx.Client, document: Document) -> None:
    submit(api, document, **{"Idempotency-Key": "one"})

    refused = submit(api, with_(document, "/seed", 7), **{"Idempotency-Key": "one"})

    assert (refused.status_code, refused.json()["code"]) == (422, "idempotency_mismatch")


def test_validating_only_resolves_the_spec_and_creates_nothing(api: httpx.Client, document: Document) -> None:
    resolved = api.post("/v1/jobs?validate_only=true", json=document)

    assert resolved.status_code == 200
    assert resolved.json()["algorithm"]["losses"][0]["objective"] == "terminal_squared"
    assert api.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize(
    ("pointer", "value", "reported"),
    [
        ("/colour", "red", "/colour"),
        ("/trainer/steps", "many", "/trainer/steps"),
        ("/trainer/learning_rate", None, "/trainer/learning_rate"),
        ("/algorithm/beta", 0, "/algorithm/beta"),
        ("/algorithm/beta", -1, "/algorithm/beta"),
        ("/value", None, "/value"),
        ("/offline/human_solutions", False, "/replay/mix"),
        ("/offline/keep_reference_samples", False, "/replay/mix"),
        ("/evaluation/ks", [50], "/evaluation/ks"),
        ("/tasks", {"kind": "jsonl"}, "/tasks/path"),
        ("/tasks", {"kind": "jsonl", "path": "nowhere.jsonl"}, "/tasks/path"),
        ("/tasks/verifier", {"kind": "http", "url": "https://nowhere.example.org/score"}, "/tasks/verifier/url"),
        ("/model/path", "nowhere", "/model/path"),
        ("/model/a~b", 1, "/model/a~0b"),
    ],
)
def test_bad_input_is_refused_with_a_pointer_to_it(
    api: httpx.Client, document: Document, pointer: str, value: Any, reported: str
) -> None:
    document = with_(document, pointer, value)

    refused = submit(api, document)

    assert refused.status_code == 422
    assert refused.json()["code"] == "invalid_job_spec"
    assert reported in {found.removesuffix("/float").removesuffix("/int") for found in pointers(refused)}
    assert api.get("/v1/jobs").json()["items"] == []


def test_all_faults_are_reported_at_once(api: httpx.Client, document: Document, tmp_path: Path) -> None:
    document["model"]["path"] = str(tmp_path / "absent")
    document["tasks"] = {"kind": "jsonl", "path": str(tmp_path / "absent.jsonl")}

    assert set(pointers(submit(api, document))) == {"/model/path", "/tasks/path"}


def test_a_model_folder_with_code_is_refused(api: httpx.Client, document: Document) -> None:
    (Path(document["model"]["path"]) / "modeling_evil.py").write_text("x")

    refused = submit(api, document)

    assert pointers(refused) == ["/model/path"]
    assert "custom code" in refused.json()["errors"][0]["message"]


def test_a_model_folder_of_pickles_is_refused(api: httpx.Client, document: Document) -> None:
    weights = next(Path(document["model"]["path"]).glob("*.safetensors"))
    weights.rename(weights.with_name("pytorch_model.bin"))

    refused = submit(api, document)

    assert pointers(refused) == ["/model/path"]
    assert "safetensors" in refused.json()["errors"][0]["message"]


def test_a_malformed_dataset_line_is_named_with_its_number(
    api: httpx.Client, document: Document, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n{not json\n")
    document["tasks"] = {"kind": "jsonl", "path": str(tasks)}

    refused = submit(api, document)

    assert pointers(refused) == ["/tasks/path"]
    assert "line 2" in refused.json()["errors"][0]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"name": NaN}',
        b'{"name": "a", "name": "b"}',
        b"[" * 100_000,
        b'{"seed": 9223372036854775808}',
        b'"' + b"\xff" + b'"',
    ],
    ids=["empty", "cut", "nan", "twice", "deep", "huge", "not-utf8"],
)
def test_what_is_not_json_is_refused_as_such(api: httpx.Client, body: bytes) -> None:
    refused = api.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})

    assert (refused.status_code, refused.json()["code"]) == (400, "malformed_json")


def test_a_body_beyond_the_limit_is_refused_even_without_a_length(api: httpx.Client) -> None:
    announced = api.post("/v1/jobs", content=b"x" * (2 << 20), headers={"Content-Type": "application/json"})
    chunked = api.post(
        "/v1/jobs", content=(b"x" * 65536 for _ in range(64)), headers={"Content-Type": "application/json"}
    )

    assert [answer.json()["code"] for answer in (announced, chunked)] == ["body_too_large"] * 2


def test_forms_and_other_sites_are_refused(api: httpx.Client, document: Document) -> None:
    form = api.post("/v1/jobs", data={"name": "x"})
    foreign = submit(api, document, Origin="http://evil.example")
    rebound = api.get("/v1/jobs", headers={"Host": "evil.example"})

    assert (form.status_code, foreign.status_code, rebound.status_code) == (415, 403, 403)


def test_an_illegal_action_is_a_conflict_that_names_the_legal_ones(api: httpx.Client, document: Document) -> None:
    job_id = submit(api, document).json()["id"]

    refused = api.post(f"/v1/jobs/{job_id}/resume")

    assert (refused.status_code, refused.json()["code"]) == (409, "illegal_transition")
    assert "legal actions: cancel" in refused.json()["detail"]


def test_cancelling_twice_is_accepted_twice(api: httpx.Client, document: Document) -> None:
    job_id = submit(api, document).json()["id"]

    answers = [api.post(f"/v1/jobs/{job_id}/cancel") for _ in range(2)]

    assert [(answer.status_code, answer.json()["state"]) for answer in answers] == [(202, "cancelled")] * 2


def test_a_document_that_did_not_change_is_not_sent_again(api: httpx.Client, document: Document) -> None:
    location = submit(api, document).headers["location"]
    tag = api.get(location).headers["etag"]

    assert api.get(location, headers={"If-None-Match": tag}).status_code == 304
    api.post(f"{location}/cancel")
    assert api.get(location, headers={"If-None-Match": tag}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["", "/events", "/metrics", "/evaluations", "/weights", "/checkpoints", "/trajectories", "/prompts/ab"],
)
def test_an_unknown_job_is_not_found_everywhere(api: httpx.Client, path: str) -> None:
    answer = api.get(f"/v1/jobs/{GHOST}{path}")

    assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")


@pytest.mark.parametrize(
    "path", ["/v1/jobs/..%2f..%2fetc", "/v1/jobs/job_x%00", "/v1/jobs?limit=0", "/v1/jobs?cursor=x"]
)
def test_requests_that_make_no_sense_are_problems_too(api: httpx.Client, path: str) -> None:
    answer = api.get(f"/v1/jobs{path}")

    assert answer.status_code in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"


def test_jobs_are_listed_page_by_page(api: httpx.Client, document: Document) -> None:
    submitted = {submit(api, document).json()["id"] for _ in range(5)}
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = api.get("/v1/jobs", params={"limit": 2, "status": "queued", **cursor}).json()
        found += [entry["id"] for entry in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}

    assert len(found) == 5
    assert set(found) == submitted


def test_with_a_key_set_only_its_holder_may_ask(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str]
) -> None:
    url = serve(open_context(api_key="sesame"))
    ask = lambda **request: httpx.get(f"{url}/v1/jobs", trust_env=False, **request).status_code  # noqa: E731

    assert ask() == 401
    assert ask(headers={"Authorization": "Bearer wrong"}) == 401
    assert ask(headers={"Authorization": "Bearer sesame"}) == 200
    assert ask(auth=("anyone", "sesame")) == 200
    # The last is what clients of vLLM's server ask before they begin.
    for path in ("/healthz", "/health"):
        assert httpx.get(f"{url}{path}", trust_env=False).status_code == 200


def test_without_a_key_only_loopback_is_served() -> None:
    with pytest.raises(ValueError, match="SPO_ORCHESTRATOR_API_KEY"):
        Settings(host="0.0.0.0")


def test_a_draining_orchestrator_is_not_ready(context: AppContext, api: httpx.Client) -> None:
    from services.orchestrator.http.platform import readyz

    assert api.get("/readyz").status_code == 200
    context.stop.set()
    with pytest.raises(NotReady):
        asyncio.run(readyz(context))


def test_metrics_count_the_jobs_by_state(api: httpx.Client, document: Document) -> None:
    submit(api, document)

    text = api.get("/metrics").text

    assert 'spo_jobs{state="queued"} 1.0' in text
    assert 'spo_stream_lag_entries{stream="estimates"} 0.0' in text


def test_the_gauges_of_the_prompts_are_those_of_all_active_jobs(
    context: AppContext, api: httpx.Client, document: Document
) -> None:
    for count in (2, 3):
        job_id = submit(api, document).json()["id"]
        context.jobs.transition(job_id, JobState.VALIDATING, "test")
        publish(context.redis, redis_keys.prompts(job_id), [b"group"] * count)

    assert 'spo_stream_lag_entries{stream="prompts"} 5.0' in api.get("/metrics").text


def test_trajectories_are_found_by_verdict_and_weights(
    api: httpx.Client, peers: ServiceDoubles, document: Document
) -> None:
    job_id = submit(api, document).json()["id"]
    peers.replay.trajectories = [
        Trajectory(
            trajectory_id=f"traj_{version}",
            source=SOURCE_ONLINE,
            policy_version_first=version,
            policy_version_last=version,
            verdict=Verdict(outcome=OUTCOME_ACCEPTED if version % 2 else OUTCOME_WRONG_ANSWER),
        )
        for version in range(4)
    ]

    def found(**filters: Any) -> list[str]:
        page = api.get(f"/v1/jobs/{job_id}/trajectories", params=filters).json()
        return [entry["trajectory_id"] for entry in page["items"]]

    assert found(verdict="accepted") == ["traj_1", "traj_3"]
    assert found(policy_version=2) == ["traj_2"]
    assert len(found()) == 4
    detail = api.get(f"/v1/jobs/{job_id}/trajectories/traj_3?steps_from=2&steps_limit=3").json()
    assert detail["verdict"]["outcome"] == "accepted"
    assert (detail["steps"], detail["times_sampled"]) == ([2, 3, 4], 7)
    assert detail["segments"] == []
    assert len(api.get(f"/v1/jobs/{job_id}/batches/2").json()["trajectory_ids"]) == 4
    spoken = conversation(7)
    spoken.trajectory_id = "traj_7"
    peers.replay.trajectories.append(spoken)
    segments = api.get(f"/v1/jobs/{job_id}/trajectories/traj_7").json()["segments"]
    assert [(turn["kind"], turn["text"], turn["tokens"], turn["score"], turn["label"]) for turn in segments] == [
        ("action", "try(7)", 2, 0.25, "python"),
        ("observation", "no: wrong", 2, None, ""),
        ("action", "print(7)", 2, None, ""),
    ]


def test_the_contract_describes_the_spec_and_the_legal_transitions(api: httpx.Client) -> None:
    schemas = api.get("/openapi.json").json()["components"]["schemas"]

    assert "beta" in schemas["AlgorithmSpec"]["properties"]
    assert schemas["JobSpec"]["additionalProperties"] is False
    assert schemas["JobState"]["x-legal-transitions"][JobState.PAUSED] == ["cancelling", "failed", "running"]
