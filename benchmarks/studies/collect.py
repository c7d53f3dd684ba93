"""What the runs came to: tables with intervals, a picture, and the counts of each problem, below a folder.

Intervals are 95 % bootstraps over seeds and held-out problems together, as in the report; of runs that remember
Student's t over seeds, since a bootstrap of three seeds covers less than it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.contest import EVALUATION_SAMPLES
from benchmarks.studies.memory import RATES, SETTINGS, best_rate, run_of
from spo.reproduce.report import Estimate, mean_score, score_table

Result = dict[str, Any]

# Student's t at .975 for 2, 3, ... seeds.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def results(folder: Path, document: Path | None = None) -> list[Result]:
    """All that were kept in the folder, and those of a written document that have no file there."""
    found = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if document is None or not document.exists():
        return list(found.values())
    written = [each for each in json.loads(document.read_text())["runs"] if run_of(each).name + ".json" not in found]
    return [*written, *found.values()]


def write(study: str, folder: Path, documents: Path) -> None:
    """The document and, of the ages of samples, the picture, among the results in `documents`; prints the table."""
    path = documents / f"{study}.json"
    found = results(folder, path if study == "memory" else None)
    before = json.loads(path.read_text()) if path.exists() else {}
    runs = {"samples_per_problem": EVALUATION_SAMPLES, "runs": found}
    path.write_text(json.dumps({**before, **runs}) + "\n")
    if study == "memory":
        print("\n".join(remembering_table(found)))
        draw_memory(found, documents / "memory.png")
        return
    fields = [name for name in ("method", "lag", "rate") if name in found[0]]
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


def remembering_table(found: Sequence[Result]) -> list[str]:
    """Runs that remember: a row for each contestant with its rate, with how wide its search was."""
    lines = [
        "| problems, contestant | rate (searched) | seeds | pass@1 | pass@10 | T 1 | ever solved | distinct | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    reported = [each for each in found if not each.get("searched")]
    for name, runs in by(reported, "setting", "contestant", "rate").items():
        title, _, rate = name.rpartition(", ")
        searched = sorted(
            each["rate"]
            for each in found
            if each.get("searched") and all(each[key] == runs[0][key] for key in ("setting", "contestant"))
        )
        bounds = f"{searched[0]:g} to {searched[-1]:g}" if searched else "not"
        at_one, solved, distinct = (_mean_of(runs, *each) for each in (("at_one", 2), ("solved", 0), ("distinct", 1)))
        cpu = sum(each["cpu_seconds"] for each in runs) / len(runs)
        scores = " | ".join(_by_seeds([_mean_pass(each, k) for each in runs]) for k in (1, 10))
        lines.append(
            f"| {title} | {rate} ({bounds}) | {len(runs)} | {scores} | {at_one} | {solved} | {distinct} | {cpu:.0f} |"
        )
    return lines


def _mean_of(runs: Sequence[Result], field: str, digits: int) -> str:
    """Of what runs came to at their end; nothing where one does not say (TRL's trainers and what they solved)."""
    if not all(each[field] for each in runs):
        return ""
    return f"{sum(last(each, field) for each in runs) / len(runs):.{digits}f}"


def last(result: Result, field: str) -> float:
    """What a run came to at its end."""
    return float(list(result[field].values())[-1])


def _mean_pass(result: Result, k: int, step: str | None = None) -> float:
    correct = result["correct"][step or list(result["correct"])[-1]]
    return mean_score(score_table([correct], [[EVALUATION_SAMPLES] * len(correct)], k)).mean


def _by_seeds(scores: Sequence[float]) -> str:
    """Mean and half of the 95 % interval by Student's t, which of one seed there is none of."""
    mean = sum(scores) / len(scores)
    if len(scores) < 2:
        return f"{mean:.3f}"
    deviation = (sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) ** 0.5
    return f"{mean:.3f} ± {T_975[len(scores) - 2] * deviation / len(scores) ** 0.5:.3f}"


def draw_memory(found: Sequence[Result], path: Path) -> None:
    """A row of pictures for each set of problems: the searches of rates, and pass@10 over rollouts at the best."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(16, 11), constrained_layout=True)
    for (searching, learning), setting in zip(axes, SETTINGS, strict=True):
        runs = [each for each in found if each["setting"] == setting]
        # What was tried on the search's problems alone is in the document.
        reported = {each["contestant"] for each in runs if not each.get("searched")}
        names = sorted(reported & {each["contestant"] for each in runs if each.get("searched")})
        for number, name in enumerate(names):
            color = pyplot.get_cmap("tab20")(number)
            _draw_contestant([each for each in runs if each["contestant"] == name], searching, learning, color)
        searching.set(xscale="log", xlabel="rate", ylabel=f"{setting}: pass@10 on the search's problems")
        learning.set(xlabel="rollouts", ylabel=f"{setting}: held-out pass@10")
        searching.grid(alpha=0.3)
        learning.grid(alpha=0.3)
        lines, labels = searching.get_legend_handles_labels()
        learning.legend(lines, labels, fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=70)
    pyplot.close(figure)


def _draw_contestant(runs: Sequence[Result], searching: Any, learning: Any, color: Any) -> None:
    """A contestant's search, and its seeds at its best rate; a thin line is a seed, a dot was examined at its end."""
    searched: dict[float, dict[int, float]] = {}
    for each in runs:
        if each.get("searched"):
            searched.setdefault(each["rate"], {})[each["seed"]] = _mean_pass(each, 10)
    rates = [rate for rate in RATES if rate in searched]
    scores = [sum(searched[rate].values()) / len(searched[rate]) for rate in rates]
    best = best_rate(searched)
    seeds = [each for each in runs if not each.get("searched") and each["rate"] == best]
    searching.plot(rates, scores, marker="o", color=color, label=f"{runs[0]['contestant']} ({len(seeds)} seeds)")
    curves = [[_mean_pass(each, 10, step) for step in each["correct"]] for each in seeds]
    if curves:
        rollouts = [int(step) * seeds[0]["rollouts"] / seeds[0]["steps"] for step in seeds[0]["correct"]]
        for curve in curves:
            learning.plot(rollouts, curve, color=color, alpha=0.25)
        means = [sum(each) / len(each) for each in zip(*curves, strict=True)]
        learning.plot(rollouts, means, marker="o", color=color, linewidth=2)


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
