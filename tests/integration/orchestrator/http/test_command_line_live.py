"""`spo scale`, `spo key`, `spo audit`, `spo job logs|delete` against a really served orchestrator."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.orchestrator.container import AppContext
from services.orchestrator.job_records import report_writes
from spo import redis_keys
from spo.client import Client
from spo.errors import catalogue
from spo.testing.peers import ServiceDoubles
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from tests.support import command_line

OPERATOR_KEY = "the-operators-own-key"


@pytest.fixture
def context_with_key(open_context: Callable[..., AppContext]) -> AppContext:
    return open_context(api_key=OPERATOR_KEY, scaler="local", serving_wait_seconds=0.5)


@pytest.fixture
def url(context_with_key: AppContext, serve: Callable[[AppContext], str]) -> str:
    return serve(context_with_key)


def spo(url: str, *arguments: str, key: str = OPERATOR_KEY) -> subprocess.CompletedProcess[str]:
    return command_line.spo(*arguments, environment={"SPO_API_URL": url, "SPO_API_KEY": key})


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


def test_logs_are_read_and_an_ended_job_is_deleted(
    url: str, context_with_key: AppContext, document: dict[str, Any]
) -> None:
    with Client(url, OPERATOR_KEY) as client:
        job_id = client.submit(document).id
        beat = HeartbeatRequest(replica_id="t", pool="trainer", run_id=job_id)
        for number, level in enumerate(("info", "error")):
            text = json.dumps({"event": f"line {number}", "level": level})
            beat.logs.add(run_id=job_id, level=level, at_unix_ms=number, line=text)
        context_with_key.replicas.beat(beat)
        shown = spo(url, "job", "logs", job_id).stdout.splitlines()
        assert [line.split()[-2:] for line in shown] == [["line", "0"], ["line", "1"]]
        assert len(answer(url, "job", "logs", job_id, "--level", "error")) == 1
        assert spo(url, "job", "delete", job_id).returncode == 5
        client.cancel(job_id)

    assert spo(url, "job", "delete", job_id).returncode == 0
    assert spo(url, "job", "get", job_id).returncode == 4


def test_what_is_shown_to_people_is_also_there_for_programs(
    url: str, context_with_key: AppContext, document: dict[str, Any]
) -> None:
    with Client(url, OPERATOR_KEY) as client:
        job_id = client.submit(document).id
    writes = report_writes(job_id, [(step, {"loss": 1.0 / step, "reward": -0.5}) for step in (1, 2, 3)])
    with context_with_key.redis.pipeline() as pipe:
        for write in writes:
            pipe.execute_command(*write)
        pipe.execute()
    asked: list[tuple[str, ...]] = [
        ("job", "list"),
        ("job", "get", job_id),
        ("job", "events", job_id),
        ("job", "metrics", job_id, "loss"),
        ("job", "checkpoints", job_id),
        ("replicas",),
        ("weights", "ls", job_id),
    ]
    for words in asked:
        found = answer(url, *words)
        shown = [spo(url, *words, "-o", form) for form in ("yaml", "table")]
        assert [each.returncode for each in shown] == [0, 0], words
        assert yaml.safe_load(shown[0].stdout) == found, words
    assert answer(url, "job", "metrics", job_id, "loss") == [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)]
    # Last and at once: a replica that is silent for seconds is gone.
    context_with_key.replicas.beat(HeartbeatRequest(replica_id="r", pool="inference", run_id=job_id))
    assert [each["replica_id"] for each in answer(url, "replicas")] == ["r"]


def test_waiting_ends_with_the_job_and_its_status(url: str, document: dict[str, Any], tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump(document))
    late = spo(url, "job", "submit", str(spec), "--wait", "--timeout", "0", "-o", "json")
    assert late.returncode == 6
    assert "wait_timeout" in late.stderr
    job_id = answer(url, "job", "list")[0]["id"]

    assert answer(url, "job", "cancel", job_id, "--wait")["state"] == "cancelled"
    watched = spo(url, "job", "watch", job_id, "-o", "json")
    assert watched.returncode == 7
    assert json.loads(watched.stdout.splitlines()[-1])["body"]["to"] == "cancelled"


def test_what_the_server_refuses_comes_with_what_to_do(url: str, document: dict[str, Any]) -> None:
    with Client(url, OPERATOR_KEY) as client:
        job_id = client.submit(document).id
    refused = spo(url, "weights", "rollback", job_id, "7")

    assert refused.returncode in (4, 5)
    assert any(entry.remedy in " ".join(refused.stderr.split()) for entry in catalogue().values())


def test_why_a_job_failed_is_told(url: str, context_with_key: AppContext, document: dict[str, Any]) -> None:
    with Client(url, OPERATOR_KEY) as client:
        job_id = client.submit(document).id
    context_with_key.jobs.fail(job_id, "source_empty", "the source human has [nothing] to give")

    watched = spo(url, "job", "watch", job_id)

    assert watched.returncode == 7
    assert "failed the source human has [nothing] to give (source_empty)" in watched.stderr
    assert catalogue()["source_empty"].remedy in " ".join(watched.stderr.split())


def test_an_ended_jobs_policy_waits_for_a_replica_and_says_so(
    url: str, document: dict[str, Any], peers: ServiceDoubles
) -> None:
    peers.inference.unready = 100
    with Client(url, OPERATOR_KEY) as client:
        job_id = client.submit(document).id
        client.cancel(job_id)
    asked = spo(url, "ask", job_id, "2 + 2 =")

    assert asked.returncode != 0
    said = " ".join(asked.stderr.split())
    assert f"no replica serves {job_id} after 0.5 s" in said
    assert "spo weights export JOB" in said


def test_experience_that_is_still_being_stored_is_no_missing_experience(
    url: str, context_with_key: AppContext, document: dict[str, Any], tmp_path: Path
) -> None:
    with Client(url, OPERATOR_KEY) as client:
        job_id = client.submit(document).id
        client.cancel(job_id)
    context_with_key.redis.hset(redis_keys.replay_counters(job_id), "number", 3)
    target = tmp_path / "rows.jsonl"

    soon = spo(url, "experience", "export", str(target), "--run", job_id)
    context_with_key.redis.delete(redis_keys.replay_counters(job_id))
    never = spo(url, "experience", "export", str(target), "--run", job_id)

    assert (soon.returncode, never.returncode) == (6, 4)
    assert "is still being stored" in soon.stderr
    assert not target.exists()
