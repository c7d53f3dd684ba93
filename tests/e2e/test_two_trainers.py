"""Two jobs at one time, each with a trainer and a replica of inference; then one of the trainers is gone for good."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from spo.client import Client
from spo.local.judge_client import Child
from spo.local.launcher import LocalPlatform, free_ports
from spo.rpc.client import is_healthy
from spo.testing.peers import wait_until
from tests.e2e.conftest import SHORT, demo_spec
from tests.support.platform import check_ledgers, child_of, running_platform

LEASE_SECONDS = 6
STEPS = 120
STOP_SECONDS = 30.0

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1200)]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[LocalPlatform]:
    quick = {"SPO_ORCHESTRATOR_LEASE_SECONDS": str(LEASE_SECONDS)}
    with running_platform(tmp_path, quick) as started:
        yield started


@pytest.fixture
def second_trainer(platform: LocalPlatform) -> Iterator[Child]:
    """A trainer that nobody restarts."""
    first = child_of(platform, "trainer")
    port = free_ports(["trainer"], {})["trainer"]
    own = {"SPO_TRAINER_PORT": str(port), "TORCH_EXTENSIONS_DIR": str(platform.state_path / "torch_extensions" / "2")}
    address, log = f"127.0.0.1:{port}", first.log_path.with_name("trainer-2.log")
    child = Child("trainer-2", first.command, {**first.environment, **own}, log, address, lambda: is_healthy(address))
    child.start()
    yield child
    child.ask_to_stop()
    child.stop_by(time.monotonic() + STOP_SECONDS)


def test_two_jobs_train_at_one_time_and_the_one_that_loses_its_trainer_goes_on_with_the_others(
    platform: LocalPlatform, second_trainer: Child, reference_model: Path
) -> None:
    spec = demo_spec(reference_model, SHORT, {"trainer": {"steps": STEPS}})
    with Client(platform.http_url, retry_seconds=120) as client:
        ask(platform, "PUT", "/v1/scale", {"inference": 2})
        wait_until(lambda: pools(platform) >= {("trainer", 2), ("inference", 2)}, "two trainers, two replicas", 240)
        both = [client.submit(spec | {"name": f"job {number}", "seed": number}).id for number in range(2)]
        third = client.submit(spec | {"name": "one too many"}).id
        wait_until(lambda: all(client.get(job).progress.step >= 3 for job in both), "both jobs train", 300)

        assert [client.get(job).state for job in both] == ["running", "running"]
        assert sorted(serving(platform)) == sorted(both)
        waiting = client.get(third)
        assert waiting.state == "queued"
        assert any("2 of 2 are taken" in reason for reason in waiting.waits), waiting.waits
        client.cancel(third)
        assert second_trainer.pid is not None
        os.kill(second_trainer.pid, signal.SIGKILL)
        steps = [client.get(job).progress.step for job in both]
        ended = [client.wait(job, 600) for job in both]

        assert max(steps) < STEPS, "the trainer died too late to be missed"
        assert [job.state for job in ended] == ["succeeded", "succeeded"], [job.failure for job in ended]
        for job in both:
            series = client.metrics(job)
            assert series.steps == list(range(1, STEPS + 1))
            assert None not in series.series["loss"]
    check_ledgers(platform, *both)


def ask(platform: LocalPlatform, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = httpx.request(method, f"{platform.http_url}{path}", json=body, trust_env=False, timeout=30)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def pools(platform: LocalPlatform) -> set[tuple[str, int]]:
    live = [item["pool"] for item in ask(platform, "GET", "/v1/replicas")["items"] if not item["draining"]]
    return {(pool, live.count(pool)) for pool in live}


def serving(platform: LocalPlatform) -> list[str]:
    """The run of each replica of inference."""
    return [item["run_id"] for item in ask(platform, "GET", "/v1/replicas")["items"] if item["pool"] == "inference"]
