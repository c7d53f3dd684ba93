"""What the tests of a whole platform share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.demo.demo import RECIPE
from spo.local.launcher import SERVICES, LocalPlatform, free_ports
from spo.reproduce.methods import merged
from spo.spec.spec_file import read_spec
from spo.testing.traces import Collector
from tests.support.platform import running_platform, wait_for_progress

ROOT = Path(__file__).parents[2]
# A short run: what is looked at is the platform, not what is learnt.
SHORT: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 8, "evaluation_problems": 4},
    "value": {"samples": 8},
    "replay": {
        "mix": [{"source": "online", "share": 0.75}, {"source": "human", "share": 0.25}],
        "min_online": 16,
        "error_buffer": 32,
    },
    "trainer": {
        "steps": 40,
        "batch_size": 16,
        "micro_batch_size": 16,
        "learning_rate": 1e-4,
        "update_interval": 10,
        "checkpoint_interval": 20,
    },
    "evaluation": {"interval_steps": 20, "samples": 2, "ks": [1]},
}


def demo_spec(reference_model: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    """The demo's job on this pi0, with changes by section."""
    return merged(read_spec(RECIPE), *changes, {"model": {"path": str(reference_model)}})


@pytest.fixture(scope="session")
def reference_model() -> Path:
    """pi0 of the toy contest, shared with the demo's cache so that it is built once."""
    cache = ROOT / ".spo" / "cache" / "models"
    command = [sys.executable, "-m", "spo.demo.reference_model", str(cache), "standard"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert finished.returncode == 0, finished.stderr
    return Path(json.loads(finished.stdout.splitlines()[-1])["folder"])


@dataclass(frozen=True)
class Live:
    """A platform that runs, with its metrics ports open and its traces collected."""

    platform: LocalPlatform
    collector: Collector
    metrics_urls: dict[str, str]
    spec: dict[str, Any]

    @property
    def url(self) -> str:
        return self.platform.http_url


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory, reference_model: Path) -> Iterator[Live]:
    """One platform for all tests that only look at it; gone before the tests of other folders begin."""
    folder = tmp_path_factory.mktemp("live")
    spec = demo_spec(reference_model, SHORT)
    ports = free_ports(list(SERVICES), {})
    metered = {f"SPO_{name.replace('-', '_').upper()}_METRICS_PORT": str(port) for name, port in ports.items()}
    with Collector() as collector:
        environment = {**metered, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "500"}
        with running_platform(folder, environment) as platform:
            urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
            yield Live(platform, collector, urls | {"orchestrator": platform.http_url}, spec)


@pytest.fixture(scope="package")
def trained_job(live: Live) -> str:
    """The id of a job that has taken its first steps and published weights."""
    with Client(live.url, retry_seconds=60) as client:
        job_id = client.submit(live.spec).id
        wait_for_progress(client, job_id, lambda job: job.progress.step >= 12 and job.progress.weight_version >= 1)
    return job_id
