"""What the runs came to: tables with intervals, a picture, and the counts of each problem, below a folder.

Intervals are 95 % bootstraps over seeds and held-out problems together, as in the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.contest import EVALUATION_SAMPLES
from spo.reproduce.report import Estimate, mean_score, score_table

Result = dict[str, Any]


def results(folder: Path) -> list[Result]:
    """All that were kept."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def write(study: str, folder: Path, documents: Path) -> None:
    """The document and, of the ages of samples, the picture, among the results in `documents`; prints the table."""
    found = results(folder)
    path = documents / f"{study}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    runs = {"samples_per_problem": EVALUATION_SAMPLES, "runs": found}
    path.write_text(json.dumps({**before, **runs}) + "\n")
    names = ("setting", "contestant") if study == "memory" else ("method", "lag", "rate")
    fields = [name for name in names if name in found[0]]
    print("\n".join(table(", ".join(fields), by(found, *fields))))
    if study == "staleness":
        draw(found, documents / f"{study}.png")


def estimate(found: Sequence[Result], k: int) -> Estimate:
    """pass@k after the last step, over seeds and problems."""
    correct = [list(each["correct"].values())[-1] for each in found]
    return mean_score(score_table(correct, [[EVALUATION_SAMPLES] * len(row) for row in correct], k))


def table(title: str, found: Mapping[str, Sequence[Result]]) -> list[str]:
    """A row for each name."""
    lines = [f"| {title} | seeds | pass@1 | pass@10 |", "|---|---|---|---|"]
    for name, runs in found.items():
        one, ten = estimate(runs, 1), estimate(runs, 10)
        lines.append(f"| {name} | {len(runs)} | {_said(one)} | {_said(ten)} |")
    return lines


def by(found: Iterable[Result], *names: str) -> dict[str, list[Result]]:
    """Results in groups of equal fields."""
    groups: dict[str, list[Result]] = {}
    for each in found:
        groups.setdefault(
            ", ".join(f"{each[name]:g}" if name in ("rate", "lag") else str(each[name]) for name in names), []
        ).append(each)
    return groups


def draw(found: Sequence[Result], path: Path) -> None:
    """pass@1 and pass@10 against the lag, a line for each method at the rate with most seeds, all rates as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    lags = sorted({each["lag"] for each in found})
    for axis, k in zip(axes, (1, 10), strict=True):
        for number, (method, runs) in enumerate(by(found, "method").items()):
            heights = []
            for place, lag in enumerate(lags):
                at_lag = [list(each) for each in by([run for run in runs if run["lag"] == lag], "rate").values()]
                scores = [estimate(each, k) for each in at_lag]
                axis.plot([place] * len(scores), [score.mean for score in scores], ".", color=f"C{number}", alpha=0.4)
                best = max(zip(at_lag, scores, strict=True), key=_rank, default=None)
                if best is not None:
                    heights.append((place, best[1]))
            places, best_scores = zip(*heights, strict=True)
            means = [score.mean for score in best_scores]
            bounds = [
                [score.mean - score.low for score in best_scores],
                [score.high - score.mean for score in best_scores],
            ]
            shifted = [place + 0.06 * (number - 1) for place in places]
            axis.errorbar(shifted, means, bounds, marker="o", capsize=3, color=f"C{number}", label=method)
        axis.set(
            xticks=range(len(lags)),
            xticklabels=lags,
            xlabel="age of samples, optimizer steps",
            ylabel=f"held-out pass@{k}",
        )
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _rank(pair: tuple[Sequence[Result], Estimate]) -> tuple[int, float]:
    """The rate that was chosen has been run with more seeds than the others."""
    return len(pair[0]), estimate(pair[0], 10).mean


def _said(found: Estimate) -> str:
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"
