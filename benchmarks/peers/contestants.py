"""The contestants of benchmarks.learning: two jobs on a platform of its own, and TRL's GRPO; what each checkpoint cost.

CPU seconds are those of all processes: the platform's services and Redis, or the peer and its judge, with the children
that ran the programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from spo.client import Client
from spo.client.models import Job
from spo.errors import NotReady
from spo.local.child import bound_to_this_process
from spo.local.judge_client import EmbeddedJudge
from spo.local.launcher import LauncherSettings, LocalPlatform
from spo.reproduce.measure import CpuMeter

SAMPLING_SECONDS = 0.25
LONGEST_JOB_SECONDS = 1800.0
LONGEST_PEER_SECONDS = 1800.0
INSTALL_SECONDS = 900.0
REPOSITORY = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements-trl.txt"


@dataclass(frozen=True)
class Checkpoint:
    """Weights in a folder, and the CPU seconds spent until they were there, since all was ready to learn."""

    step: int
    cpu_seconds: float
    folder: Path


@dataclass(frozen=True)
class Contest:
    """What one contestant did; start_cpu_seconds is what it took to be ready: imports, services, model."""

    start_cpu_seconds: float
    checkpoints: Sequence[Checkpoint]


def tree_cpu_seconds(pid: int) -> float:
    """CPU of a process, its descendants, and those of them that have ended."""
    total = 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass
class CpuTrace:
    """A process's or platform's CPU over time, sampled in a thread while the block runs."""

    read: Callable[[], float]
    _times: list[float] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> CpuTrace:
        self._thread = threading.Thread(target=self._sample, name="cpu-trace", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def at(self, unix_seconds: float) -> float:
        """CPU seconds at a moment within the block, by interpolation."""
        return float(np.interp(unix_seconds, self._times, self._seconds))

    def _sample(self) -> None:
        while True:
            last = self._over.is_set()
            self._times.append(time.time())
            self._seconds.append(self.read())
            if last:
                return
            self._over.wait(SAMPLING_SECONDS)


@contextmanager
def platform_contest(folder: Path) -> Iterator[Callable[[Mapping[str, Any]], tuple[Job, Contest]]]:
    """A platform that knows nothing yet; call what it yields with job documents, one after the other."""
    settings = LauncherSettings(runs_path=folder.parent)
    with LocalPlatform(folder.name, folder / "state", settings) as platform:
        platform.wait_until_ready()
        cpu = CpuMeter(platform)
        start = cpu.seconds()
        with Client(platform.http_url) as client:
            yield lambda document: _job(platform, cpu, client, document, start)


def _job(
    platform: LocalPlatform, cpu: CpuMeter, client: Client, document: Mapping[str, Any], start: float
) -> tuple[Job, Contest]:
    before = cpu.seconds()
    with CpuTrace(cpu.seconds) as trace:
        job = client.wait(client.submit(document).id, timeout_seconds=LONGEST_JOB_SECONDS)
    if job.state != "succeeded":
        raise NotReady(f"job {job.id} is {job.state}: {job.failure.message if job.failure else 'no reason given'}")
    weights = platform.state_path / "weights" / job.id
    return job, Contest(
        start,
        [
            Checkpoint(
                published.step,
                trace.at(datetime.fromisoformat(published.published_at).timestamp()) - before,
                weights / f"{published.version:08d}",
            )
            for published in sorted(client.weights(job.id), key=lambda published: published.version)
        ],
    )


def trl_contest(pi0: Path, seed: int, steps: int, every: int, folder: Path) -> Contest:
    """TRL's GRPO with a judge of its own; what it has done counts when it takes too long. Raises NotReady."""
    packages = installed_trl(folder.parents[1] / "trl-packages")
    with own_judge() as judge:
        command = [sys.executable, "-m", "benchmarks.peers.trl_grpo", str(pi0), judge.address]
        command += [str(seed), str(steps), str(every), str(folder)]
        said = _lines(command, packages, lambda: tree_cpu_seconds(judge.pid))
    (begun, judge_begun), *later = said
    ready = begun["cpu_seconds"] + judge_begun
    return Contest(
        ready,
        [
            Checkpoint(line["step"], line["cpu_seconds"] + judge_cpu - ready, Path(line["folder"]))
            for line, judge_cpu in later
        ],
    )


def _lines(command: list[str], packages: Path, judge_cpu: Callable[[], float]) -> list[tuple[dict[str, Any], float]]:
    """What the peer says, each with the judge's CPU at that moment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(packages)])}
    # Libraries write warnings to the other stream; kept for the case that it fails.
    with (packages / "peer.log").open("wb") as log:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        peer = subprocess.Popen(bound_to_this_process(command), cwd=REPOSITORY, env=environment, **pipes)
        late = threading.Event()

        def end() -> None:
            late.set()
            peer.kill()

        watchdog = threading.Timer(LONGEST_PEER_SECONDS, end)
        watchdog.start()
        try:
            lines = [(json.loads(line), judge_cpu()) for line in peer.stdout or () if line.startswith('{"step"')]
            status = peer.wait()
        finally:
            watchdog.cancel()
            peer.kill()
    if (status and not late.is_set()) or len(lines) < 2:
        raise NotReady(f"TRL ended with status {status}; see {packages / 'peer.log'}", code="peer_failed")
    return lines


def installed_trl(folder: Path) -> Path:
    """A folder with TRL and what it needs beside the platform's packages; made once."""
    if not (folder / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, "-r", str(REQUIREMENTS)], check=True, timeout=INSTALL_SECONDS)
    return folder


@contextmanager
def own_judge() -> Iterator[EmbeddedJudge]:
    """A judge that ends with the block."""
    judge = EmbeddedJudge()
    judge.start()
    try:
        yield judge
    finally:
        judge.stop()
