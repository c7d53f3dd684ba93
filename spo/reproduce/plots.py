"""The paper's two figures with our curves, and one of the settings it does not have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spo.reproduce.results import Result, Results

Row = tuple[str, str]
FIG_1 = ("half_online_cross_entropy", "half_online_squared", "online_cross_entropy", "online_squared", "ppo")
FIG_2: dict[str, tuple[Row, ...]] = {
    "(a) terminal losses": (("2a", "squared"), ("2a", "cross_entropy"), ("2a", "sigmoid")),
    "(b) reverse-Q targets": (
        ("2a", "squared"),
        ("2a", "cross_entropy"),
        ("2b", "reverse_q_squared"),
        ("2b", "reverse_q_cross_entropy"),
    ),
    "(c) Monte-Carlo targets": (("2c", "monte_carlo"), ("2c", "baseline"), ("2c", "rollouts")),
}


def draw_plots(results: Results, folder: Path) -> list[Path]:
    """Write fig1.png, fig2.png and stability.png, as far as there are runs, and return their paths."""
    # Only drawing needs matplotlib, which the light roles do without.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure_1 = {
        f"{setting}: pass@{k}": (k, tuple((setting, method) for method in FIG_1))
        for setting in ("p160", "p32")
        for k in (10, 1)
    }
    figure_2 = {title: (10, rows) for title, rows in FIG_2.items()}
    long = {"pass@1": (1, tuple(("stability", method) for method in results.methods("stability")))}
    drawn = []
    for name, panels in (("fig1", figure_1), ("fig2", figure_2), ("stability", long)):
        shown = {title: panel for title, panel in panels.items() if any(results.row(*row) for row in panel[1])}
        if not shown:
            continue
        figure, axes = pyplot.subplots(1, len(shown), figsize=(5 * len(shown), 4), squeeze=False, layout="constrained")
        for axis, (title, (k, rows)) in zip(axes[0], shown.items(), strict=True):
            _draw(axis, title, [(method, results.row(setting, method)) for setting, method in rows], k)
        drawn.append(folder / f"{name}.png")
        figure.savefig(drawn[-1], dpi=110)
        pyplot.close(figure)
    return drawn


def _draw(axis: Any, title: str, rows: Sequence[tuple[str, Sequence[Result]]], k: int) -> None:
    """The mean over seeds, and their range."""
    for method, runs in rows:
        curves = [[evaluation["pass_at_k"][str(k)]["value"] for evaluation in run["evaluations"]] for run in runs]
        if not curves:
            continue
        shortest = min(map(len, curves))
        steps = [evaluation["step"] for evaluation in runs[0]["evaluations"][:shortest]]
        values = np.array([curve[:shortest] for curve in curves])
        (line,) = axis.plot(steps, values.mean(axis=0), marker="o", markersize=3, label=method)
        axis.fill_between(steps, values.min(axis=0), values.max(axis=0), alpha=0.15, color=line.get_color())
    axis.set(title=title, xlabel="step", ylabel=f"pass@{k}", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
