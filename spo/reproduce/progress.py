"""How far the plan is: a bar with the time that is left, and what the run under way is doing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from spo.client.models import Job
from spo.reproduce.plan import PlannedRun

# A run costs this much beside its steps, in steps.
FIXED_STEPS = 40
PLAIN_EVERY_SECONDS = 15.0


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

    def finish(self, run: PlannedRun, result: Mapping[str, Any] | None) -> None:
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


def _outcome(result: Mapping[str, Any] | None) -> str:
    if result is None or not result["evaluations"]:
        return "no result"
    scores = result["evaluations"][-1]["pass_at_k"]
    return ", ".join(f"pass@{k} {score['value']:.2f}" for k, score in scores.items())
