"""A whole platform for a test: started, waited for, and checked for what no failure may lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from spo.client import Client
from spo.client.models import Job
from spo.experience.store import ExperienceStore
from spo.local.judge_client import Child
from spo.local.launcher import LauncherSettings, LocalPlatform
from spo.messaging.redis_client import connect
from spo.testing.peers import check_ledger, wait_until
from tests.support.warm_services import warm_parent

START_SECONDS = 300


@contextmanager
def running_platform(
    folder: Path, environment: Mapping[str, str] | None = None, *, drain_seconds: int = 20, trainer_ranks: int = 1
) -> Iterator[LocalPlatform]:
    """A platform with its own Redis under a folder, ready to take jobs; stopped at the end."""
    settings = LauncherSettings(
        http_port=0,
        runs_path=folder / "runs",
        start_seconds=START_SECONDS,
        drain_seconds=drain_seconds,
        trainer_ranks=trainer_ranks,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPO_REDIS_URL", raising=False)
        warm = warm_parent()
        with LocalPlatform("test", folder / "state", settings, dict(environment or {}), warm) as platform:
            platform.wait_until_ready()
            yield platform


def child_of(platform: LocalPlatform, name: str) -> Child:
    """The process of this name, whichever of its lives it is in."""
    return next(child for child in platform.children if child.name == name)


def wait_for_progress(client: Client, job_id: str, reached: Callable[[Job], bool], seconds: float = 1200) -> None:
    """Poll until a job has come so far; fails at once when it ends before."""

    def has_come_so_far() -> bool:
        job = client.get(job_id)
        assert not job.is_final, f"the job ended early: {job.state} {job.failure}"
        return reached(job)

    wait_until(has_come_so_far, "the job's progress", seconds, 0.3)


def check_ledgers(platform: LocalPlatform, *job_ids: str) -> None:
    """Nothing of these jobs was lost or doubled."""
    with connect(platform.redis_url) as client:
        for job_id in job_ids:
            check_ledger(client, job_id, experience=ExperienceStore(str(platform.state_path / "experience")))
