"""Answers of the API as columns, pandas frames and figures: pandas and matplotlib are used where they are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from pydantic import BaseModel

from spo.client.models import MetricSeries, StepEvaluation
from spo.errors import PreconditionFailed

if TYPE_CHECKING:
    from pandas import DataFrame

    from spo.client.figure import NotebookFigure

Columns = dict[str, list[object]]
PLOTTED = ("reward", "loss", "kl_to_reference")


def columns(answers: MetricSeries | Sequence[BaseModel]) -> Columns:
    """Columns of equal length by name, "a.b" for what lies in another document; what an answer lacks is None.

    Of a series the first column is its axis; a mapping becomes a column for each of its names, a list stays one value.
    """
    if isinstance(answers, MetricSeries):
        return {answers.axis: list(answers.steps), **{name: list(each) for name, each in answers.series.items()}}
    rows = [_flat(answer.model_dump(mode="json"), "") for answer in answers]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def frame(answers: MetricSeries | Sequence[BaseModel]) -> DataFrame:
    """The same as a pandas frame; of a series and of evaluations the step is its index.

    Raises PreconditionFailed (code "package_missing") where pandas is not installed.
    """
    made = _package("pandas").DataFrame(columns(answers))
    index = next((name for name in ("step", "unix_ms") if name in made.columns), None)
    indexed: DataFrame = made.set_index(index) if index and isinstance(answers, MetricSeries) else made
    if answers and not isinstance(answers, MetricSeries) and isinstance(answers[0], StepEvaluation):
        indexed = made.set_index("step")
    return indexed


def plot(
    metrics: MetricSeries, evaluations: Sequence[StepEvaluation] = (), names: Sequence[str] = PLOTTED
) -> NotebookFigure:
    """A figure with pass@k and its intervals, and one panel for each named curve that there is.

    Raises PreconditionFailed (code "package_missing") where matplotlib is not installed.
    """
    # An image has the name alone.
    _package("matplotlib.figure")
    from spo.client.figure import NotebookFigure

    shown = [name for name in names if metrics.series.get(name)]
    count = len(shown) + bool(evaluations)
    figure = NotebookFigure(figsize=(5 * max(1, count), 3.5), layout="constrained")
    panels = figure.subplots(1, max(1, count), squeeze=False)[0]
    if evaluations:
        steps = [evaluation.step for evaluation in evaluations]
        for k in evaluations[0].pass_at_k:
            scores = [evaluation.pass_at_k[k] for evaluation in evaluations]
            (line,) = panels[0].plot(steps, [score.value for score in scores], marker="o", label=f"pass@{k}")
            low, high = [score.low for score in scores], [score.high for score in scores]
            panels[0].fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
        panels[0].set(xlabel="step", title="held-out problems")
        panels[0].legend()
    for panel, name in zip(panels[bool(evaluations) :], shown, strict=False):
        panel.plot(metrics.steps, [float("nan") if each is None else each for each in metrics.series[name]])
        panel.set(xlabel=metrics.axis, title=name)
    return figure


def _flat(node: Mapping[str, object], prefix: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in node.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        message = f"{package} is not installed here: `pip install {package}`; spo.client.results.columns does without"
        raise PreconditionFailed(message, code="package_missing") from None
