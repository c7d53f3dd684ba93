"""`spo reproduce`: one platform, every planned run over REST, what each cost, and the report.

The trainer's peak memory, SPO against PPO: measured by the trainer's benchmark, in a process of its own.
In a run of the toy contest the libraries outweigh a model of 240 thousand parameters a hundred times; the benchmark
counts what the training itself holds.

Carries the planned runs out, one after the other on one platform, and keeps what each came to.
A finished run's result is a file; a run that has one is not run again, so a report can grow over many evenings. The
platform's Redis stays too: values of prompts, samples of pi0 and labels of pivotal tokens pass from run to run.

    plan -> start services, build both pi0 -> runs without a result, one by one -> runs/reproduce/report.{json,md}

Interrupt it as you like: finished runs are kept, and the one that was under way goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from spo import redis_keys
from spo.client import Client
from spo.client.models import Event, Job, StepEvaluation
from spo.console import ExitCode, console, print_error
from spo.demo.demo import ReferenceModelBuild, seconds_between
from spo.errors import Conflict, InternalError, InvalidInput, NotReady, SpoError
from spo.local.launcher import Interrupted, LauncherSettings, LocalPlatform, signals_interrupt
from spo.messaging.redis_client import connect
from spo.observability import configure_logs
from spo.reproduce.plan import (
    FULL,
    QUICK,
    SETTINGS,
    Difficulty,
    Document,
    PlannedRun,
    ReadDocument,
    contaminate,
    merged,
    runs,
    training_task,
)
from spo.reproduce.report import Results, remember_estimate, remembered_estimates, write_report
from spo.rpc.client import RpcClient
from spo.service.settings import PlatformSettings
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, GetReplayStatusResponse
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.value_pb2 import PromptValue

REDIS_WAIT_SECONDS = 10.0

REPOSITORY = Path(__file__).parents[2]
# Two processes that import torch and DeepSpeed; on a busy machine each takes minutes.
LIMIT_SECONDS = 1200.0
MEASURE = """
import json, pathlib, tempfile
from benchmarks.trainer import peak_memory
with tempfile.TemporaryDirectory() as folder:
    print(json.dumps([peak_memory(pathlib.Path(folder)).to_json()]))
"""
KEPT = "memory.json"

# A run costs this much beside its steps, in steps.
FIXED_STEPS = 40
PLAIN_EVERY_SECONDS = 15.0

LONGEST_RUN_SECONDS = 3600.0
POLL_SECONDS = 0.5
MEMORY_EVERY_SECONDS = 2.0
CURVES = ("reward", "reward/online", "loss", "kl_to_reference", "grad_norm")
CURVE_POINTS = 50
EVALUATION_SAMPLES = 10
KEPT_EVENTS = 200
# Events that every healthy run has; the others are kept with the result.
USUAL_EVENTS = (
    "state",
    "progress",
    "evaluation",
    "lease",
    "weights",
    "weights_applied",
    "checkpoint",
    "training_ended",
)

NAME = "reproduce"
MODEL_SECONDS = 1800.0


@dataclass
class CpuMeter:
    """CPU of the platform's processes; what one had used when it was last looked at stays when it is replaced."""

    platform: LocalPlatform
    _used: dict[tuple[int, float], float] = field(default_factory=dict)

    def seconds(self) -> float:
        """All CPU so far, with that of ended children; call it often, as every service may be restarted."""
        for process in _processes(service["pid"] for service in self.platform.services()):
            try:
                times = process.cpu_times()
                name = (process.pid, process.create_time())
            except psutil.Error:
                continue
            self._used[name] = times.user + times.system + times.children_user + times.children_system
        return sum(self._used.values())


def trainer_memory_bytes(platform: LocalPlatform) -> int:
    """Proportional set size of the trainer's ranks, 0 while there is none."""
    total = 0
    for process in _processes(child["pid"] for child in platform.services() if child["name"] == "trainer"):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def rollouts(platform: LocalPlatform, job_id: str, spec: Document) -> dict[str, int]:
    """Responses that the run's learning rests on: sampled online, for values, for pivotal tokens.

    Values and labels taken over from an earlier run count here: they were somebody's rollouts.
    """
    replay = RpcClient("replay-buffer", platform.addresses["replay-buffer"], ReplayServiceStub)
    try:
        status: GetReplayStatusResponse = replay.call("GetReplayStatus", GetReplayStatusRequest(run_id=job_id))
    finally:
        replay.close()
    client = connect(platform.redis_url, REDIS_WAIT_SECONDS)
    try:
        stored = client.hvals(redis_keys.run_values(job_id))
        visits = client.scard(redis_keys.pivotal_visits(job_id))
    finally:
        client.close()
    pivotal = ((spec.get("value") or {}).get("pivotal") or {}).get("rollouts", 0)
    return {
        "online": sum(count.inserted for count in status.counts if count.source == SOURCE_ONLINE),
        "values": sum(PromptValue.FromString(raw).samples for raw in stored),
        "pivotal": visits * pivotal,
    }


def _processes(pids: Iterable[int | None]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        try:
            if pid is not None:
                found += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def measured_memory(folder: Path) -> list[Document]:
    """The benchmark's rows about PPO, measured once per folder; none when it could not run."""
    kept = kept_memory(folder)
    if not kept:
        kept = _rows()
        if kept:
            (folder / KEPT).write_text(json.dumps(kept) + "\n")
    return kept


def kept_memory(folder: Path) -> list[Document]:
    """What was measured before; none when nothing was."""
    path = folder / KEPT
    found: list[Document] = json.loads(path.read_text()) if path.exists() else []
    return found


def _rows() -> list[Document]:
    command = [sys.executable, "-c", MEASURE]
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=True,
        )
        # Libraries may print before it.
        found: list[Document] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError, OSError) as error:
        reason = f"{type(error).__name__} {_last_line(getattr(error, 'stderr', None))}".rstrip()
        console.print(f"the trainer's memory was not measured: {reason}", style="yellow", markup=False)
        return []
    return found


def _last_line(said: str | bytes | None) -> str:
    """What a process said last; a timeout's output comes as bytes."""
    text = said.decode(errors="replace") if isinstance(said, bytes) else said or ""
    return next(reversed(text.strip().splitlines()), "")


class RunProgress:
    """In place on a terminal, a line per event elsewhere; use as a context manager."""

    def __init__(self, console: Console, planned: Sequence[PlannedRun], done: int) -> None:
        self.console = console
        self.left = {run.name: FIXED_STEPS + int(run.document["trainer"]["steps"]) for run in planned}
        self.began = time.monotonic()
        self._spent_steps, self._spent_seconds = 0, 0.0
        self._run_began = self.began
        self._next_line = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[doing]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("runs", total=len(planned), completed=done, doing="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def starting(self, ready: Mapping[str, bool]) -> None:
        self._say(f"starting services: {sum(ready.values())} of {len(ready)} ready")

    def building(self, done: int, total: int) -> None:
        self._say(f"building pi0: {done} of {total or '?'} steps")

    def begin(self, run: PlannedRun) -> None:
        self._run_began = time.monotonic()
        self._say(f"{run.name}{self._remaining()}", now=True)

    def show(self, run: PlannedRun, job: Job) -> None:
        progress = job.progress
        values = f"values {progress.values_done}/{progress.values_total or '?'}, step {progress.step}/{progress.steps}"
        self._say(f"{run.name}: {job.state}, {values}{self._remaining()}")

    def finish(self, run: PlannedRun, result: ReadDocument | None) -> None:
        seconds = time.monotonic() - self._run_began
        self._spent_steps += self.left.pop(run.name, 0)
        self._spent_seconds += seconds
        self._bar.advance(self._task)
        self._say(f"{run.name}: {_outcome(result)} in {seconds:.0f} s{self._remaining()}", now=True)

    def _remaining(self) -> str:
        if not self._spent_steps:
            return ""
        seconds = sum(self.left.values()) * self._spent_seconds / self._spent_steps
        return f"; about {seconds / 60:.0f} min left"

    def _say(self, doing: str, *, now: bool = False) -> None:
        self._bar.update(self._task, doing=doing)
        elapsed = time.monotonic() - self.began
        if not self.console.is_terminal and (now or elapsed >= self._next_line):
            self._next_line = elapsed + PLAIN_EVERY_SECONDS
            self.console.print(f"{elapsed:6.0f} s | {doing}", markup=False, highlight=False, soft_wrap=True)


def _outcome(result: ReadDocument | None) -> str:
    if result is None or not result["evaluations"]:
        return "no result"
    scores = result["evaluations"][-1]["pass_at_k"]
    return ", ".join(f"pass@{k} {score['value']:.2f}" for k, score in scores.items())


@dataclass
class RunExecutor:
    """Submits runs over REST and follows them; on_poll is told of the job at every look."""

    platform: LocalPlatform
    client: Client
    folder: Path
    on_poll: Callable[[PlannedRun, Job], None]
    cpu: CpuMeter = field(init=False)

    def __post_init__(self) -> None:
        self.cpu = CpuMeter(self.platform)

    def carry_out(self, run: PlannedRun, document: ReadDocument, training_task: ReadDocument | None = None) -> Document:
        """Run one job to its end and keep its result. `document` is the run's, ready to be submitted.

        With `training_task`, a task set, the policy is evaluated on that as well.

        Raises NotReady when it takes longer than LONGEST_RUN_SECONDS, InvalidInput when it is refused.
        """
        attempt = _attempt(self.folder, run)
        began, cpu_began = time.monotonic(), self.cpu.seconds()
        job = self._submit(document, f"reproduce {run.name} {attempt} {_digest(document)}")
        cpu_running, memory = None, 0
        next_memory = 0.0
        while not job.is_final:
            if time.monotonic() - began > LONGEST_RUN_SECONDS:
                waits = "; ".join(job.waits) or "nothing in particular"
                raise NotReady(f"{run.name} ({job.id}) took too long; it waits for: {waits}", code="run_timeout")
            cpu_now = self.cpu.seconds()
            if cpu_running is None and job.state == "running":
                cpu_running = cpu_now
            if job.state == "running" and time.monotonic() >= next_memory:
                next_memory = time.monotonic() + MEMORY_EVERY_SECONDS
                memory = max(memory, trainer_memory_bytes(self.platform))
            self.on_poll(run, job)
            time.sleep(POLL_SECONDS)
            job = self.client.get(job.id)
        cpu_ended = self.cpu.seconds()
        result = self._result(run, job, attempt) | {
            "trainer_memory_bytes": memory,
            "cpu_seconds": {
                "estimate": round(max(0.0, (cpu_running or cpu_ended) - cpu_began), 2),
                "train": round(max(0.0, cpu_ended - (cpu_running or cpu_ended)), 2),
            },
        }
        if training_task and job.state == "succeeded":
            result["on_training_problems"] = self._examine(job, training_task)
        path = result_path(self.folder, run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result) + "\n")
        remember_estimate(self.folder, run.document, result["cpu_seconds"]["estimate"])
        return result

    def _submit(self, document: ReadDocument, key: str) -> Job:
        """The job of a key, also that of a command that was interrupted; what else such a command left is cancelled."""
        job = self.client.submit(document, idempotency_key=key)
        while job.state == "cancelled":
            key += " again"
            job = self.client.submit(document, idempotency_key=key)
        for other in self.client.jobs():
            # It would have its turn first, and this run would seem to wait for nothing.
            if not other.is_final and other.id != job.id and other.name.partition("/")[0] in SETTINGS:
                with contextlib.suppress(Conflict):
                    self.client.cancel(other.id)
        return job

    def _examine(self, job: Job, tasks: ReadDocument) -> Document:
        asked = self.client.request_evaluation(job.id, tasks=tasks, samples=EVALUATION_SAMPLES, ks=[1])
        asked = self.client.wait_evaluation(asked.id, LONGEST_RUN_SECONDS)
        if asked.result is None:
            raise InternalError(f"evaluation {asked.id}: {asked.failure.get('message')}")
        return asked.result.model_dump(exclude={"per_problem"})

    def _result(self, run: PlannedRun, job: Job, attempt: int) -> Document:
        events = self.client.history(job.id)
        series = self.client.metrics(job.id, max_points=CURVE_POINTS)
        return {
            "name": run.name,
            "setting": run.setting,
            "method": run.method,
            "seed": run.seed,
            "document": run.document,
            "attempt": attempt,
            "job_id": job.id,
            "state": job.state,
            "failure": job.failure and job.failure.model_dump(),
            "evaluations": [_compact(evaluation) for evaluation in self.client.evaluations(job.id)],
            "seconds": {
                "estimate": seconds_between(events, "estimating", "running"),
                "train": _training_seconds(events),
            },
            "rollouts": rollouts(self.platform, job.id, job.spec),
            "curves": {
                "step": series.steps,
                **{name: series.series[name] for name in CURVES if name in series.series},
            },
            "happened": [
                event.model_dump() for event in events if event.kind not in (*USUAL_EVENTS, "adopted", "replica_joined")
            ][-50:],
        }


def result_path(folder: Path, run: PlannedRun) -> Path:
    """Where a run's result is kept."""
    return folder / "runs" / f"{run.name.replace('/', '--')}.json"


def stored_result(folder: Path, run: PlannedRun) -> Document | None:
    """The result of a run that succeeded with this very document, else None."""
    path = result_path(folder, run)
    if not path.exists():
        return None
    result: Document = json.loads(path.read_text())
    same = result["document"] == json.loads(json.dumps(run.document))
    return result if same and result["state"] == "succeeded" else None


def _attempt(folder: Path, run: PlannedRun) -> int:
    path = result_path(folder, run)
    return int(json.loads(path.read_text())["attempt"]) + 1 if path.exists() else 1


def _digest(document: ReadDocument) -> str:
    return redis_keys.digest(json.dumps(document, sort_keys=True))[:16]


def _compact(evaluation: StepEvaluation) -> Document:
    """An evaluation with its table of problems as columns."""
    columns = {
        "samples": [score.samples for score in evaluation.per_problem],
        "correct": [score.correct for score in evaluation.per_problem],
        "distinct": [score.distinct for score in evaluation.per_problem],
        "public_only": [score.public_only for score in evaluation.per_problem],
    }
    return {**evaluation.model_dump(exclude={"per_problem"}), "per_problem": columns}


def _training_seconds(events: Sequence[Event]) -> float | None:
    """From the first step the trainer could take to the last it took, without the evaluation after it."""
    begins = [event.at for event in events if event.kind == "state" and event.body.get("to") == "running"]
    ends = [event.at for event in events if event.kind == "training_ended"]
    if not begins or not ends:
        return None
    return round((datetime.fromisoformat(ends[-1]) - datetime.fromisoformat(begins[0])).total_seconds(), 2)


def run_reproduce(*, quick: bool, seeds: int | None, pattern: str, only: Sequence[str]) -> None:
    """Carry out what has no result yet and write the report; exits 7 when a run did not succeed. Raises SpoError."""
    configure_logs("launcher", level="error", log_format="console")
    planned = chosen_runs(quick=quick, seeds=seeds, pattern=pattern, only=only)
    settings = LauncherSettings()
    folder = settings.runs_path / (f"{NAME}-quick" if quick else NAME)
    began = time.monotonic()
    try:
        with signals_interrupt():
            _carry_out(planned, folder, settings)
    except Interrupted:
        console.print("interrupted; everything is stopped, finished runs are kept, the same command goes on")
        raise SystemExit(ExitCode.INTERRUPTED) from None
    kept = [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*.json"))]
    # Part of the plan is run to look at that part: the benchmark would take longer than it.
    memory = kept_memory(folder) if pattern or only else measured_memory(folder)
    report = write_report(
        Results(kept, remembered_estimates(folder)), memory, folder, quick=quick, wall_seconds=time.monotonic() - began
    )
    console.print(f"report: {escape(str(folder / 'report.md'))}, report.json and plots", highlight=False)
    for verdict, count in report["verdicts"].items():
        console.print(f"  {verdict}: {count} claims", highlight=False)
    missing = [run.name for run in planned if stored_result(folder, run) is None]
    if missing:
        console.print(f"without a result: {', '.join(missing)}; the same command tries them again", style="yellow")
        raise SystemExit(ExitCode.JOB_DID_NOT_SUCCEED)


def chosen_runs(*, quick: bool, seeds: int | None, pattern: str, only: Sequence[str]) -> list[PlannedRun]:
    """The planned runs whose name matches and whose setting is among `only` (all, when empty). Raises InvalidInput."""
    if set(only) - set(SETTINGS):
        raise InvalidInput(f"--only takes {', '.join(SETTINGS)}", code="unknown_setting")
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise InvalidInput(f"{pattern!r} is no regular expression: {error}", code="bad_pattern") from None
    size = QUICK if quick else FULL
    planned = runs(replace(size, seeds=seeds or size.seeds), quick=quick)
    chosen = [run for run in planned if wanted.search(run.name) and (not only or run.setting in only)]
    if not chosen:
        raise InvalidInput("no planned run is called like that", code="no_runs")
    return chosen


def _carry_out(planned: Sequence[PlannedRun], folder: Path, settings: LauncherSettings) -> None:
    todo = [run for run in planned if stored_result(folder, run) is None]
    if not todo:
        return
    with (
        _platform(folder, settings, {run.difficulty for run in todo}) as (platform, builds),
        RunProgress(console, planned, done=len(planned) - len(todo)) as progress,
    ):
        platform.wait_until_ready(progress.starting)
        with Client(platform.http_url) as client:
            executor = RunExecutor(platform, client, folder, progress.show)
            for run in todo:
                progress.begin(run)
                _carry_out_one(executor, run, _model(builds[run.difficulty], progress))
                progress.finish(run, stored_result(folder, run))


def _carry_out_one(executor: RunExecutor, run: PlannedRun, model: Path) -> None:
    """A run that is refused or does not end is told of and leaves the others their turn."""
    document: Document = merged(run.document, {"model": {"path": str(model)}})
    try:
        if run.setting == "contaminated":
            place = str(executor.platform.state_path.absolute() / "experience")
            document = contaminate(document, executor.folder / "tasks", place)
        executor.carry_out(run, document, training_task(document) if run.setting == "contaminated" else None)
    except SpoError as error:
        console.print(f"{run.name}:")
        print_error(error)


@contextmanager
def _platform(
    folder: Path, settings: LauncherSettings, difficulties: set[Difficulty]
) -> Iterator[tuple[LocalPlatform, dict[Difficulty, ReferenceModelBuild]]]:
    cache = PlatformSettings().state_path / "cache" / "models"
    with LocalPlatform(folder.name, folder / "state", settings) as platform:
        builds: dict[Difficulty, ReferenceModelBuild] = {
            difficulty: ReferenceModelBuild(cache, difficulty, folder / "logs" / f"reference-model-{difficulty}.log")
            for difficulty in sorted(difficulties, reverse=True)
        }
        try:
            yield platform, builds
        finally:
            for build in builds.values():
                build.stop()


def _model(build: ReferenceModelBuild, progress: RunProgress) -> Path:
    deadline = time.monotonic() + MODEL_SECONDS
    while time.monotonic() < deadline:
        path = build.result(timeout_seconds=0.5)
        if path:
            return path
        progress.building(build.done, build.total)
    raise InvalidInput(f"pi0 was not built within {MODEL_SECONDS:g} s; see {build.log_path}", code="model_timeout")
