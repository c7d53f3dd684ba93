"""What a job says while a part outside the platform takes connections and answers nothing: a reward."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import redis

from services.orchestrator.container import AppContext
from services.orchestrator.http.jobs import job_document
from services.verifier.scorers import scorers_of
from services.verifier.settings import Settings as VerifierSettings
from services.verifier.stage import VerifierScheduler, VerifierWorker
from spo import redis_keys
from spo.messaging.streams.entries import counted_append_words
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1 import verdict_pb2 as wire
from spo.v1.prompt_pb2 import Prompt, PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from tests.integration.orchestrator.lifecycle.test_waits_have_names import POOLS, beat, job_in

TOLD_SECONDS = 90.0


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
