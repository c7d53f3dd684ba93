"""A platform with a job that trains, for all tests that only look at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.local.launcher import SERVICES, LocalPlatform, free_ports
from spo.testing.peers import Collector
from tests.e2e.conftest import SHORT, demo_spec
from tests.support.platform import running_platform, wait_for_progress


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
    """One platform for all tests of this folder, gone before those of others begin."""
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
