"""pass@10 over CPU seconds, a curve per contestant and seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.race.course import Course
from benchmarks.race.rows import SCORES


def draw(courses: Sequence[Course], path: Path) -> None:
    """Every course; those of a contestant share a colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 5.5))
    names = list(dict.fromkeys(course.contestant for course in courses))
    for course in courses:
        number = names.index(course.contestant)
        first = course is next(each for each in courses if each.contestant == course.contestant)
        seconds, scores = [p.cpu_seconds for p in course.points], [p.pass_at_10 for p in course.points]
        label = course.contestant if first else None
        axis.plot(seconds, scores, marker=".", alpha=0.8, color=f"C{number}", label=label)
    for score in SCORES:
        axis.axhline(score, color="grey", linestyle=":")
    axis.set(xlabel="CPU seconds of all processes, evaluation and start aside", ylabel="held-out pass@10")
    axis.set_xscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
