"""`spo scale`, `spo key`, `spo audit`, `spo job logs|delete` against a really served orchestrator."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.desk import Desk
from spo.client import Client
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest

ROOT = Path(__file__).parents[3]
OPERATOR_KEY = "the-operators-own-key"


@pytest.fixture
def desk_with_key(open_desk: Callable[..., Desk]) -> Desk:
    return open_desk(api_key=OPERATOR_KEY, scaler="local")


@pytest.fixture
def url(desk_with_key: Desk, serve: Callable[[Desk], str]) -> str:
    return serve(desk_with_key)


def spo(url: str, *arguments: str, key: str = OPERATOR_KEY) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200"}
    environment |= {"SPO_API_URL": url, "SPO_API_KEY": key}
    command = [sys.executable, "-m", "spo.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def answer(url: str, *arguments: str) -> Any:
    done = spo(url, *arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_replicas_are_wished_for_and_refused_beyond_the_bounds(url: str) -> None:
    assert answer(url, "scale", "--inference", "3")["pools"]["inference"]["desired"] == 3
    assert "inference" in spo(url, "scale").stdout

    refused = spo(url, "scale", "--inference", "99")

    assert refused.returncode == 3
    assert "/inference" in refused.stderr


def test_a_key_is_made_used_and_revoked(url: str) -> None:
    made = answer(url, "key", "create", "ada", "--tenant", "red", "--scope", "jobs:read")
    assert spo(url, "job", "list", key=made["token"]).returncode == 0
    assert spo(url, "key", "ls", key=made["token"]).returncode == 3

    revoked = answer(url, "key", "revoke", made["key_id"])

    assert revoked["revoked_at"]
    assert spo(url, "job", "list", key=made["token"]).returncode == 3
    assert [entry["path"] for entry in answer(url, "audit")][-1] == "/v1/keys"


def test_logs_are_read_and_an_ended_job_is_deleted(url: str, desk_with_key: Desk, document: dict[str, Any]) -> None:
    with Client(url, OPERATOR_KEY) as client:
        job_id = client.submit(document).id
        beat = HeartbeatRequest(replica_id="t", pool="trainer", run_id=job_id)
        for number, level in enumerate(("info", "error")):
            beat.logs.add(level=level, at_unix_ms=number, line=json.dumps({"event": f"line {number}", "level": level}))
        desk_with_key.replicas.beat(beat)
        shown = spo(url, "job", "logs", job_id).stdout.splitlines()
        assert [line.split()[-2:] for line in shown] == [["line", "0"], ["line", "1"]]
        assert len(answer(url, "job", "logs", job_id, "--level", "error")) == 1
        assert spo(url, "job", "delete", job_id).returncode == 5
        client.cancel(job_id)

    assert spo(url, "job", "delete", job_id).returncode == 0
    assert spo(url, "job", "get", job_id).returncode == 4
