"""Inference replicas come, go and die while a job runs: nothing is lost, the trainer goes on, and metrics are real.

Weights lie in a bucket, and two of the replicas come back as if on another machine: what they load leaves the bucket
once for both.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from spo.client import Client
from spo.local.launcher import LocalPlatform, free_ports
from spo.testing.peers import wait_until
from tests.e2e.conftest import demo_spec
from tests.support.platform import check_ledgers, child_of, running_platform, wait_for_progress
from tests.support.s3_server import S3Server, serve_s3

ROOT = Path(__file__).parents[2]
SHORTENED: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 12, "evaluation_problems": 6},
    "value": {"samples": 16},
    "replay": {
        "mix": [{"source": "online", "share": 0.75}, {"source": "human", "share": 0.25}],
        "min_online": 16,
        "error_buffer": 32,
    },
    # Long enough that replicas, which take most of a minute to start, come, die and leave before the end.
    "trainer": {
        "steps": 600,
        "batch_size": 16,
        "micro_batch_size": 16,
        "learning_rate": 1e-4,
        "update_interval": 10,
        "checkpoint_interval": 200,
    },
    "evaluation": {"interval_steps": 600, "samples": 4, "ks": [1]},
}
# Replicas of one pool would share a port, so inference is left out.
METERED = ("sandbox-judge", "replay-buffer", "value-estimation", "trainer")

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]


@pytest.fixture
def metrics_ports() -> dict[str, int]:
    return free_ports(list(METERED), {})


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[S3Server]:
    with serve_s3(tmp_path) as server:
        server.bucket("policies")
        yield server


@pytest.fixture
def platform(tmp_path: Path, metrics_ports: dict[str, int], bucket: S3Server) -> Iterator[LocalPlatform]:
    metered = {f"SPO_{name.replace('-', '_').upper()}_METRICS_PORT": str(port) for name, port in metrics_ports.items()}
    environment = {
        **metered,
        **bucket.environment(),
        "SPO_WEIGHT_STORE_URL": "s3://policies/weights",
        "SPO_WEIGHT_CACHE_PATH": str(tmp_path / "cache"),
        "SPO_INFERENCE_RECLAIM_AFTER_SECONDS": "5",
    }
    with running_platform(tmp_path, environment) as started:
        yield started


def test_replicas_scale_and_die_during_a_job_and_nothing_is_lost(
    platform: LocalPlatform, reference_model: Path, metrics_ports: dict[str, int], bucket: S3Server
) -> None:
    spec = demo_spec(reference_model, SHORTENED)
    with Client(platform.http_url, retry_seconds=120) as client:
        job_id = client.submit(spec).id
        wait_for_progress(client, job_id, lambda job: job.progress.step >= 5)
        scale(platform, 3)
        wait_until(lambda: joined(platform) >= 3, "three replicas serve the run", 240)
        named = {name for port in metrics_ports.values() for name in scraped(f"http://127.0.0.1:{port}")}
        named |= scraped(platform.http_url)
        for victim in ("inference-2", "inference"):
            kill(platform, victim, {"SPO_WEIGHT_CACHE_PATH": str(platform.state_path / "elsewhere")})
        wait_until(lambda: joined(platform) >= 3, "the killed replicas are back", 240)
        scale(platform, 1)
        wait_until(lambda: len(pool(platform)) == 1, "two replicas have left", 60)
        job = client.wait(job_id, 1200)
        assert job.state == "succeeded", job.failure
        waits = [value for value in client.metrics(job_id).series["wait_seconds"] if value is not None]
    check_ledgers(platform, job_id)
    print(f"the trainer waited {sum(waits):.1f} s in all, {max(waits):.1f} s at most for one batch")
    assert max(waits) < 120
    fetched = downloads(bucket)
    published = job.progress.weight_version
    print(f"{published} versions published, {len(fetched)} objects left the bucket, {fetched.total()} times in all")
    assert not list((platform.state_path / "weights").rglob("*.safetensors"))
    assert published >= SHORTENED["trainer"]["steps"] // SHORTENED["trainer"]["update_interval"]
    # By the two that came back elsewhere, which share their downloads; the others have what the trainer has kept.
    # Without sharing they would be twice as many; a request that went unanswered on a busy machine is asked again.
    assert fetched
    assert fetched.total() <= len(fetched) + 2
    unknown = drawn() - named
    assert not unknown, f"dashboards and alerts name what no live service exports: {sorted(unknown)}"


def downloads(bucket: S3Server) -> Counter[str]:
    """How often each object with weights was asked for."""
    return Counter(re.findall(r"GET (\S+\.safetensors) HTTP", bucket.log.read_text()))


def scale(platform: LocalPlatform, replicas: int) -> None:
    answer = httpx.put(f"{platform.http_url}/v1/scale", json={"inference": replicas}, trust_env=False, timeout=30)
    assert answer.status_code == 202, answer.text


def pool(platform: LocalPlatform) -> list[str]:
    return [child.name for child in platform.children if child.name.startswith("inference")]


def joined(platform: LocalPlatform) -> int:
    items = httpx.get(f"{platform.http_url}/v1/replicas", trust_env=False, timeout=30).json()["items"]
    return sum(item["pool"] == "inference" and bool(item["run_id"]) and not item["draining"] for item in items)


def kill(platform: LocalPlatform, name: str, changed: dict[str, str]) -> None:
    """SIGKILL; what is started in its place has a changed environment."""
    child = child_of(platform, name)
    child.environment = {**child.environment, **changed}
    before, restarts = child.pid, child.restarts
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: child.restarts > restarts, f"{name} is started again", 60)


def scraped(url: str) -> set[str]:
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text
    return set(re.findall(r"^# TYPE (spo_\w+)", text, re.MULTILINE))


def drawn() -> set[str]:
    panels = json.loads((ROOT / "deploy" / "grafana" / "spo.json").read_text())["panels"]
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    texts += [rule["expr"] for group in rules for rule in group["rules"]]
    names = {name for text in texts for name in re.findall(r"\bspo_[a-z0-9_]+", text)}
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
