"""A job whose problems are conversations, "see the errors, try again", on the whole platform: more are solved after it.

The pool of environments is killed meanwhile: no episode is lost.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.reproduce.plan import merged
from spo.spec.section import read_spec
from spo.testing.peers import wait_until
from tests.e2e.live.conftest import on_its_day
from tests.support.platform import check_ledgers, child_of, wait_for_progress

RECIPE = Path(__file__).parents[3] / "deploy" / "recipes" / "toy" / "retry.yaml"
SHORT = {
    "tasks": {"train_problems": 32, "evaluation_problems": 24},
    "value": {"samples": 24},
    "trainer": {
        "steps": 30,
        "learning_rate": 8e-4,
        "batch_size": 32,
        "micro_batch_size": 32,
        "checkpoint_interval": 30,
    },
    "evaluation": {"interval_steps": 30, "samples": 8, "ks": [1]},
}

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1800)]


@on_its_day("retry")
def test_success_within_three_attempts_rises_through_a_killed_pool(
    live: Any, client: Client, reference_model: Path
) -> None:
    spec = merged(read_spec(RECIPE), SHORT, {"model": {"path": str(reference_model)}})
    job_id = client.submit(spec).id
    wait_for_progress(client, job_id, lambda job: job.progress.step >= 3)
    pool = child_of(live.platform, "verifier")
    restarts, killed = pool.restarts, pool.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: pool.restarts > restarts, "the pool's next life", 60)
    job = client.wait(job_id, 1200)
    assert job.state == "succeeded", job.failure
    check_ledgers(live.platform, job_id)

    before, *_, after = [found.pass_at_k["1"].value for found in client.evaluations(job_id)]
    print(f"success within three attempts {before:.3f} -> {after:.3f}")
    assert after > before
