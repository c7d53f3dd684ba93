"""The whole platform while its services are killed: the job still succeeds, and nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.client.models import Job
from spo.local.launcher import LocalPlatform
from spo.testing.peers import wait_until
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
    "trainer": {"steps": 80, "batch_size": 16, "micro_batch_size": 16, "update_interval": 5, "checkpoint_interval": 10},
    "evaluation": {"interval_steps": 40, "samples": 4, "ks": [1]},
}
# Which service is killed once the job has come so far; each kill waits for the recovery from the one before.
KILLS_WHILE_ESTIMATING = ((1, "value-estimation"), (3, "inference"))
KILLS_WHILE_TRAINING = (
    (3, "sandbox-judge"),
    (8, "inference"),
    (13, "value-estimation"),
    (18, "trainer"),
    (25, "replay-buffer"),
    (32, "orchestrator"),
    (40, "trainer"),
)
JOB_SECONDS = 1200.0

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1800)]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[LocalPlatform]:
    quick = {
        "SPO_INFERENCE_RECLAIM_AFTER_SECONDS": RECLAIM_SECONDS,
        "SPO_SANDBOX_JUDGE_RECLAIM_SECONDS": RECLAIM_SECONDS,
        "SPO_REPLAY_BUFFER_RECLAIM_SECONDS": RECLAIM_SECONDS,
        "SPO_VALUE_ESTIMATION_RECLAIM_SECONDS": RECLAIM_SECONDS,
        "SPO_ORCHESTRATOR_LEASE_SECONDS": "6",
    }
    with running_platform(tmp_path, quick, drain_seconds=5) as started:
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


def _values(least: int) -> Callable[[Job], bool]:
    return lambda job: job.progress.values_done >= least


def _steps(least: int) -> Callable[[Job], bool]:
    return lambda job: job.progress.step >= least


def _kill(platform: LocalPlatform, service: str) -> None:
    child = child_of(platform, service)
    before, restarts = child.pid, child.restarts
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: child.restarts == restarts + 1 and child.is_ready(), f"the recovery of {service}", 180)
