"""`spo reproduce`: one platform, every run over REST, then the report.

    plan -> start services, build both pi0 -> runs without a result, one by one -> runs/reproduce/report.{json,md}

Interrupt it as you like: finished runs are kept, and the one that was under way goes on where it was.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from spo.client import Client
from spo.console import ExitCode, console, print_error
from spo.demo.demo import ReferenceModelBuild
from spo.errors import InvalidInput, SpoError
from spo.local.commands import Interrupted, signals_interrupt
from spo.local.launcher import LauncherSettings, LocalPlatform
from spo.observability.logs import configure_logs
from spo.reproduce.contamination import contaminate, training_task
from spo.reproduce.memory import kept_memory, measured_memory
from spo.reproduce.methods import Document, merged
from spo.reproduce.plan import (
    FULL,
    QUICK,
    SETTINGS,
    Difficulty,
    PlannedRun,
    runs,
)
from spo.reproduce.progress import RunProgress
from spo.reproduce.report import write_report
from spo.reproduce.results import Results, remembered_estimates
from spo.reproduce.run_executor import RunExecutor, stored_result
from spo.service.settings import PlatformSettings

NAME = "reproduce"
MODEL_SECONDS = 1800.0


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
