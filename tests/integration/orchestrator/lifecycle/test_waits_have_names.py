"""No wait without a name: each state of a job is held still, and says what for, since when, and what ends it."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from services.orchestrator import evaluation, scoring
from services.orchestrator.container import AppContext
from services.orchestrator.http.jobs import job_document
from spo.errors import NotReady, storage_error
from spo.messaging.streams.recovery import TroubleNotes
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles, wait_until
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.prompt_pb2 import PromptGroup

OVER_QUOTA = str(storage_error(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/weights/1"), "/weights"))
POOLS = ("inference", "sandbox-judge", "replay-buffer", "value-estimation")
Document = dict[str, Any]


def job_in(context: AppContext, document: Document, state: JobState) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    for each in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        if state is JobState.QUEUED:
            break
        context.jobs.transition(job_id, each, "test")
        if each is state:
            break
    return job_id


def beat(context: AppContext, *pools: str, job_id: str = "", problem: str = "") -> None:
    for pool in pools:
        beaten = HeartbeatRequest(replica_id=f"{pool}-1", pool=pool, run_id=job_id, problem=problem)
        context.replicas.beat(beaten)


def judge_away(context: AppContext, job_id: str) -> None:
    beat(context, "inference", "value-estimation", job_id=job_id)


def values_away(context: AppContext, job_id: str) -> None:
    beat(context, "inference", "sandbox-judge", job_id=job_id)


def trouble(place: str, reason: str) -> Callable[[AppContext, str], None]:
    def note(context: AppContext, job_id: str) -> None:
        beat(context, *POOLS, job_id=job_id)
        TroubleNotes(context.redis).note(job_id, place, reason)

    return note


def trainer_says(problem: str) -> Callable[[AppContext, str], None]:
    def say(context: AppContext, job_id: str) -> None:
        beat(context, *POOLS, job_id=job_id)
        beat(context, "trainer", job_id=job_id, problem=problem)

    return say


def nothing(context: AppContext, job_id: str) -> None:
    beat(context, *POOLS, job_id=job_id)


@pytest.mark.parametrize(
    ("state", "hold", "words"),
    [
        pytest.param(JobState.QUEUED, nothing, "waits for a slot", id="the queue"),
        pytest.param(JobState.VALIDATING, nothing, "model, tasks and tests to be checked", id="its check"),
        pytest.param(JobState.ESTIMATING, judge_away, "no live replica of sandbox-judge", id="the judge is away"),
        pytest.param(JobState.ESTIMATING, values_away, "no live replica of value-estimation", id="values are away"),
        pytest.param(JobState.ESTIMATING, nothing, "for the values of its prompts", id="values do not come"),
        pytest.param(JobState.RUNNING, nothing, "waits for a trainer to lease it", id="no trainer"),
        pytest.param(
            JobState.RUNNING,
            trouble("verifier_rollouts", "http://rewards.example does not answer"),
            "verifier_rollouts: http://rewards.example does not answer",
            id="the verifier",
        ),
        pytest.param(
            JobState.RUNNING, trouble("replay", "Redis is full and refuses writes"), "Redis is full", id="Redis is full"
        ),
        pytest.param(
            JobState.RUNNING, trainer_says("to publish weights (step 4) has taken 75 s so far"), "publish", id="publish"
        ),
        pytest.param(
            JobState.RUNNING, trainer_says("to write a checkpoint (step 4) has taken 75 s so far"), "step 4", id="save"
        ),
        pytest.param(JobState.RUNNING, trainer_says("no space left on device"), "no space left", id="the disk"),
        pytest.param(JobState.RUNNING, trainer_says(OVER_QUOTA), "EDQUOT", id="the quota of its disk"),
        pytest.param(JobState.PAUSING, nothing, "its trainer to write a checkpoint", id="the last checkpoint"),
        pytest.param(JobState.CANCELLING, nothing, "its trainer to let go", id="the end"),
    ],
)
def test_a_job_that_stands_still_says_for_what_since_when_and_what_ends_it(
    context: AppContext,
    document: Document,
    state: JobState,
    hold: Callable[[AppContext, str], None],
    words: str,
) -> None:
    now = [1_700_000_000.0]
    context.monitor.clock = lambda: now[0]
    is_ending = state in (JobState.PAUSING, JobState.CANCELLING)
    job_id = job_in(context, document, JobState.RUNNING if is_ending else state)
    if is_ending:
        context.jobs.transition(job_id, state, "test")
    hold(context, job_id)
    assert not any("since" in wait for wait in job_document(context, job_id).waits), "it may go on at any moment"

    now[0] += 61
    told = [wait for wait in job_document(context, job_id).waits if words in wait]

    assert told, job_document(context, job_id).waits
    assert re.search(r"\(since 22:13:20 UTC; tried: .+; ends when: .+\)$", told[0]), told


def refused(context: AppContext) -> bool:
    """Whether Redis refuses a round over the jobs."""
    try:
        context.runner.tick()
    except redis.RedisError:
        return True
    return False


@pytest.mark.parametrize(
    "state",
    [JobState.QUEUED, JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING, JobState.PAUSING],
)
def test_while_redis_takes_no_writes_each_jobs_first_wait_is_that(
    context: AppContext,
    redis_client: redis.Redis,
    document: Document,
    state: JobState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A process of its own, that begins slowly; this is about what comes after it.
    monkeypatch.setattr(context.runner.preparation.model_check, "of_all_prompts", lambda *asked: {})
    now = [1_700_000_000.0]
    context.monitor.clock = lambda: now[0]
    job_id = job_in(context, document, JobState.RUNNING if state is JobState.PAUSING else state)
    if state is JobState.PAUSING:
        context.jobs.transition(job_id, state, "test")
    redis_client.config_set("min-replicas-to-write", 1)
    try:
        wait_until(lambda: refused(context), "a step of the job writes", 60)
        first = job_document(context, job_id).waits[0]
        now[0] += 61
        later = job_document(context, job_id).waits[0]
        assert refused(context), "what only reads does not call it over"
        assert context.jobs.state(job_id) is state
    finally:
        redis_client.config_set("min-replicas-to-write", 0)

    assert first.startswith("Redis takes no such command now")
    assert "NOREPLICAS" in first
    assert later.startswith(f"{first} (since 22:13:20 UTC; tried: it is asked again every second; ends when: Redis")
    assert not refused(context)
    assert not any("NOREPLICAS" in wait for wait in job_document(context, job_id).waits), "it is over"


def test_an_evaluation_that_nobody_answers_says_so(
    context: AppContext, peers: ServiceDoubles, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "RETRY_SECONDS", 0.05)

    def respond(group: PromptGroup, index: int) -> str:
        raise NotReady("the model still loads")

    peers.inference.respond = respond
    now = [1_700_000_000.0]
    context.monitor.clock = lambda: now[0]
    job_id = job_in(context, document, JobState.RUNNING)
    beat(context, *POOLS, job_id=job_id)
    thread = threading.Thread(target=context.evaluations.run, args=(context.stop,))
    thread.start()

    def told() -> list[str]:
        return [wait for wait in job_document(context, job_id).waits if "an evaluation (evaluation-0)" in wait]

    (first,) = wait_until(told, "the evaluation says why it waits")
    assert first == "an evaluation (evaluation-0) is under way, 0 of 3 problems done: the model still loads"
    now[0] += 61
    (named,) = told()
    assert named.startswith(f"{first} (since 22:13:20 UTC; tried: what is missing is asked for again")
    assert "ends when: inference and judge answer" in named
    context.stop.set()
    thread.join(20)


def test_a_trained_job_whose_evaluation_is_slow_shows_how_far_it_is(
    context: AppContext, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "SILENT_SECONDS", 1e9)
    job_id = job_in(context, document, JobState.RUNNING)
    progress = context.evaluations.scorer.under_way[job_id, "evaluation-20"] = scoring.ScoringProgress(total=3)
    progress.scores[0] = scoring.Undecided("p", "c", "r")
    assert context.evaluations.standing(job_id) == [], "a job that trains waits for none"

    context.redis.hset(f"spo:{job_id}:orchestrator:job", "trained_steps", 20)

    assert context.evaluations.standing(job_id) == ["an evaluation (evaluation-20) is under way, 1 of 3 problems done"]
