"""The orchestrator on a machine that it may write nothing of but its own folders, and what it says of the others."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.orchestrator import redis_keys as own_keys
from spo.testing.peers import ServiceDoubles, wait_until
from tests.conftest import require
from tests.support.orchestrator_process import OrchestratorProcess

# What jobs' trainers write, and what is nobody's business here; all else in the state folder is the orchestrator's.
PART_TYPE = "application/offset+octet-stream"
OTHERS = ("weights", "checkpoints", "cache", "trainer")
# What the chart mounts read-only into its pod (tests/chart/test_chart_storage.py): the folders of living jobs are the
# trainer's, those of deleted ones have nobody else to remove them.
MOUNTED_READ_ONLY = ("cache", "trainer")
TASK = b'{"problem_id": "a", "prompt": "add", "tests": [{"stdin": "1 2", "stdout": "3"}]}\n'


@pytest.fixture
def orchestrator(
    redis_server: str, redis_client: redis.Redis, peers: ServiceDoubles, tmp_path: Path
) -> Iterator[OrchestratorProcess]:
    require("bwrap")
    for name in OTHERS:
        (tmp_path / "state" / name).mkdir(parents=True)
    running = OrchestratorProcess(redis_server, peers, tmp_path)
    yield running
    running.kill()


def confined(state: Path, *read_only: str) -> tuple[str, ...]:
    """Everything read-only, a /tmp of its own, the state folder as it is but for some folders."""
    found = ["bwrap", "--die-with-parent", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--tmpfs", "/tmp"]
    # This source, with its environment, may lie below /tmp itself.
    root = str(Path(__file__).parents[3])
    found += ["--ro-bind", root, root]
    found += ["--ro-bind", str(state.parent), str(state.parent), "--bind", str(state), str(state)]
    for name in read_only:
        found += ["--ro-bind", str(state / name), str(state / name)]
    return tuple(found)


def test_it_writes_only_its_own_and_says_when_a_deleted_jobs_weights_stay(
    orchestrator: OrchestratorProcess, redis_client: redis.Redis, tmp_path: Path, document: dict[str, Any]
) -> None:
    state = tmp_path / "state"
    orchestrator.prefix = confined(state, *OTHERS)
    orchestrator.start()
    with httpx.Client(base_url=orchestrator.url, trust_env=False, timeout=30) as api:
        made = api.post("/v1/datasets", json={"name": "mine", "size_bytes": len(TASK)})
        assert made.is_success, made.text
        digest = base64.b64encode(hashlib.sha256(TASK).digest()).decode()
        headers = {"Upload-Offset": "0", "Content-Type": PART_TYPE, "Content-Digest": f"sha-256=:{digest}:"}
        sent = api.patch(f"/v1/datasets/{made.json()['id']}", content=TASK, headers=headers)
        assert sent.is_success, sent.text
        job_id = api.post("/v1/jobs", json=document).json()["id"]
        weights = state / "weights" / job_id / "00000001"
        weights.mkdir(parents=True)
        (weights / "model.safetensors").write_bytes(b"x")
        api.post(f"/v1/jobs/{job_id}/cancel")
        wait_until(lambda: api.get(f"/v1/jobs/{job_id}").json()["state"] == "cancelled", "it is cancelled")
        assert api.delete(f"/v1/jobs/{job_id}").status_code == 204

        def told() -> list[dict[str, Any]]:
            items: list[dict[str, Any]] = api.get("/v1/attention").json()["items"]
            return [entry for entry in items if entry["subject"] == f"deleted job {job_id}"]

        wait_until(lambda: bool(told()), "the deletion that fails is told")
        assert "Read-only file system" in told()[0]["message"]
        assert "spo_deletions_failing 1.0" in api.get("/metrics").text
        assert weights.exists()
        assert redis_client.sismember(own_keys.deleted_jobs(), job_id), "it will be tried again"


def test_with_what_the_chart_mounts_it_removes_what_a_deleted_job_left(
    orchestrator: OrchestratorProcess, tmp_path: Path, document: dict[str, Any]
) -> None:
    state = tmp_path / "state"
    orchestrator.prefix = confined(state, *MOUNTED_READ_ONLY)
    orchestrator.start()
    with httpx.Client(base_url=orchestrator.url, trust_env=False, timeout=30) as api:
        job_id = api.post("/v1/jobs", json=document).json()["id"]
        left = [state / "weights" / job_id / "00000001", state / "checkpoints" / job_id / "0000000001"]
        for folder in left:
            folder.mkdir(parents=True)
            (folder / "part.safetensors").write_bytes(b"x")
        api.post(f"/v1/jobs/{job_id}/cancel")
        wait_until(lambda: api.get(f"/v1/jobs/{job_id}").json()["state"] == "cancelled", "it is cancelled")
        assert api.delete(f"/v1/jobs/{job_id}").status_code == 204
        wait_until(lambda: not any(folder.exists() for folder in left), "its files are removed")
        assert "deleted job" not in api.get("/v1/attention").text
