"""A platform with a job that trains, for tests that only look at it and for those whose jobs leave it as it was."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.local.launcher import SERVICES, LocalPlatform, free_ports
from spo.testing.peers import Collector
from tests.e2e.conftest import SHORT, demo_spec
from tests.support.budget import day, sampled
from tests.support.platform import running_platform, wait_for_progress

RECIPES = "deploy/recipes/toy"
# Whole jobs that must learn something, 200 CPU s each, and what of the platform they alone go through. A run has those
# of the day; what each loss does to a batch is tested at every run, in tests/unit/spec/test_published_recipes.py.
LEARNING: dict[str, tuple[str, ...]] = {
    **{name: (f"{RECIPES}/{name}.yaml",) for name in ("sft", "ppo", "grpo", "expert_iteration", "a_star_po")},
    "lora": (f"{RECIPES}/lora.yaml", "services/trainer/weights.py", "services/inference/weights.py"),
    "retry": (f"{RECIPES}/retry.yaml", "services/inference/episodes.py", "services/verifier"),
}
TODAY = sampled(list(LEARNING), 1, LEARNING.__getitem__)


def on_its_day(name: str) -> pytest.MarkDecorator:
    """Skips what is not in the day's sample."""
    return pytest.mark.skipif(name not in TODAY, reason=f"not in the sample of {day()}")


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
def outside() -> Iterator[str]:
    """The address of a reward service that is a model as judge too."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "messages" in asked:
                said: dict[str, Any] = {"choices": [{"message": {"content": "It runs.\nScore: 7/10"}}]}
            else:
                said = {"scores": [{"prints": float("print" in each)} for each in asked["responses"]]}
            body = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory, reference_model: Path, outside: str) -> Iterator[Live]:
    """One platform for all tests of this folder, gone before those of others begin."""
    folder = tmp_path_factory.mktemp("live")
    spec = demo_spec(reference_model, SHORT)
    ports = free_ports(list(SERVICES), {})
    metered = {f"SPO_{name.replace('-', '_').upper()}_METRICS_PORT": str(port) for name, port in ports.items()}
    with Collector() as collector:
        environment = {
            **metered,
            **{"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "500"},
            **{"SPO_VERIFIER_HTTP_HOSTS": json.dumps([outside]), "SPO_VERIFIER_HTTP_NETWORKS": '["127.0.0.1/32"]'},
            # What a killed trainer leaves is free after this; short, so that tests are.
            "SPO_ORCHESTRATOR_LEASE_SECONDS": "6",
        }
        with running_platform(folder, environment) as platform:
            urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
            yield Live(platform, collector, urls | {"orchestrator": platform.http_url}, spec)


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    """A client of the platform for a test with jobs of its own, none of which outlives the test."""
    with Client(live.url, retry_seconds=60) as connected:
        earlier = {job.id for job in connected.jobs()}
        yield connected
        for job in connected.jobs():
            if job.id not in earlier and not job.is_final:
                connected.cancel(job.id)


@pytest.fixture(scope="package")
def trained_job(live: Live) -> str:
    """The id of a job that has taken its first steps and published weights."""
    with Client(live.url, retry_seconds=60) as client:
        job_id = client.submit(live.spec).id
        wait_for_progress(client, job_id, lambda job: job.progress.step >= 12 and job.progress.weight_version >= 1)
    return job_id
