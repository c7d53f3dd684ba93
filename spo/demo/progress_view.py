"""The live picture of a demo: state, estimation, steps, scores so far, queues, restarts, memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spo.client.models import Job, MetricSeries, StepEvaluation
from spo.local.child import ChildStatus

PLAIN_EVERY_SECONDS = 10.0
SHOWN_METRICS = ("reward", "loss", "kl_to_reference")
SHOWN_QUEUES = ("estimates", "prompts", "rollouts", "verdicts")


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
            f"values {progress.values_done}/{progress.values_total or '?'}"
            + (f" and {progress.values_provisional} provisional" if progress.values_provisional else ""),
            f"step {progress.step}/{progress.steps}",
            _scores(snapshot.evaluations),
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


def _picture(snapshot: Snapshot, elapsed: float) -> RenderableType:
    job = snapshot.job
    heading = Text.assemble(("SPO demo ", "bold"), f"{job.id if job else ''}  ", (snapshot.stage, "cyan"))
    heading.append(f"  {elapsed:.0f} s  {snapshot.memory_bytes / 2**30:.1f} GiB")
    rows: list[RenderableType] = [heading, _bars(snapshot)]
    if snapshot.evaluations:
        rows.append(_curve(snapshot.evaluations))
    if job:
        rows.append(Text(_numbers(snapshot)))
        rows += [Text(f"  {reason}", style="yellow") for reason in job.waits[:3]]
    rows.append(_services(snapshot))
    return Group(*rows)


def _bars(snapshot: Snapshot) -> Table:
    bars = Table.grid(padding=(0, 1))
    if snapshot.job is None:
        bars.add_row("pi0", *_bar(snapshot.model_done, snapshot.model_total))
    else:
        progress = snapshot.job.progress
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
