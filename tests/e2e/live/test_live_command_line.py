"""The command line against a platform that runs: each command answers people, in JSON and in YAML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spo.client import Client

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1200)]


def spo(live: Any, *arguments: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPO_API_URL": live.url, "NO_COLOR": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "spo.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


def answer(live: Any, *arguments: str) -> Any:
    """What the command says in JSON, which is what it says in YAML."""
    shown = [spo(live, *arguments, "-o", form) for form in ("json", "yaml", "table")]
    assert [each.returncode for each in shown] == [0, 0, 0], [each.stderr for each in shown]
    assert shown[2].stdout.strip()
    assert type(yaml.safe_load(shown[1].stdout)) is type(json.loads(shown[0].stdout))
    return json.loads(shown[0].stdout)


def test_a_job_is_looked_at_from_every_side(live: Any, trained_job: str) -> None:
    assert trained_job in [job["id"] for job in answer(live, "job", "list")]
    assert answer(live, "job", "get", trained_job)["progress"]["step"] >= 12
    assert answer(live, "job", "events", trained_job)[0]["seq"] == 1
    assert answer(live, "job", "metrics", trained_job, "loss")[0].keys() == {"step", "loss"}
    assert answer(live, "job", "logs", trained_job, "--limit", "5")
    assert answer(live, "weights", "ls", trained_job)[0]["version"] >= 1
    assert {each["pool"] for each in answer(live, "replicas")} >= {"inference", "trainer"}
    assert answer(live, "scale")["pools"]["inference"]["live"] == 1


def test_a_trajectory_is_shown_with_its_hops_and_its_prompt(live: Any, trained_job: str) -> None:
    first = answer(live, "trajectory", "ls", trained_job, "--source", "online", "--limit", "1")[0]
    whole = answer(live, "trajectory", "show", trained_job, first["trajectory_id"])

    assert [hop["service"] for hop in whole["hops"]] == ["inference", "sandbox-judge", "replay-buffer"]
    assert answer(live, "trajectory", "prompt", trained_job, whole["prompt_id"])


def test_a_job_is_submitted_watched_to_its_end_and_deleted(live: Any, trained_job: str, tmp_path: Path) -> None:
    with Client(live.url) as client:
        assert client.wait(trained_job, timeout_seconds=600).state == "succeeded"
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump({**live.spec, "trainer": {**live.spec["trainer"], "steps": 5}}))
    assert answer(live, "job", "submit", str(spec), "--validate-only")["trainer"]["steps"] == 5
    ended = spo(live, "job", "submit", str(spec), "--wait", "--timeout", "500", "-o", "json", seconds=600)
    assert ended.returncode == 0, ended.stderr
    job = json.loads(ended.stdout)
    assert (job["state"], job["progress"]["step"]) == ("succeeded", 5)
    events = spo(live, "job", "watch", job["id"], "-o", "json").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in events] == list(range(1, len(events) + 1))

    assert spo(live, "job", "pause", job["id"]).returncode == 5
    assert spo(live, "job", "delete", job["id"]).returncode == 0
    gone = spo(live, "job", "get", job["id"])
    assert (gone.returncode, "spo job list" in gone.stderr) == (4, True)


def test_the_curves_of_a_job_are_mirrored_to_tensorboard(live: Any, trained_job: str, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="the extra `sinks`")
    with Client(live.url) as client:
        client.wait(trained_job, timeout_seconds=600)
        expected = client.metrics(trained_job).steps
    for _ in range(2):
        done = spo(live, "job", "mirror", trained_job, "--to", f"tensorboard:{tmp_path}", seconds=300)
        assert done.returncode == 0, done.stderr
    read = reader.EventAccumulator(str(tmp_path / trained_job), size_guidance={"scalars": 0})
    read.Reload()

    assert [point.step for point in read.Scalars("training/loss")] == expected
    assert [point.step for point in read.Scalars("evaluation/pass@1")] == [0, 20, 40]


def test_a_probe_says_what_a_model_can_learn_from_before_anything_is_trained(live: Any, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump(live.spec))

    probed = spo(live, "tasks", "probe", str(spec), "--samples", "4", "--problems", "6", "-o", "json", seconds=300)

    assert probed.returncode == 0, probed.stderr
    found = json.loads(probed.stdout)
    assert found["problems"] == found["unsolved"] + found["solved"] + found["learnable"] == 6
    assert (found["samples"], sum(found["histogram"])) == (4, 6)
    assert spo(live, "job", "get", found["job_id"], "-o", "json").returncode == 0
