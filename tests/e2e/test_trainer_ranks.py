"""A trainer of two ranks in a whole platform: whoever of it dies, all of it starts anew from the last checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from spo.client import Client
from spo.local.judge_client import Child
from spo.local.launcher import LocalPlatform
from spo.testing.peers import wait_until
from tests.e2e.conftest import SHORT, demo_spec
from tests.support.platform import check_ledgers, child_of, running_platform, wait_for_progress

LEASE_SECONDS = 6
STEPS = 36
TRAINER = {"steps": STEPS, "update_interval": 6, "checkpoint_interval": 6, "zero_stage": 2}
# Once the job has come so far, this process dies: a rank, or the torchrun that started both.
KILLS = ((8, "1"), (17, "0"), (26, "torchrun"))
# From a death to training again: torchrun's own grace for the rank that is left, imports, a lease that runs out.
LIMIT_SECONDS = 120

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(900)]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[LocalPlatform]:
    # Checkpoints at the spec's steps alone, so that what is lost is known.
    quick = {"SPO_ORCHESTRATOR_LEASE_SECONDS": str(LEASE_SECONDS), "SPO_TRAINER_CHECKPOINT_SHARE": "0"}
    with running_platform(tmp_path, quick, drain_seconds=10, trainer_ranks=2) as started:
        yield started


def test_a_dead_rank_restarts_the_group_from_the_last_checkpoint_and_no_step_is_lost_or_taken_twice(
    platform: LocalPlatform, reference_model: Path
) -> None:
    spec = demo_spec(reference_model, SHORT, {"trainer": TRAINER, "evaluation": {"interval_steps": STEPS}})
    trainer = child_of(platform, "trainer")
    saved, pauses, began_at = [], [], time.time()
    with Client(platform.http_url, retry_seconds=120) as client:
        job_id = client.submit(spec).id
        for step, victim in KILLS:
            wait_for_progress(client, job_id, lambda job, step=step: job.progress.step >= step, 300)
            leases, began = len(lines(trainer, "job leased")), time.monotonic()
            kill(trainer, victim)
            # What was written and not yet reported when its writer died is not resumed from.
            saved.append(client.checkpoints(job_id)[-1].step)
            wait_until(partial(is_leased_again, trainer, leases), f"a lease after {leases}", LIMIT_SECONDS)
            pauses.append(round(time.monotonic() - began, 1))
        job = client.wait(job_id, 300)
        assert job.state == "succeeded", job.failure
        series = client.metrics(job_id)
        last = client.checkpoints(job_id)[-1]
    check_ledgers(platform, job_id)

    leased, resumed = lines(trainer, "job leased"), lines(trainer, "resuming")
    assert [line["ranks"] for line in leased] == [2] * (len(KILLS) + 1)
    assert all(later["epoch"] > former["epoch"] for former, later in itertools.pairwise(leased))
    assert [line["step"] for line in resumed] == saved
    assert all(step - TRAINER["checkpoint_interval"] <= at for at, (step, _) in zip(saved, KILLS, strict=True))
    # Every step was reported, and the optimiser has taken each exactly once: what came after a checkpoint went with
    # the ranks that died.
    assert series.steps == list(range(1, STEPS + 1))
    assert None not in series.series["loss"]
    with safe_open(Path(last.path) / "rank-00001.safetensors", framework="pt") as state:
        assert (last.step, int(state.get_tensor("step.0"))) == (STEPS, STEPS)
    orphans = [each for each in psutil.process_iter() if is_rank(each) and each.ppid() == 1]
    assert not [each for each in orphans if each.create_time() >= began_at]
    print(f"seconds from a death to the next lease: {pauses}")


def kill(trainer: Child, victim: str) -> None:
    assert trainer.pid is not None
    torchrun = psutil.Process(trainer.pid)
    ranks = {each.environ().get("RANK"): each for each in torchrun.children() if is_rank(each)}
    assert sorted(map(str, ranks)) == ["0", "1"]
    os.kill((ranks.get(victim, torchrun)).pid, signal.SIGKILL)
    wait_until(lambda: not any(is_rank(each) for each in ranks.values()), "the end of both ranks", LIMIT_SECONDS)


def is_leased_again(trainer: Child, before: int) -> bool:
    return len(lines(trainer, "job leased")) > before


def is_rank(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-2:] == ["-m", "services.trainer"] and "RANK" in process.environ()
    except psutil.Error:
        return False


def lines(trainer: Child, event: str) -> list[dict[str, Any]]:
    """What rank 0 logged under a name, all its lives in one file."""
    found = [json.loads(line) for line in trainer.log_path.read_text().splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]
