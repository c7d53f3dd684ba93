"""A bar for waits: how far a job is, in a terminal or a notebook. `client.wait(job_id, 600, ProgressBar())`."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spo.client.models import Job

ESTIMATING = ("queued", "validating", "estimating")


# Columns of a terminal: the bar, counts, both times and the spaces between; what stays for words in any case.
BAR_AND_TIMES, SHORTEST_DESCRIPTION = 46, 20


class ProgressBar:
    """Called with a job every second, as `wait` does; values first, then steps. It closes itself when the job ends."""

    def __init__(self, console: Console | None = None) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=14),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        shown = console or Console(stderr=True)
        # rich would need widgets in a notebook; text that is replaced does without.
        self._notebook = _ReplacedText() if shown.is_jupyter else None
        quiet = not shown.is_terminal or shown.is_jupyter
        self._progress = Progress(*columns, console=shown, transient=True, disable=quiet)
        self._bar = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, job: Job) -> None:
        """Show how far the job is."""
        if not self._progress.live.is_started:
            self._progress.start()
        far = job.progress
        estimating = job.state in ESTIMATING
        done, total = (far.values_done, far.values_total) if estimating else (far.step, far.steps)
        waits = f", {job.waits[0]}" if job.waits else ""
        beside = f" beside values {far.values_done}/{far.values_total}" if far.values_pending else ""
        # A job that reads no values has none to wait for.
        counted = ("values" if total else "") if estimating else "steps"
        what = f"{job.state}: {counted}{beside}{waits}" if counted else f"{job.state}{beside}{waits}"
        long = f"{job.id} {what}"
        # The bar and both times stay on the line, however narrow the terminal is.
        room = max(SHORTEST_DESCRIPTION, self._progress.console.width - BAR_AND_TIMES)
        shown = long if len(long) <= room else what
        self._progress.update(self._bar, description=_whole_words(shown, room), completed=done, total=total or None)
        if self._notebook:
            self._notebook.show(self._progress.get_renderable())
        if job.is_final:
            self._progress.stop()


def _whole_words(text: str, most: int) -> str:
    """As much of a text as `most` characters hold, cut between words; what is left out shows as three dots."""
    if len(text) <= most:
        return text
    begun = text[: most - 2]
    return f"{(begun.rpartition(' ')[0] or begun[:-1]).rstrip(' :,;')}..."


class LinesNowAndThen:
    """What a bar says, as lines of a log: one for each state, and one a minute."""

    def __init__(self, console: Console, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._seconds, self._clock = console, seconds, clock
        self._said: tuple[str, float] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, job: Job) -> None:
        """Say how far the job is, where that is worth a line."""
        now = self._clock()
        if self._said and self._said[0] == job.state and now - self._said[1] < self._seconds:
            return
        self._said = job.state, now
        far = job.progress
        waits = f", {job.waits[0]}" if job.waits else ""
        counted = f"step {far.step} of {far.steps}"
        if far.values_total and job.state in ESTIMATING:
            counted = f"values {far.values_done} of {far.values_total}"
        elif far.values_pending:
            counted += f" beside values {far.values_done} of {far.values_total}"
        words = f"{job.id} {job.state}: {counted}{waits}"
        self._console.print(words, markup=False, highlight=False, soft_wrap=True)


class _ReplacedText:
    """One output of a notebook's cell, each time replaced."""

    def __init__(self) -> None:
        self._shown: Any = None

    def show(self, what: RenderableType) -> None:
        display: Any = import_module("IPython.display").display
        written = Console(file=io.StringIO(), width=120, color_system=None, force_jupyter=False)
        with written.capture() as text:
            written.print(what)
        output = {"text/plain": text.get().rstrip()}
        if self._shown is None:
            self._shown = display(output, raw=True, display_id=True)
        else:
            self._shown.update(output, raw=True)
