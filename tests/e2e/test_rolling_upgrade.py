"""A job goes on while its platform is upgraded service by service, and while part of that is taken back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.client.models import Job
from spo.local.judge_client import Child
from spo.local.launcher import LauncherSettings, LocalPlatform
from spo.testing.peers import wait_until
from spo.testing.trainer import write_random_llama
from tests.conftest import require
from tests.e2e.conftest import SHORT, demo_spec
from tests.support.platform import START_SECONDS, check_ledgers, child_of, wait_for_progress
from tests.support.releases import earlier_release

# docs/upgrades.md: readers before writers, the orchestrator last; a rollback is the reverse.
ORDER = ("replay-buffer", "value-estimation", "sandbox-judge", "inference", "trainer", "orchestrator")
TAKEN_BACK = ("orchestrator", "trainer", "sandbox-judge")
STEPS = 400
LATER = {"algorithm": ("value_noise",), "trainer": ("learning_rate_schedule", "learning_rate_floor")}
# Little slack: the trainer cannot run ahead of a pipeline of which one service restarts.
LONG = {
    **SHORT,
    "trainer": {**SHORT["trainer"], "steps": STEPS, "checkpoint_interval": 10},
    "replay": {**SHORT["replay"], "online_capacity": 64, "error_buffer": 16},
    "evaluation": {"interval_steps": STEPS, "samples": 2, "ks": [1]},
}

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(2400)]


def _in(release: Path) -> list[str]:
    """What starts a command in a release's folder, where `python -m` finds its modules first."""
    return [require("env"), "-C", str(release)]


class MixedPlatform(LocalPlatform):
    """A platform whose services can each be of today's release or of an earlier one, in a folder of their own."""

    def begin_with(self, release: Path) -> None:
        """Let every service be of a release; before the start."""
        self._first = release

    def _plan(self) -> list[Child]:
        children = super()._plan()
        for child in children:
            if child.name in ORDER:
                child.command = [*_in(self._first), *child.command]
        return children

    def exchange(self, name: str, release: Path | None) -> None:
        """Drain a service and start it of another release, None: of today's."""
        child = child_of(self, name)
        command = child.command[3:] if child.command[1] == "-C" else child.command
        child.command = [*_in(release), *command] if release else command
        before = child.pid
        child.ask_to_stop()
        wait_until(lambda: child.pid != before and child.is_ready(), f"{name} serves again", START_SECONDS, 0.3)


def known_to_the_earlier_release(spec: dict[str, Any]) -> dict[str, Any]:
    """The demo's job without what its recipe says that only later releases know."""
    for section, fields in LATER.items():
        for field in fields:
            del spec[section][field]
    return spec


def steps(least: int) -> Callable[[Job], bool]:
    return lambda job: job.progress.step >= least


def test_a_job_goes_on_through_an_upgrade_and_a_rollback(tmp_path: Path) -> None:
    earlier = earlier_release(tmp_path / "earlier")
    write_random_llama(tmp_path / "pi0", seed=0, width=32)
    settings = LauncherSettings(runs_path=tmp_path / "runs", http_port=0, start_seconds=START_SECONDS, drain_seconds=20)
    quick = {"SPO_ORCHESTRATOR_LEASE_SECONDS": "6", "PYTHONPATH": ""}
    platform = MixedPlatform("test", tmp_path / "state", settings, quick)
    platform.begin_with(earlier)
    with platform:
        platform.wait_until_ready()
        with Client(platform.http_url, retry_seconds=120) as client:
            job_id = client.submit(known_to_the_earlier_release(demo_spec(tmp_path / "pi0", LONG))).id
            wait_for_progress(client, job_id, steps(2))
            for name, release in [*((name, None) for name in ORDER), *((name, earlier) for name in TAKEN_BACK)]:
                platform.exchange(name, release)
                reached = client.get(job_id).progress.step
                wait_for_progress(client, job_id, steps(reached + 2))
            for name in reversed(TAKEN_BACK):
                platform.exchange(name, None)
            job = client.wait(job_id, 1200)
            assert job.state == "succeeded", job.failure
            assert job.progress.step == STEPS
            seqs = [event.seq for event in client.history(job_id)]
        assert seqs == list(range(1, len(seqs) + 1))
        check_ledgers(platform, job_id)
