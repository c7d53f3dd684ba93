"""The whole platform while its services are killed: the job still succeeds, and nothing is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.client import Client
from spo.client.models import Job
from spo.demo.demo import RECIPE
from spo.local.launcher import LocalPlatform
from spo.messaging.redis_client import connect
from spo.reproduce.plan import merged
from spo.spec.section import read_spec
from spo.testing.peers import wait_until
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from tests.e2e.conftest import demo_spec
from tests.support.platform import check_ledgers, child_of, running_platform, wait_for_progress

# Pipeline stages give the work of a dead consumer to the next one after this; short, so that the test is.
RECLAIM_SECONDS = "5"
SHORTENED: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 12, "evaluation_problems": 6},
    "value": {"samples": 16},
    "offline": {"human_solutions_per_problem": 2},
    # Little slack: when a stage of the pipeline is dead the trainer soon waits for it instead of running ahead.
    "replay": {
        "mix": [{"source": "online", "share": 0.75}, {"source": "human", "share": 0.25}],
        "min_online": 16,
        "error_buffer": 32,
    },
    "trainer": {"steps": 56, "batch_size": 16, "micro_batch_size": 16, "update_interval": 5, "checkpoint_interval": 10},
    "evaluation": {"interval_steps": 28, "samples": 4, "ks": [1]},
}
# Which service is killed once the job has come so far; each kill waits for the recovery from the one before.
KILLS_WHILE_ESTIMATING = ((1, "value-estimation"), (3, "inference"))
KILLS_WHILE_TRAINING = (
    (2, "sandbox-judge"),
    (5, "inference"),
    (8, "value-estimation"),
    (12, "trainer"),
    (16, "replay-buffer"),
    (21, "orchestrator"),
    (28, "trainer"),
)
JOB_SECONDS = 1200.0
REMEMBERING: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 16, "evaluation_problems": 4},
    "rollout": {"samples_per_prompt": 4},
    "replay": {"min_online": 16, "error_buffer": 16, "memory": {"per_prompt": 3, "contrast": 2}},
    "trainer": {"steps": 36, "batch_size": 24, "update_interval": 2, "checkpoint_interval": 4},
    "evaluation": {"interval_steps": 36, "samples": 2, "ks": [1]},
}
MOMENTS = sorted(random.Random(36).sample(range(1, 33), 10))
KILLED_WHILE_REMEMBERING = [
    (step, ("replay-buffer", "orchestrator", "trainer")[number % 3]) for number, step in enumerate(MOMENTS)
]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPlatform]:
    """One for both jobs: the second one begins on a platform that has survived the kills of the first."""
    quick = {
        "SPO_INFERENCE_RECLAIM_AFTER_SECONDS": RECLAIM_SECONDS,
        "SPO_SANDBOX_JUDGE_RECLAIM_SECONDS": RECLAIM_SECONDS,
        "SPO_REPLAY_BUFFER_RECLAIM_SECONDS": RECLAIM_SECONDS,
        "SPO_VALUE_ESTIMATION_RECLAIM_SECONDS": RECLAIM_SECONDS,
        "SPO_ORCHESTRATOR_LEASE_SECONDS": "6",
    }
    with running_platform(tmp_path_factory.mktemp("killed"), quick, drain_seconds=5) as started:
        yield started


def test_a_job_outlives_the_death_of_every_service_and_loses_nothing(
    platform: LocalPlatform, reference_model: Path
) -> None:
    with Client(platform.http_url, retry_seconds=120) as client:
        job_id = client.submit(demo_spec(reference_model, SHORTENED)).id
        for values, service in KILLS_WHILE_ESTIMATING:
            wait_for_progress(client, job_id, _values(values))
            _kill(platform, service)
        for step, service in KILLS_WHILE_TRAINING:
            wait_for_progress(client, job_id, _steps(step))
            _kill(platform, service)
        job = client.wait(job_id, JOB_SECONDS)
        assert job.state == "succeeded", job.failure
        assert job.progress.step == SHORTENED["trainer"]["steps"]
        seqs = [event.seq for event in client.history(job_id)]
    assert seqs == list(range(1, len(seqs) + 1))
    restarts = {service["name"]: service["restarts"] for service in platform.services()}
    killed = Counter(service for _, service in (*KILLS_WHILE_ESTIMATING, *KILLS_WHILE_TRAINING))
    assert {name: count for name, count in restarts.items() if count} == dict(killed)
    check_ledgers(platform, job_id)


def test_after_ten_kills_the_memory_of_a_job_is_what_its_ledger_says(
    platform: LocalPlatform, reference_model: Path
) -> None:
    recipe = read_spec(RECIPE.with_name("online_memory.yaml"))
    spec = merged(recipe, REMEMBERING, {"model": {"path": str(reference_model)}})
    with Client(platform.http_url, retry_seconds=120) as client:
        job_id = client.submit(spec).id
        for step, service in KILLED_WHILE_REMEMBERING:
            wait_for_progress(client, job_id, _steps(step))
            _kill(platform, service)
        job = client.wait(job_id, JOB_SECONDS)
    assert job.state == "succeeded", job.failure
    check_ledgers(platform, job_id)

    with connect(platform.redis_url) as redis_client:
        index = BatchSampler(ReplayStore(redis_client)).index(job_id)
        index.refresh(["online", "memory"])
        ledger = redis_client.zrange(redis_keys.replay_ids(job_id), 0, -1)
        found = ReplayStore(redis_client).get(job_id, [name.decode() for name in ledger])
    rollouts = [each for each in found if each is not None and each.source == SOURCE_ONLINE]
    assert len(rollouts) == len(ledger) >= 16 * REMEMBERING["trainer"]["steps"]
    newest: dict[str, dict[tuple[int, ...], str]] = {}
    outcomes: dict[str, list[bool]] = {}
    for each in rollouts:
        outcomes.setdefault(each.prompt_id, []).append(each.reward == 0)
        if each.reward == 0:
            answers = newest.setdefault(each.prompt_id, {})
            answers.pop(tuple(each.response_token_ids), None)
            answers[tuple(each.response_token_ids)] = each.trajectory_id
    expected = {name for answers in newest.values() for name in list(answers.values())[-3:]}
    assert expected
    assert index.memory.members() == expected
    solved = job.progress.solved
    assert solved
    assert (solved.tried, solved.never) == (len(outcomes), sum(not any(right) for right in outcomes.values()))
    assert solved.once == sum(sum(right) == 1 for right in outcomes.values())


def _values(least: int) -> Callable[[Job], bool]:
    return lambda job: job.progress.values_done >= least


def _steps(least: int) -> Callable[[Job], bool]:
    return lambda job: job.progress.step >= least


def _kill(platform: LocalPlatform, service: str) -> None:
    child = child_of(platform, service)
    before, restarts = child.pid, child.restarts
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: child.restarts > restarts and child.is_ready(), f"the recovery of {service}", 300)
