"""A job that follows another, through the REST API and the real replay buffer; what cannot be followed is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.orchestrator.container import AppContext
from services.orchestrator.job_records import CANCEL
from services.orchestrator.steps import act_on
from services.replay_buffer.ingest import ReferenceScores, SharedRolloutIngest
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.store import ReplayStore, StorageMonitor
from spo import redis_keys
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.testing.runs import trajectory
from spo.v1.replay_service_pb2_grpc import add_ReplayServiceServicer_to_server

Document = dict[str, Any]
SHARED = {"mix": [{"source": "shared", "share": 1.0}]}


@pytest.fixture
def buffer(redis_client: redis.Redis) -> Iterator[tuple[ReplayStore, str]]:
    """A real replay buffer and its address."""
    store = ReplayStore(redis_client)
    server = RpcServer("127.0.0.1", 0)
    add_ReplayServiceServicer_to_server(ReplayService(BatchSampler(store)), server.server)
    server.start()
    server.set_serving(True)
    yield store, server.address
    server.stop(1)


def follower_of(document: Document, followed: str, **sections: Any) -> Document:
    return {**document, "rollout": {"follow": followed}, "replay": SHARED, **sections}


def to_running(context: AppContext, job_id: str) -> None:
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")


def listed(api: httpx.Client, job_id: str) -> list[Document]:
    return list(api.get(f"/v1/jobs/{job_id}/trajectories", params={"source": "shared"}).json()["items"])


def test_a_follower_lists_the_rollouts_of_the_job_it_follows_as_shared(
    open_context: Callable[..., AppContext],
    serve: Callable[[AppContext], str],
    buffer: tuple[ReplayStore, str],
    document: Document,
) -> None:
    store, address = buffer
    context = open_context(replay_buffer_address=address)
    with httpx.Client(base_url=serve(context), timeout=30, trust_env=False) as api:
        followed = api.post("/v1/jobs", json=document).json()["id"]
        submitted = api.post("/v1/jobs", json=follower_of(document, followed))
        assert submitted.status_code == 202, submitted.text
        follower = submitted.json()["id"]
        for job_id in (followed, follower):
            to_running(context, job_id)
        store.append(followed, [trajectory(number, run_id=followed) for number in range(12)])
        following = SharedRolloutIngest(
            BatchSampler(store), ReferenceScores.at("127.0.0.1:1", 1.0), StorageMonitor(store.client, 0.9)
        )
        stop = threading.Event()
        worker = threading.Thread(target=following.run, args=(stop,))
        worker.start()
        try:
            wait_until(lambda: len(listed(api, follower)) == 12, "all rollouts came")
        finally:
            stop.set()
            worker.join(10)
        page = listed(api, follower)
        waits = api.get(f"/v1/jobs/{follower}").json()["waits"]

    assert {each["source"] for each in page} == {"shared"}
    assert sorted(each["response_text"] for each in page) == sorted(f"print({number})" for number in range(12))
    assert f"its shared rollouts come from {followed}, which is running" in waits


def refusals(api: httpx.Client, document: Document) -> dict[str, str]:
    answer = api.post("/v1/jobs", json=document)
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] == "cannot_follow"
    return {each["pointer"]: each["message"] for each in answer.json()["errors"]}


def test_what_cannot_share_rollouts_is_refused_by_field(
    api: httpx.Client, context: AppContext, document: Document, tmp_path: Path
) -> None:
    followed = api.post("/v1/jobs", json=document).json()["id"]
    other = tmp_path / "other"
    other.mkdir()
    for file in Path(document["model"]["path"]).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 100_000}))
    model = {"path": str(other), "dtype": "bfloat16", "max_response_tokens": 8, "stop": ["\n"]}
    tasks = {**document["tasks"], "seed": 1, "reward": {"scale": 2.0, "shift": -2.0}}

    found = refusals(api, follower_of(document, followed, model=model, tasks=tasks))

    assert set(found) == {
        "/model/path", "/model/dtype", "/model/stop", "/model/max_response_tokens", "/tasks/seed", "/tasks/reward",
    }  # fmt: skip
    assert found["/tasks/seed"] == f"differs from that of {followed}"


def test_tempered_rollouts_are_not_shared_where_a_loss_weighs_by_their_log_probs(
    api: httpx.Client, document: Document
) -> None:
    followed = api.post("/v1/jobs", json=document | {"rollout": {"temperature": [0.1, 0.8]}}).json()["id"]
    losses = [{"objective": "terminal_squared"}, {"objective": "policy_gradient"}]

    found = refusals(api, follower_of(document, followed, algorithm={"losses": losses}))

    assert set(found) == {"/algorithm/losses/1/objective"}


def test_absent_ended_silent_and_other_tenants_jobs_are_not_followed(
    api: httpx.Client, context: AppContext, document: Document
) -> None:
    assert refusals(api, follower_of(document, "job_NONE")) == {"/rollout/follow": "there is no job job_NONE"}

    theirs = context.jobs.submit(parse_job_spec(document), tenant="someone")
    assert refusals(api, follower_of(document, theirs)) == {"/rollout/follow": f"there is no job {theirs}"}

    offline = {**document, "replay": {"mix": [{"source": "human", "share": 1.0}]}}
    silent = context.jobs.submit(parse_job_spec(offline))
    assert "samples no rollouts" in refusals(api, follower_of(document, silent))["/rollout/follow"]

    ended = context.jobs.submit(parse_job_spec(document))
    act_on(context.jobs, ended, CANCEL)
    assert "is cancelled" in refusals(api, follower_of(document, ended))["/rollout/follow"]
    assert context.redis.get(redis_keys.run_state(ended)) == b"cancelled"


@pytest.mark.parametrize(
    ("sections", "pointer"),
    [
        ({"rollout": {"follow": "job_A"}}, "/rollout/follow"),
        ({"replay": SHARED}, "/replay/mix"),
        ({"rollout": {"follow": "a:b"}, "replay": SHARED}, "/rollout/follow"),
        (
            {
                "rollout": {"follow": "job_A"},
                "replay": SHARED,
                "algorithm": {"losses": [{"objective": "grpo"}]},
            },
            "/algorithm/losses/0/sources",
        ),
    ],
)
def test_a_spec_that_follows_without_reading_or_reads_without_following_is_refused(
    api: httpx.Client, document: Document, sections: Document, pointer: str
) -> None:
    answer = api.post("/v1/jobs?validate_only=true", json={**document, **sections})

    assert answer.status_code == 422
    assert pointer in [each["pointer"] for each in answer.json()["errors"]]
