"""Redis at maxmemory: what brings new work in is refused, what steers and frees goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.job_records import CANCEL, PAUSE
from services.orchestrator.steps import act_on
from spo import redis_keys
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1 import orchestrator_service_pb2 as wire

RUNNING = (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING)
SPEC = {"model": {"path": "/pi0"}, "tasks": {"kind": "toy"}}
PAYLOAD_BYTES = 100_000


@pytest.fixture
def fill(redis_client: redis.Redis) -> Iterator[Callable[[], object]]:
    """Lowers maxmemory below what is used; lifted afterwards."""

    def refuses() -> bool:
        # What is in use falls by itself for a moment, as buffers are let go of.
        used: Any = redis_client.info("memory")
        redis_client.config_set("maxmemory", int(used["used_memory"] * 0.9))
        try:
            redis_client.set("more", "data")
        except redis.OutOfMemoryError:
            return True
        return False

    yield lambda: wait_until(refuses, "the server is full")
    redis_client.config_set("maxmemory", 0)


def job(context: AppContext, *states: JobState) -> str:
    job_id = context.jobs.submit(parse_job_spec(SPEC))
    for state in states:
        context.jobs.transition(job_id, state, "test")
    return job_id


def beat(replica_id: str, run_id: str = "", version: int = 0) -> wire.HeartbeatRequest:
    return wire.HeartbeatRequest(
        replica_id=replica_id, pool="inference", address="127.0.0.1:1", run_id=run_id, policy_version=version
    )


def test_cancel_pause_leases_and_heartbeats_work_while_redis_is_full(
    context: AppContext, fill: Callable[[], object]
) -> None:
    cancelled, paused, led = (job(context, *RUNNING) for _ in range(3))
    granted = context.leases.wait_for_job("trainer-1", 0)
    fill()

    assert act_on(context.jobs, cancelled, CANCEL) is JobState.CANCELLING
    assert act_on(context.jobs, paused, PAUSE) is JobState.PAUSING
    renewal = wire.RenewLeaseRequest(run_id=granted.run_id, trainer_id="trainer-1", epoch=granted.epoch)
    context.leases.renew(renewal)
    assert context.leases.lease(granted.run_id).live
    line = wire.LogLine(run_id=led, level="info", at_unix_ms=1, line="{}")
    heard = beat("inference-1", led)
    heard.logs.append(line)
    context.replicas.beat(heard)
    assert [replica.replica_id for replica in context.replicas.live()] == ["inference-1"]
    context.runner.tick()
    assert context.assigner.assignments()["inference-1"]
    assert context.jobs.client.zcard(own_keys.job_platform_series(led)) == 1, "samples of the pipeline go on"


def test_what_brings_new_work_in_is_refused_as_a_whole(context: AppContext, fill: Callable[[], object]) -> None:
    before = job(context)
    fill()

    with pytest.raises(redis.OutOfMemoryError):
        context.jobs.submit(parse_job_spec(SPEC))

    assert context.jobs.in_states(list(JobState)) == [before], "nothing of the refused job is left"


def test_a_request_hears_whether_redis_is_full_or_refuses(
    api: httpx.Client, redis_client: redis.Redis, document: dict[str, Any], fill: Callable[[], object]
) -> None:
    fill()
    full = api.post("/v1/jobs", json=document)
    redis_client.config_set("maxmemory", 0)
    redis_client.config_set("min-replicas-to-write", 1)
    try:
        refused = api.post("/v1/jobs", json=document)
    finally:
        redis_client.config_set("min-replicas-to-write", 0)

    assert (full.status_code, full.json()["code"]) == (503, "redis_full")
    assert (refused.status_code, refused.json()["code"]) == (503, "redis_refuses")
    for answer in (full, refused):
        assert "does not answer" not in answer.json()["detail"], "it does, and says what else it wants"
    assert api.post("/v1/jobs", json=document).status_code == 202, "nothing is left of it"


def test_what_is_wrong_with_a_key_is_our_fault_and_no_outage(
    api: httpx.Client, context: AppContext, redis_client: redis.Redis
) -> None:
    damaged = job(context)
    redis_client.delete(redis_keys.run_spec(damaged))
    redis_client.hset(redis_keys.run_spec(damaged), "not", "a spec")

    answer = api.get(f"/v1/jobs/{damaged}")

    assert (answer.status_code, answer.json()["code"]) == (500, "keys_damaged")
    assert "WRONGTYPE" not in answer.text, "its own words are for the log"
    assert redis_keys.run_spec(damaged) in answer.json()["detail"]


def test_what_is_wrong_with_a_key_of_all_jobs_is_said_of_no_job(
    api: httpx.Client, redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    redis_client.delete(redis_keys.replicas())
    redis_client.set(redis_keys.replicas(), "by a hand that meant another key")

    answer = api.get("/v1/replicas")

    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert f"'{redis_keys.replicas()}'" in capsys.readouterr().out, "the log names the key"


def test_deleting_a_job_frees_its_memory_while_redis_is_full(
    context: AppContext, redis_client: redis.Redis, fill: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = job(context, *RUNNING, JobState.SUCCEEDED)
    for number in range(100):
        redis_client.zadd(redis_keys.replay_ids(ended), {f"traj_{number}": number + 1})
        redis_client.set(redis_keys.replay_trajectory(ended, f"traj_{number}"), b"x" * PAYLOAD_BYTES)
    held: Any = redis_client.info("memory")
    fill()

    def unreachable(run_id: str) -> None:
        raise OSError("the store of weights is away")

    context.deletion.delete(ended)
    assert ended not in context.jobs.in_states(list(JobState))
    with monkeypatch.context() as patched:
        patched.setattr(context.weight_store, "remove_run", unreachable)
        context.deletion.sweep()
        assert "away" in context.deletion.failing()[ended]

    now: Any = redis_client.info("memory")
    assert int(held["used_memory"]) - int(now["used_memory"]) > 90 * PAYLOAD_BYTES, "memory comes before files"
    context.deletion.retry_now()
    context.deletion.sweep()
    assert redis_client.scard(own_keys.deleted_jobs()) == 0
    assert context.deletion.failing() == {}
