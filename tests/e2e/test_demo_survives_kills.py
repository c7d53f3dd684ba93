"""The whole platform while its services are killed: the job still succeeds, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from spo import redis_keys
from spo.client import Client
from spo.client_answers import Job
from spo.local.demo import RECIPE
from spo.local.launcher import LauncherSettings, LocalPlatform
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup
from spo.v1.trajectory_pb2 import Trajectory

ROOT = Path(__file__).parents[2]
# Belt stages give the work of a dead consumer to the next one after this; short, so that the test is.
RECLAIM_SECONDS = "5"
SHORTENED = {
    "tasks": {"train_problems": 12, "evaluation_problems": 6},
    "value": {"samples": 16},
    "offline": {"human_solutions_per_problem": 2},
    # Little slack: when a stage of the belt is dead the trainer soon waits for it instead of running ahead.
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

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def reference_model() -> Path:
    """pi0 of the toy contest, shared with the demo's cache so that it is built once."""
    cache = ROOT / ".spo" / "cache" / "models"
    command = [sys.executable, "-m", "spo.local.reference_model", str(cache), "standard"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert finished.returncode == 0, finished.stderr
    return Path(json.loads(finished.stdout.splitlines()[-1])["folder"])


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPlatform]:
    monkeypatch.delenv("SPO_REDIS_URL", raising=False)
    settings = LauncherSettings(runs_path=tmp_path / "runs", start_seconds=300, drain_seconds=5)
    quick = {
        "SPO_INFERENCE_RECLAIM_AFTER_SECONDS": RECLAIM_SECONDS,
        "SPO_SANDBOX_JUDGE_RECLAIM_SECONDS": RECLAIM_SECONDS,
        "SPO_REPLAY_BUFFER_RECLAIM_SECONDS": RECLAIM_SECONDS,
        "SPO_VALUE_ESTIMATION_RECLAIM_SECONDS": RECLAIM_SECONDS,
        "SPO_ORCHESTRATOR_LEASE_SECONDS": "6",
    }
    with LocalPlatform("killed", tmp_path / "state", settings, extra_environment=quick) as started:
        started.wait_until_ready()
        yield started


def test_a_job_outlives_the_death_of_every_service_and_loses_nothing(
    platform: LocalPlatform, reference_model: Path
) -> None:
    with Client(platform.http_url, retry_seconds=120) as client:
        job_id = client.submit(_shortened_spec(reference_model)).id
        for values, service in KILLS_WHILE_ESTIMATING:
            _wait_for(client, job_id, lambda job, least=values: job.progress.values_done >= least)
            _kill(platform, service)
        for step, service in KILLS_WHILE_TRAINING:
            _wait_for(client, job_id, lambda job, least=step: job.progress.step >= least)
            _kill(platform, service)
        job = client.wait(job_id, JOB_SECONDS)
        assert job.state == "succeeded", job.failure
        assert job.progress.step == SHORTENED["trainer"]["steps"]
        seqs = [event.seq for event in client.history(job_id)]
    assert seqs == list(range(1, len(seqs) + 1))
    restarts = {service["name"]: service["restarts"] for service in platform.services()}
    killed = Counter(service for _, service in (*KILLS_WHILE_ESTIMATING, *KILLS_WHILE_TRAINING))
    assert {name: count for name, count in restarts.items() if count} == dict(killed)
    with redis.Redis.from_url(platform.redis_url) as store:
        _check_ledger(store, job_id)


def _shortened_spec(reference_model: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    spec = {name: {**recipe[name], **SHORTENED.get(name, {})} for name in recipe if isinstance(recipe[name], dict)}
    return {**recipe, **spec, "model": {**recipe["model"], "path": str(reference_model)}}


def _wait_for(client: Client, job_id: str, reached: Callable[[Job], bool]) -> None:
    def come_so_far() -> bool:
        job = client.get(job_id)
        assert not job.is_final, f"the job ended early: {job.state} {job.failure}"
        return reached(job)

    wait_until(come_so_far, "the job's progress", JOB_SECONDS)


def _kill(platform: LocalPlatform, service: str) -> None:
    child = next(child for child in platform.children if child.name == service)
    before, restarts = child.pid, child.restarts
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: child.restarts == restarts + 1 and child.is_ready(), f"the recovery of {service}", 180)


def _check_ledger(store: redis.Redis, job_id: str) -> None:
    """Conservation: each dispatched sample is in the ledger exactly once, or its group still waits as a prompt."""
    wait_until(
        lambda: store.xlen(redis_keys.rollouts()) + store.xlen(redis_keys.verdicts()) == 0, "the belt to empty", 60
    )
    for stream in (redis_keys.prompts(job_id), redis_keys.rollouts(), redis_keys.verdicts(), redis_keys.estimates()):
        assert store.xlen(redis_keys.dead_letters(stream)) == 0
    ids: Any = store.zrange(redis_keys.replay_ids(job_id), 0, -1)
    payloads: Any = store.mget([redis_keys.replay_trajectory(job_id, each.decode()) for each in ids])
    assert all(payloads)
    ledger = [Trajectory.FromString(payload) for payload in payloads]
    assert [each.trajectory_id for each in ledger] == [each.decode() for each in ids]
    for each in ledger:
        assert len(each.reference_logprobs) == len(each.response_token_ids) > 0
        assert each.HasField("reward")
    online = Counter((each.group_id, each.sample_index) for each in ledger if each.source == SOURCE_ONLINE)
    assert set(online.values()) == {1}
    waiting: Any = store.xrange(redis_keys.prompts(job_id))
    still_prompts = {PromptGroup.FromString(fields[b"payload"]).group_id for _, fields in waiting}
    dispatched = int(store.hget(redis_keys.feeder_cursor(job_id), "position") or 0)
    expected = {
        (f"{job_id}-{number}", sample)
        for number in range(dispatched)
        if f"{job_id}-{number}" not in still_prompts
        for sample in range(4)
    }
    assert set(online) == expected
    counters: Any = store.hgetall(redis_keys.replay_counters(job_id))
    inserted = {name: int(count) for name, count in counters.items() if name.startswith(b"inserted:")}
    assert sum(inserted.values()) == len(ledger)
    assert inserted[b"inserted:online"] == len(online)
