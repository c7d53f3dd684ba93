"""Claims from courses: CPU seconds to a pass@10 against the best of GRPO's settings, with an interval of each ratio."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from scipy import stats

from benchmarks.frame import Row
from benchmarks.race.contestants import FIRST, SECOND
from benchmarks.race.course import Course

SCORES = (0.80, 0.90)
FACTORS = {FIRST: 4.0, SECOND: 12.0}
LEVEL = 0.95


def best_setting(courses: Sequence[Course], searched: Sequence[str], score: float = SCORES[0]) -> str:
    """The searched contestant that was cheapest to `score` with the search's seed 0, those that missed it last."""
    found = [each for each in courses if each.contestant in searched and each.seed == 0]
    # Of those that missed it, the one that came nearest.
    return min(found, key=lambda each: (not each.until(score)[1], _price(each, score))).contestant


def _price(course: Course, score: float) -> float:
    seconds, reached = course.until(score)
    return seconds if reached else -course.best().pass_at_10


def claims(courses: Sequence[Course], peer: str) -> list[Row]:
    """Medians over seeds; a contestant that misses the goal with any seed has no ratio."""
    found = []
    for score in SCORES:
        theirs, always = _all(courses, peer, score)
        for contestant, factor in FACTORS.items():
            ours, reached = _all(courses, contestant, score)
            if not ours or not theirs:
                continue
            own, other = statistics.median(ours), statistics.median(theirs)
            what = f"to pass@10 {score:.2f}, {contestant}, {len(ours)} seeds" + ("" if reached else " (missed)")
            yardstick = f"{peer}, {len(theirs)} seeds" + ("" if always else " (missed, so at least)")
            ratio = other / own if reached else 0.0
            found.append(Row(what, own, "CPU s", yardstick, other, ratio, factor, ratio >= factor))
    return found


def intervals(courses: Sequence[Course], peer: str) -> list[dict[str, Any]]:
    """Of each claim the ratio of geometric means, its interval over seeds, and the ends over all pairs of seeds."""
    found = []
    for score in SCORES:
        theirs, always = _all(courses, peer, score)
        for contestant in FACTORS:
            ours, reached = _all(courses, contestant, score)
            if min(len(ours), len(theirs)) < 2 or not reached:
                continue
            ratio, low, high = ratio_interval(theirs, ours)
            pairs = sorted(other / own for other in theirs for own in ours)
            row = {"score": score, "contestant": contestant, "at_least": not always, "ratio": ratio}
            found.append(row | {"low": low, "high": high, "pairs": [pairs[0], pairs[-1]]})
    return found


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of geometric means with its 95 % interval: Welch's t on logarithms, two or more of each."""
    logs = [[math.log(each) for each in group] for group in (above, below)]
    middle = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    errors = [statistics.variance(group) / len(group) for group in logs]
    if not sum(errors):
        return (math.exp(middle),) * 3
    freedom = sum(errors) ** 2 / sum(error**2 / (len(group) - 1) for error, group in zip(errors, logs, strict=True))
    width = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(sum(errors))
    return math.exp(middle), math.exp(middle - width), math.exp(middle + width)


def table(courses: Sequence[Course]) -> str:
    """A line per contestant and seed, as Markdown; in brackets where the bounds of pass@10 cross .80."""
    lines = [
        "| contestant | seed | .80 after, CPU s | .90 after | best pass@10 | of CPU s | start | load |",
        "|" + "---|" * 8,
    ]
    for each in courses:
        best, spent = each.best(), each.points[-1].cpu_seconds
        early, late = (_said(*each.until(SCORES[0], bound)) for bound in ("high", "low"))
        lines.append(
            f"| {each.contestant} | {each.seed} | {_said(*each.until(SCORES[0]))} ({early} to {late}) "
            f"| {_said(*each.until(SCORES[1]))} | {best.pass_at_10:.3f} ({best.low:.2f} to {best.high:.2f}) "
            f"after {best.cpu_seconds:.1f} | {spent:.0f} | {each.start_cpu_seconds:.0f} | {each.load:.0f} |"
        )
    return "\n".join(lines)


def _said(seconds: float, reached: bool) -> str:
    return f"{seconds:.1f}" if reached else "missed"


def _all(courses: Sequence[Course], contestant: str, score: float) -> tuple[list[float], bool]:
    found = [each.until(score) for each in courses if each.contestant == contestant]
    return [seconds for seconds, _ in found], all(reached for _, reached in found)
