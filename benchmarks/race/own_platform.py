"""The contestants that are jobs: on a platform of their own that knows nothing, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.race.course import STEPS_PER_CHECKPOINT, Checkpoint, Contest
from benchmarks.race.cpu import CpuTrace, LoadTrace
from spo.client import Client
from spo.client.models import Job
from spo.demo.experience import starting_from
from spo.errors import NotReady
from spo.local.launcher import LauncherSettings, LocalPlatform
from spo.reproduce.command import CpuMeter

LONGEST_JOB_SECONDS = 3600.0
MOST_VERSIONS = 1000
# The job's own evaluations are as few and small as can be: nobody's time holds one.
NO_EVALUATION = {"interval_steps": 1_000_000, "samples": 1, "ks": [1]}


def job_contests(documents: Mapping[str, Mapping[str, Any]], pi0: Path, seed: int, folder: Path) -> dict[str, Contest]:
    """Carry out the jobs in turn; each but the first may name the one before as its experience."""
    settings = LauncherSettings(runs_path=folder.parent)
    contests: dict[str, Contest] = {}
    # A job that publishes each step has all its versions examined afterwards, not those that a trainer keeps.
    kept = {"SPO_TRAINER_WEIGHTS_KEPT": str(MOST_VERSIONS)}
    with LocalPlatform(folder.name, folder / "state", settings, kept) as platform:
        platform.wait_until_ready()
        cpu = CpuMeter(platform)
        start = cpu.seconds()
        before = ""
        with Client(platform.http_url) as client:
            for name, document in documents.items():
                with LoadTrace() as load:
                    job, checkpoints = _carried_out(platform, cpu, client, _with(document, pi0, seed, before))
                contests[name] = Contest(start, checkpoints, load.mean())
                before = job.id
    return contests


def _with(document: Mapping[str, Any], pi0: Path, seed: int, before: str) -> dict[str, Any]:
    model = {**document["model"], "path": str(pi0)}
    return with_experience({**document, "seed": seed, "model": model, "evaluation": NO_EVALUATION}, before)


def with_experience(document: Mapping[str, Any], run: str) -> dict[str, Any]:
    """The document, reading the run's experience if it reads any."""
    return starting_from(run, document) if document["offline"].get("experience") else dict(document)


def _carried_out(
    platform: LocalPlatform, cpu: CpuMeter, client: Client, document: Mapping[str, Any]
) -> tuple[Job, Sequence[Checkpoint]]:
    before = cpu.seconds()
    with CpuTrace(cpu.seconds) as trace:
        job = client.wait(client.submit(document).id, timeout_seconds=LONGEST_JOB_SECONDS)
    if job.state != "succeeded":
        raise NotReady(f"job {job.id} is {job.state}: {job.failure.message if job.failure else 'no reason given'}")
    weights = platform.state_path / "weights" / job.id
    return job, [
        Checkpoint(
            published.step,
            trace.at(datetime.fromisoformat(published.published_at).timestamp()) - before,
            weights / f"{published.version:08d}",
        )
        for published in sorted(client.weights(job.id), key=lambda published: published.version)
        if published.step % STEPS_PER_CHECKPOINT == 0
    ]
