"""`spo demo`: the whole platform, pi0 of the toy contest, one job over REST, a live view and a report.

    start services ----------\\
    build pi0 (cached) -------> submit deploy/recipes/toy/demo.yaml -> follow -> runs/demo/report.{json,png}
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from spo.client import Client
from spo.client.models import Job, MetricSeries
from spo.console import ExitCode, console
from spo.demo.progress_view import ProgressView, Snapshot
from spo.demo.report import DemoOutcome, write_report
from spo.errors import InternalError, NotReady, SpoError
from spo.local.child import bound_to_this_process
from spo.local.commands import Interrupted, signals_interrupt
from spo.local.launcher import LauncherSettings, LocalPlatform
from spo.local.state import running_platforms
from spo.observability.logs import configure_logs
from spo.rpc.client import RpcClient
from spo.service.settings import PlatformSettings
from spo.spec.spec_file import read_spec
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, GetReplayStatusResponse
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub

NAME = "demo"
RECIPE = Path(__file__).parents[2] / "deploy" / "recipes" / "toy" / "demo.yaml"
LONGEST_DEMO_SECONDS = 3600.0
MODEL_SECONDS = 900.0
POLL_SECONDS = 1.0
# It has said all by then; torch takes its time to end on a busy machine.
PROCESS_END_SECONDS = 120.0
MEMORY_EVERY_SECONDS = 2.0


class ReferenceModelBuild:
    """pi0 being built (or found) by a child process, while the services start."""

    def __init__(self, cache: Path, name: str, log_path: Path, niceness: int = 0) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log_path
        self.done, self.total = 0, 0
        self.folder: Path | None = None
        self.reason = ""
        command = [sys.executable, "-m", "spo.demo.reference_model", str(cache), name]
        command = ["nice", "-n", str(niceness), *command] if niceness else command
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                bound_to_this_process(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="pi0", daemon=True)
        self._reader.start()

    def result(self, timeout_seconds: float) -> Path | None:
        """The folder; None when it needs longer. Raises InternalError when the build failed."""
        self._reader.join(timeout_seconds)
        if self._reader.is_alive():
            return None
        if self._process.wait(PROCESS_END_SECONDS) != 0 or self.folder is None:
            reason = self.reason or "its process died"
            raise InternalError(f"building pi0 failed: {reason}; see {self.log_path}", code="reference_model_failed")
        return self.folder

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            said = json.loads(line)
            if "folder" in said:
                self.folder = Path(said["folder"])
            elif "error" in said:
                self.reason = said["error"]
            else:
                self.done, self.total = said["done"], said["total"]


class Demo:
    """Jobs carried from submit to outcome on a platform of its own."""

    def __init__(self, platform: LocalPlatform, build: ReferenceModelBuild, view: ProgressView) -> None:
        self.platform = platform
        self.build = build
        self.view = view
        self.snapshot = Snapshot()
        self.memory_bytes = 0
        self.peak_memory_bytes = 0
        self._next_memory_sample = 0.0
        self.first_point_seconds: float | None = None
        self.deadline = time.monotonic() + LONGEST_DEMO_SECONDS

    def run(self, document: Mapping[str, Any]) -> DemoOutcome:
        """Carry a job to its end, once the platform and pi0 are there. Raises SpoError."""
        self.platform.wait_until_ready(self._show_start)
        model = self._await_model()
        setup_seconds = time.monotonic() - self.view.began
        spec = {**document, "model": {**document["model"], "path": str(model)}}
        with Client(self.platform.http_url) as client:
            job = self._follow(client, client.submit(spec))
            return self._outcome(client, job, setup_seconds)

    def _show_start(self, ready: Mapping[str, bool]) -> None:
        self.show(stage="starting services", ready=dict(ready))

    def _await_model(self) -> Path:
        deadline = time.monotonic() + MODEL_SECONDS
        while time.monotonic() < deadline:
            folder = self.build.result(timeout_seconds=0.5)
            if folder:
                return folder
            self.show(stage="building pi0")
        raise NotReady(f"pi0 was not built within {MODEL_SECONDS:g} s; see {self.build.log_path}")

    def _follow(self, client: Client, job: Job) -> Job:
        while True:
            job = client.get(job.id)
            evaluations = client.evaluations(job.id)
            if evaluations and self.first_point_seconds is None:
                self.first_point_seconds = time.monotonic() - self.view.began
            self.show(
                stage=job.state,
                job=job,
                evaluations=evaluations,
                series=client.metrics(job.id, max_points=200),
                queues=_queues(client, job.id),
            )
            if job.is_final:
                return job
            if time.monotonic() > self.deadline:
                waits = "; ".join(job.waits) or "nothing in particular"
                message = f"the demo took longer than {LONGEST_DEMO_SECONDS:g} s; job {job.id} waits for: {waits}"
                raise NotReady(message, code="demo_timeout")
            time.sleep(POLL_SECONDS)

    def say(self, line: str) -> None:
        """A line that stays, above what changes."""
        elapsed = time.monotonic() - self.view.began
        self.view.console.print(f"{elapsed:6.0f} s | {line}", markup=False, highlight=False, soft_wrap=True)

    def show(self, **changes: Any) -> None:
        """Draw what has changed, and what the services use."""
        if time.monotonic() >= self._next_memory_sample:
            self._next_memory_sample = time.monotonic() + MEMORY_EVERY_SECONDS
            self.memory_bytes = self.platform.memory_bytes()
            self.peak_memory_bytes = max(self.peak_memory_bytes, self.memory_bytes)
        self.snapshot = replace(
            self.snapshot,
            model_done=self.build.done,
            model_total=self.build.total,
            services=self.platform.services(),
            memory_bytes=self.memory_bytes,
            **changes,
        )
        self.view.show(self.snapshot)

    def _outcome(self, client: Client, job: Job, setup_seconds: float) -> DemoOutcome:
        return DemoOutcome(
            job=job,
            events=client.history(job.id),
            evaluations=client.evaluations(job.id),
            series=client.metrics(job.id, max_points=10_000),
            trajectories=self._trajectory_counts(job.id),
            weight_versions=len(client.weights(job.id)),
            services=self.platform.services(),
            peak_memory_bytes=self.peak_memory_bytes,
            cpu_seconds=self.platform.cpu_seconds(),
            setup_seconds=setup_seconds,
            total_seconds=time.monotonic() - self.view.began,
            first_point_seconds=self.first_point_seconds,
        )

    def _trajectory_counts(self, job_id: str) -> dict[str, int]:
        replay = RpcClient("replay-buffer", self.platform.addresses["replay-buffer"], ReplayServiceStub)
        try:
            status: GetReplayStatusResponse = replay.call("GetReplayStatus", GetReplayStatusRequest(run_id=job_id))
        finally:
            replay.close()
        online = sum(count.inserted for count in status.counts if count.source == SOURCE_ONLINE)
        return {"online": online, "offline": sum(count.inserted for count in status.counts) - online}


def run_demo() -> None:
    """Run the demo in the foreground; exits with a status that says whether the job succeeded. Raises SpoError."""
    configure_logs("launcher", level="error", log_format="console")
    document = read_spec(RECIPE)
    with fresh_demo(NAME, model_of(document)) as demo:
        report = write_report(demo.run(document), demo.platform.folder)
    print_summary(report, demo.platform.folder)
    if report["state"] != "succeeded":
        raise SystemExit(ExitCode.JOB_DID_NOT_SUCCEED)


def model_of(document: Mapping[str, Any]) -> str:
    """The name of the toy contest's pi0 that a recipe begins with."""
    return str(document["tasks"].get("difficulty", "standard"))


@contextmanager
def fresh_demo(name: str, model: str) -> Iterator[Demo]:
    """A platform that knows nothing of earlier runs, until the block ends; Ctrl-C ends the process with its status."""
    settings = LauncherSettings()
    if not any(state["name"] == name for state in running_platforms(settings.runs_path)):
        # A demo shows a first run: no values, no experience, no log of an earlier one.
        shutil.rmtree(settings.runs_path / name, ignore_errors=True)
    try:
        with signals_interrupt(), _demo(name, settings, model) as demo:
            yield demo
    except Interrupted:
        console.print("interrupted; everything is stopped")
        raise SystemExit(ExitCode.INTERRUPTED) from None


@contextmanager
def _demo(name: str, settings: LauncherSettings, model: str) -> Iterator[Demo]:
    folder = settings.runs_path / name
    cache = PlatformSettings().state_path / "cache" / "models"
    with LocalPlatform(name, folder / "state", settings) as platform:
        build = ReferenceModelBuild(cache, model, folder / "logs" / "reference-model.log")
        try:
            with ProgressView(console) as view:
                yield Demo(platform, build, view)
        finally:
            build.stop()


def _queues(client: Client, job_id: str) -> MetricSeries:
    try:
        return client.metrics(job_id, "platform", max_points=1)
    except SpoError:
        # Queue depths are an ornament of the view; the next poll asks again.
        return MetricSeries()


def print_summary(report: Mapping[str, Any], folder: Path) -> None:
    """One line of figures, and where the report is."""

    def change(name: str) -> str:
        score = report[name]
        return " -> ".join(_with_interval(score[when], score["intervals"][when]) for when in ("before", "after"))

    console.print(
        f"job {report['job_id']} {report['state']}: pass@1 {change('pass_at_1')}, pass@10 {change('pass_at_10')}, "
        f"{report['steps']} steps in {report['wall_seconds']['total']:.0f} s, "
        f"{report['peak_memory_bytes'] / 2**30:.1f} GiB at most, "
        f"{sum(report['cpu_seconds'].values()):.0f} CPU s",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"report: {escape(str(folder / 'report.json'))} and report.png", highlight=False)


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    return "?" if value is None or interval is None else f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"
