"""Redis loses everything in the middle of a job: every service goes on, the loss is told, and the job is rebuilt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from spo.client import Client
from spo.errors import NotFound
from spo.testing.peers import wait_until
from spo.testing.trainer import write_random_llama
from tests.e2e.conftest import SHORT, demo_spec
from tests.support.platform import check_ledgers, running_platform, wait_for_progress

STEPS = 24
LONG = {**SHORT, "trainer": {**SHORT["trainer"], "steps": STEPS, "checkpoint_interval": 10, "update_interval": 5}}
# None of them holds anything of the job that only a restart would clear.
UNDISTURBED = ("orchestrator", "sandbox-judge", "replay-buffer", "value-estimation")

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1800)]


def is_told_as_lost(client: Client, job_id: str) -> bool:
    try:
        client.get(job_id)
    except NotFound as error:
        return error.code == "job_records_lost"
    return False


def test_a_job_is_rebuilt_and_succeeds_after_redis_lost_everything(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "pi0", seed=0, width=32)
    with (
        running_platform(tmp_path, {"SPO_ORCHESTRATOR_LEASE_SECONDS": "6"}) as platform,
        Client(platform.http_url, retry_seconds=120) as client,
    ):
        job_id = client.submit(demo_spec(tmp_path / "pi0", LONG)).id
        wait_for_progress(client, job_id, lambda job: job.progress.step >= 12)
        manifest = platform.state_path / "jobs" / f"{job_id}.json"
        wait_until(
            lambda: "10" in json.loads(manifest.read_text())["checkpoints"], "a checkpoint in the manifest", 60, 0.1
        )
        with redis.Redis.from_url(platform.redis_url) as server:
            server.flushall()
        wait_until(lambda: is_told_as_lost(client, job_id), "the loss is told", 30, 0.3)
        wait_until(lambda: bool(client.platform.describe().losses), "the loss is written down", 30, 0.3)
        found = client.platform.describe()
        assert [loss.kind for loss in found.losses] == ["redis_emptied"]
        assert "Redis came back without its data" in found.notice
        (lost,) = found.lost_jobs
        assert (lost.id, lost.state) == (job_id, "running")
        assert 10 in lost.checkpoints

        (rebuilt,) = client.platform.rebuild(resume=True)
        assert (rebuilt.id, rebuilt.state) == (job_id, "queued")
        job = client.wait(job_id, 900)

        assert job.state == "succeeded", job.failure
        assert job.progress.step == STEPS
        restarts = {service["name"]: service["restarts"] for service in platform.services()}
        assert {name: restarts[name] for name in UNDISTURBED} == dict.fromkeys(UNDISTURBED, 0)
        check_ledgers(platform, job_id)
