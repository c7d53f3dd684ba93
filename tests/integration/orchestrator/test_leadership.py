"""One orchestrator leads: a second one waits, takes over soon, and nothing that the first wakes up with is written."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import Leadership, NotLeading
from services.orchestrator.container import AppContext
from services.orchestrator.forks import ForkOptions
from services.orchestrator.settings import Settings
from services.orchestrator.steps import ask_to_resume
from services.orchestrator.values import write_prompts
from services.orchestrator.versions import announce_version, publish_version
from spo import redis_keys
from spo.manifest_folder import seal_folder, staging_folder
from spo.rpc.client import RpcClient
from spo.spec.job_spec import EvaluationSpec, JobSpec, TasksSpec, parse_job_spec
from spo.spec.section import JobState
from spo.tasks.load import load_tasks
from spo.testing.peers import ServiceDoubles, wait_until
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.value_pb2 import PromptValue
from tests.support.orchestrator_process import START_SECONDS, OrchestratorProcess

TAKEOVER_SECONDS = 15


def expire(client: redis.Redis) -> None:
    """As if the leader had been silent for its whole lease."""
    client.hset(own_keys.leader(), "expires_unix_ms", 1)


def test_one_leads_and_the_next_one_does_once_the_lease_is_over(redis_client: redis.Redis) -> None:
    first, second = Leadership(redis_client, "one", "a:1"), Leadership(redis_client, "two", "b:2")

    assert first.take()
    assert not second.take()
    with pytest.raises(NotLeading, match="one at a:1 leads"):
        second.require()
    assert first.take()
    assert first.fence.epoch == 1

    expire(redis_client)
    assert second.take()
    assert second.fence.epoch == 2
    assert first.leads, "it has not asked since"
    with pytest.raises(NotLeading) as lost:
        first.take()
    assert lost.value.code == "lead_lost"
    assert not first.leads


def test_a_lead_that_is_given_back_is_free_at_once(redis_client: redis.Redis) -> None:
    first, second = Leadership(redis_client, "one"), Leadership(redis_client, "two")
    assert first.take()

    first.release()

    assert second.take()
    second.release()
    first.release()
    assert redis_client.hget(own_keys.leader(), "epoch") == b"2"


def test_a_redis_that_lost_everything_gets_its_leader_back(redis_client: redis.Redis) -> None:
    leader = Leadership(redis_client, "one")
    assert leader.take()
    redis_client.flushall()

    with pytest.raises(NotLeading):
        leader.fence.write(redis_client, [("SET", "a", "b")])
    assert leader.take()
    leader.fence.write(redis_client, [("SET", "a", "b")])

    assert leader.fence.epoch == 2


def test_an_hour_back_on_the_clock_of_redis_keeps_a_dead_leader_no_longer_than_its_lease(
    redis_client: redis.Redis,
) -> None:
    first, second = (Leadership(redis_client, name, lease_seconds=0.5) for name in ("one", "two"))
    assert first.take()
    redis_client.hset(own_keys.leader(), "expires_unix_ms", int(time.time() * 1000) + 3_600_000)

    assert not second.take()
    wait_until(second.take, "the second leads", 5)


def test_a_process_that_was_stopped_for_longer_than_its_lease_answers_nobody_before_it_has_asked(
    redis_client: redis.Redis,
) -> None:
    leader = Leadership(redis_client, "one", lease_seconds=0.3)
    assert leader.take()

    wait_until(lambda: not leader.leads, "the lease is over", 5)

    with pytest.raises(NotLeading):
        leader.require()
    assert leader.take(), "nobody else came"
    leader.require()


@pytest.fixture
def old_leader(
    redis_server: str, redis_client: redis.Redis, peers: ServiceDoubles, tmp_path: Path
) -> Iterator[AppContext]:
    """A leader with a running job and an upload, on the point of writing when another takes over."""
    leadership = Leadership(redis_client, "the old one", lease_seconds=3600)
    assert leadership.take()
    addresses = {
        f"{name}_address": peers.address for name in ("inference", "sandbox_judge", "verifier", "replay_buffer")
    }
    settings = Settings(redis_url=redis_server, http_port=0, state_path=tmp_path / "state", **addresses)
    context = AppContext(settings, redis_client, threading.Event(), leadership)
    yield context
    context.close()


def running_job(context: AppContext, document: dict[str, Any]) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(job_id, state, "test")
    return job_id


def publish_first_version(context: AppContext, job_id: str) -> None:
    """Version 1 of a running job, as its trainer would publish it."""
    grant = context.leases.wait_for_job("trainer", 1)
    folder = context.settings.state_path / "weights" / job_id / "00000001"
    with staging_folder(folder) as writing:
        save_file({"w": np.zeros(4, np.float32)}, writing / "model-00001.safetensors")
        head: dict[str, Any] = {"version": 1, "parent": 0, "step": 10, "dtype": "float32", "epoch": 1}
        digest = seal_folder(writing, folder, head).manifest_digest
    owner: dict[str, Any] = {"run_id": job_id, "trainer_id": "trainer", "epoch": grant.epoch}
    publish_version(
        context.jobs, wire.PublishWeightsRequest(**owner, version=1, step=10, uri=str(folder), manifest_digest=digest)
    )


def everything(client: redis.Redis) -> dict[bytes, object]:
    """All of Redis, but for the election."""
    return {key: client.dump(key) for key in client.keys("*") if key != own_keys.leader().encode()}


TRAIN = load_tasks(TasksSpec(kind="toy", train_problems=2, evaluation_problems=0)).train
Writer = Callable[[AppContext, str], object]
WRITERS: dict[str, Writer] = {
    "transition": lambda old, job: old.jobs.transition(job, JobState.PAUSING, "late"),
    "event": lambda old, job: old.jobs.append(job, "stalled", {}),
    "submission": lambda old, job: old.jobs.submit(old.jobs.spec(job)),
    "lease": lambda old, job: old.leases.wait_for_job("trainer", 0),
    "announcement": lambda old, job: announce_version(old.jobs, job, 0, "pushed"),
    "prompts": lambda old, job: old.dispatcher._publish(job, old.jobs.spec(job), 1),
    "heartbeat": lambda old, job: old.replicas.beat(wire.HeartbeatRequest(replica_id="judge-1", pool="sandbox-judge")),
    "late heartbeats": lambda old, job: old.replicas._write({"judge-1": b""}),
    "assignment": lambda old, job: old.assigner._write({}, {"inference-1": job}),
    "sample": lambda old, job: old.monitor._sample(job),
    "evaluation": lambda old, job: old.evaluations.request(job, 0, None, EvaluationSpec()),
    "dataset": lambda old, job: old.datasets.create("tasks", "jsonl", "jsonl", 10, ""),
    "resume": lambda old, job: ask_to_resume(old.jobs, job, "api"),
    "fork under way": lambda old, job: old.jobs.write(("SADD", own_keys.forks_under_way(), "job_x")),
    "adopted forks": lambda old, job: old.deletion._adopt(),
    "sweep": lambda old, job: old.deletion.sweep(),
    "prompts of the job": lambda old, job: write_prompts(old.jobs, job, TRAIN, old.jobs.spec(job)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_an_old_leader_that_wakes_up_writes_nothing(
    writer: str, old_leader: AppContext, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    job_id = running_job(old_leader, document)
    redis_client.sadd(own_keys.deleted_jobs(), "job_deleted")
    redis_client.sadd(own_keys.forks_under_way(), "job_fork")
    expire(redis_client)
    assert Leadership(redis_client, "the new one").take()
    value = PromptValue(samples=8, successes=1).SerializeToString()
    problems = old_leader.library.load(old_leader.jobs.spec(job_id).tasks).train
    redis_client.hset(redis_keys.run_values(job_id), mapping={problem.problem_id: value for problem in problems})
    before = everything(redis_client)

    with pytest.raises(NotLeading):
        WRITERS[writer](old_leader, job_id)

    assert everything(redis_client) == before


def test_a_fork_during_which_the_lead_was_lost_is_no_job_and_leaves_no_folder(
    old_leader: AppContext, redis_client: redis.Redis, document: dict[str, Any], tmp_path: Path
) -> None:
    """The next leader sweeps what is under way; what the old one made after that must not stay."""
    parent = running_job(old_leader, document)
    publish_first_version(old_leader, parent)
    new = Leadership(redis_client, "the new one")
    made: list[str] = []

    def lose_the_lead(spec: JobSpec) -> None:
        expire(redis_client)
        assert new.take()
        (under_way,) = redis_client.smembers(own_keys.forks_under_way())
        redis_client.smove(own_keys.forks_under_way(), own_keys.deleted_jobs(), under_way)
        made.append(under_way.decode())

    options = ForkOptions(version=1, checkpoint_step=None, as_reference=False, overrides={})
    with pytest.raises(NotLeading):
        old_leader.forks.fork(parent, options, lose_the_lead, None, "api", "")

    assert made
    assert old_leader.jobs.in_states(list(JobState)) == [parent]
    assert not [path for path in (tmp_path / "state").rglob("*") if made[0] in str(path)]


# --- two processes ---


@pytest.fixture
def two(
    redis_server: str, redis_client: redis.Redis, peers: ServiceDoubles, tmp_path: Path
) -> Iterator[tuple[OrchestratorProcess, OrchestratorProcess]]:
    """A leader, and a standby that waits."""
    first, second = (OrchestratorProcess(redis_server, peers, tmp_path, name) for name in ("first", "second"))
    with ExitStack() as ended:
        for process in (first, second):
            ended.callback(process.kill)
        first.start()
        second.launch()
        wait_until(lambda: second.readiness().status_code == 503, "the second is standby", START_SECONDS)
        yield first, second


def takeover_seconds(standby: OrchestratorProcess) -> float:
    began = time.monotonic()
    wait_until(lambda: standby.readiness().is_success, "the standby leads", 2 * TAKEOVER_SECONDS)
    return time.monotonic() - began


def elsewhere(client: redis.Redis) -> None:
    """As if the leader ran on another machine, where nobody here can see that it is dead."""
    client.hset(own_keys.leader(), "identity", "another-boot:pid:[1]/7/7")


@pytest.mark.slow
def test_a_standby_says_who_leads_and_takes_over_from_one_that_is_killed(
    two: tuple[OrchestratorProcess, OrchestratorProcess], redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    first, second = two
    accepted = httpx.post(f"{first.url}/v1/jobs", json=document, trust_env=False, timeout=30).json()
    wait_until(lambda: redis_client.xlen(redis_keys.estimates()) == 6, "the prompts are asked for")
    refused = httpx.get(f"{second.url}/v1/jobs", trust_env=False, timeout=10)
    assert refused.status_code == 503
    assert refused.json()["code"] == "not_leading"
    assert f"127.0.0.1:{first.grpc_port}" in refused.json()["detail"]
    assert httpx.get(f"{second.url}/healthz", trust_env=False, timeout=10).is_success
    client = RpcClient("orchestrator", f"127.0.0.1:{second.grpc_port}", OrchestratorServiceStub)
    with pytest.raises(Exception, match="leads") as waits:
        client.call("Heartbeat", wire.HeartbeatRequest(replica_id="a", pool="trainer"), deadline_seconds=5)
    assert getattr(waits.value, "retryable", False)
    client.close()

    elsewhere(redis_client)
    first.end(signal.SIGKILL)
    seconds = takeover_seconds(second)

    assert seconds < TAKEOVER_SECONDS
    events = httpx.get(f"{second.url}/v1/jobs/{accepted['id']}/events", trust_env=False, timeout=10).json()["items"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert redis_client.xlen(redis_keys.estimates()) == 6


@pytest.mark.slow
def test_a_stopped_leader_that_wakes_up_ends_and_its_next_life_is_standby(
    two: tuple[OrchestratorProcess, OrchestratorProcess], redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    first, second = two
    assert first.process is not None
    first.process.send_signal(signal.SIGSTOP)
    seconds = takeover_seconds(second)
    accepted = httpx.post(f"{second.url}/v1/jobs", json=document, trust_env=False, timeout=30).json()
    first.process.send_signal(signal.SIGCONT)

    assert first.process.wait(60) != 0
    assert seconds < TAKEOVER_SECONDS
    assert "lead_lost" in first.log.read_text() or "is lost" in first.log.read_text()
    assert redis_client.hget(own_keys.leader(), "epoch") == b"2"
    assert second.readiness().is_success
    first.launch()
    wait_until(lambda: first.readiness().status_code == 503, "the first is standby now", START_SECONDS)
    assert httpx.get(f"{second.url}/v1/jobs/{accepted['id']}", trust_env=False, timeout=10).is_success
