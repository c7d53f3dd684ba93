"""What a job says while a part takes connections and answers nothing: a reward, a bucket, Redis, a service."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import pytest
import redis

from services.orchestrator.container import AppContext
from services.orchestrator.http.jobs import job_document
from services.orchestrator.jobs import SEGMENT
from services.replay_buffer.archive import ExperienceArchiver
from services.replay_buffer.store import ReplayStore
from services.verifier.scorers import scorers_of
from services.verifier.settings import Settings as VerifierSettings
from services.verifier.stage import VerifierScheduler, VerifierWorker
from spo import redis_keys
from spo.experience import store as store_module
from spo.experience.store import ExperienceStore
from spo.messaging.streams import recovery
from spo.messaging.streams.entries import counted_append_words
from spo.service import state
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.testing.runs import trajectory
from spo.v1 import verdict_pb2 as wire
from spo.v1.prompt_pb2 import Prompt, PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from tests.integration.orchestrator.lifecycle.test_waits_have_names import POOLS, beat, job_in, refused
from tests.integration.orchestrator.recovery.test_state_in_bucket import add_events
from tests.support.s3_server import S3Server

TOLD_SECONDS = 90.0
Open = Callable[..., AppContext]


def told(context: AppContext, job_id: str, words: str) -> Callable[[], list[str]]:
    return lambda: [wait for wait in job_document(context, job_id).waits if words in wait]


def assert_named_after_a_minute(context: AppContext, job_id: str, words: str) -> None:
    """It is told now, and after a minute with since when, what is tried, and what ends it."""
    now = [1_700_000_000.0]
    context.monitor.clock = lambda: now[0]
    wait_until(told(context, job_id, words), f"the job says that {words}", TOLD_SECONDS)
    now[0] += 61
    (named,) = told(context, job_id, words)()
    assert " (since " in named
    assert "; tried: " in named
    assert "; ends when: " in named


def test_a_reward_that_takes_the_call_and_never_answers_is_named(
    context: AppContext, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    job_id = job_in(context, document, JobState.RUNNING)
    beat(context, *POOLS, "verifier", job_id=job_id)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        settings = VerifierSettings(
            verifier_http_hosts=[host], http_networks=["127.0.0.0/8"], attempts=2, reclaim_seconds=0.4
        )
        scheduler = VerifierScheduler(redis_client, settings, scorers_of(settings))
        digest = scheduler.test_sets.upload(
            wire.TestSet(http=wire.HttpScore(url=f"http://{host}/score", timeout_seconds=0.3))
        )
        group = RolloutGroup(
            request=PromptGroup(
                run_id=job_id,
                group_id="g",
                prompt=Prompt(prompt_id="p", tests_digest=digest, verifier_pool="verifier"),
            ),
            trajectories=[Trajectory(trajectory_id="t", run_id=job_id, response_text="42")],
        )
        # As the engine hands a group on, so that its run is known.
        for words in counted_append_words(redis_keys.verifier_rollouts(), group.SerializeToString(), job_id):
            redis_client.execute_command(*words)  # type: ignore[no-untyped-call]
        stop = threading.Event()
        thread = threading.Thread(target=VerifierWorker(redis_client, scheduler, "v-0", settings), args=(stop,))
        thread.start()
        try:
            assert_named_after_a_minute(context, job_id, "did not answer within 0.3 s")
            assert context.jobs.state(job_id) is JobState.RUNNING
            assert redis_client.xlen(redis_keys.verifier_rollouts()) == 1, "the group is kept"
        finally:
            stop.set()
            thread.join(20)
            scheduler.close(1.0)


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A server whose sockets take connections while its process does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_bucket_that_stands_still_is_what_the_older_events_of_a_job_wait_for(
    open_context: Open,
    s3_server: S3Server,
    bucket_url: str,
    redis_client: redis.Redis,
    document: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "REQUEST_SECONDS", 2)
    context = open_context(state_store_url=f"{bucket_url}/state")
    job_id = job_in(context, document, JobState.RUNNING)
    beat(context, *POOLS, job_id=job_id)
    add_events(redis_client, job_id, 2 * SEGMENT)

    with standing_still(s3_server.pid):
        context.runner.tick(TOLD_SECONDS)
        assert_named_after_a_minute(context, job_id, "older events cannot be written to files")
    events = context.jobs.events(job_id, limit=10_000)

    def moved() -> bool:
        context.runner.tick(TOLD_SECONDS)
        return context.jobs.record(job_id).events_in_files >= SEGMENT

    wait_until(moved, "the events are in the bucket when it answers again", TOLD_SECONDS)
    assert context.jobs.events(job_id, limit=len(events)) == events
    assert told(context, job_id, "older events")() == []


def test_a_bucket_that_stands_still_is_what_the_experience_of_a_job_waits_for_long_before_it_is_given_up(
    context: AppContext,
    s3_server: S3Server,
    bucket_url: str,
    redis_client: redis.Redis,
    document: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store's client gives a request up after a minute, and tries it again."""
    monkeypatch.setattr(recovery, "LASTS_TELL_SECONDS", 0.5)
    monkeypatch.setattr(store_module, "REQUEST_SECONDS", 4.0)
    first, second = (job_in(context, document | {"name": name}, JobState.RUNNING) for name in ("first", "second"))
    beat(context, *POOLS, job_id=first)
    buffer, store = ReplayStore(redis_client), ExperienceStore(f"{bucket_url}/experience")
    for job_id in (first, second):
        buffer.append(job_id, [trajectory(number, run_id=job_id) for number in range(20)])
    archiver = ExperienceArchiver(buffer, store, 16, every_seconds=0)
    stop = threading.Event()
    thread = threading.Thread(target=archiver.run, args=(stop,))

    with standing_still(s3_server.pid):
        thread.start()
        assert_named_after_a_minute(context, first, f"experience: is not stored yet: {store.url} has taken")
        assert told(context, second, "experience: is not stored yet")(), "it is the next"
    stop.set()
    thread.join(TOLD_SECONDS)
    while archiver.archive(first) or archiver.archive(second):
        pass
    rows = [row.trajectory for file in store.files() for batch in store.batches(file) for row in batch]
    assert len(rows) == len({(row.run_id, row.trajectory_id) for row in rows}) == 40


def test_redis_that_stands_still_is_what_requests_and_then_the_job_name(
    context: AppContext, api: httpx.Client, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    now = [1_700_000_000.0]
    context.monitor.clock = lambda: now[0]
    job_id = job_in(context, document, JobState.RUNNING)
    beat(context, *POOLS, job_id=job_id)
    told_of: Any = redis_client.info("server")
    pool = cast(Any, context.redis).connection_pool
    pool.connection_kwargs["socket_timeout"] = 0.5
    pool.disconnect()
    with standing_still(told_of["process_id"]):
        assert refused(context)
        answer = api.get(f"/v1/jobs/{job_id}")
    assert (answer.status_code, answer.json()["code"]) == (503, "redis_unreachable")
    pool.connection_kwargs["socket_timeout"] = 30
    pool.disconnect()
    assert job_document(context, job_id).waits[0].startswith("Redis did not answer")
    now[0] += 61
    assert (
        " (since 22:13:20 UTC; tried: it is asked again every second; ends when: Redis"
        in (job_document(context, job_id).waits[0])
    )
    assert not refused(context)
    assert not any("Redis did" in wait for wait in job_document(context, job_id).waits)


@pytest.mark.parametrize("pool", [*POOLS, "verifier", "trainer"])
def test_a_service_that_is_silent_is_named_whether_it_is_down_or_stands_still(
    open_context: Open, document: dict[str, Any], pool: str
) -> None:
    """It beats no more; a trainer renews no lease."""
    context = open_context(replica_silence_seconds=1, lease_seconds=1)
    context.monitor.clock = lambda: 1_700_000_000.0
    verifier = {"kind": "http", "url": "http://rewards.example/score"} if pool == "verifier" else None
    tasks = document["tasks"] | ({"verifier": verifier} if verifier else {})
    job_id = job_in(context, document | {"tasks": tasks}, JobState.RUNNING)
    beat(context, *POOLS, "verifier", job_id=job_id)
    assert context.leases.wait_for_job("trainer-1", 0, wanted=lambda: True).run_id == job_id
    words = "waits for a trainer to lease it" if pool == "trainer" else f"no live replica of {pool}"
    assert told(context, job_id, words)() == []

    def silent() -> list[str]:
        beat(context, *({*POOLS, "verifier"} - {pool}), job_id=job_id)
        context.replicas.drop_silent()
        return told(context, job_id, words)()

    wait_until(silent, "the job names it", 20, 0.2)
    assert_named_after_a_minute(context, job_id, words)


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.ESTIMATING, JobState.RUNNING])
def test_a_redis_that_became_unfit_is_the_first_of_every_jobs_waits_until_it_is_mended(
    context: AppContext, document: dict[str, Any], state: JobState
) -> None:
    problem = ["Redis is not fit for the platform: it does not answer INFO"]
    context.monitor.unfit = lambda: problem[0]
    job_id = job_in(context, document, state)
    beat(context, *POOLS, job_id=job_id)
    assert_named_after_a_minute(context, job_id, problem[0])
    assert job_document(context, job_id).waits[0].startswith(problem[0])
    problem[0] = ""
    assert told(context, job_id, "not fit")() == []
