"""The finished runs as the report reads them: rows of seeds, their scores, and what they cost."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spo.reproduce.statistics import Scores, score_table

Result = Mapping[str, Any]


class Results:
    """All results, by setting and method; only runs that succeeded have scores.

    estimates: CPU seconds by `value_key` of estimates whose runs may have been replaced since.
    """

    def __init__(self, found: Iterable[Result], estimates: Mapping[str, float] | None = None) -> None:
        self.all = sorted(found, key=lambda run: (run["setting"], run["method"], run["seed"]))
        self._rows: dict[tuple[str, str], list[Result]] = defaultdict(list)
        self._estimates: dict[str, float] = defaultdict(float, estimates or {})
        for run in self.all:
            if run["state"] == "succeeded":
                self._rows[run["setting"], run["method"]].append(run)
                key = value_key(run["document"])
                self._estimates[key] = max(self._estimates[key], run["cpu_seconds"]["estimate"])

    def methods(self, setting: str) -> list[str]:
        return [method for place, method in self._rows if place == setting]

    def row(self, setting: str, method: str) -> Sequence[Result]:
        """The method's runs, one per seed; empty when none succeeded."""
        return self._rows.get((setting, method), [])

    def scores(self, setting: str, method: str, k: int) -> Scores | None:
        """pass@k of the last evaluation by seed and problem; None without runs."""
        tables = [run["evaluations"][-1]["per_problem"] for run in self.row(setting, method) if run["evaluations"]]
        if not tables:
            return None
        return score_table([table["correct"] for table in tables], [table["samples"] for table in tables], k)

    def estimate_cpu_seconds(self, result: Result) -> float:
        """What the values and labels behind a run cost whoever estimated them first; 0 for a run that reads none."""
        value = result["document"].get("value")
        if not value:
            return 0.0
        cost = self._estimates[value_key(result["document"])]
        # A search for pivotal tokens starts from values that a run without one has paid for.
        plain = {**result["document"], "value": {**value, "pivotal": None}}
        return cost + (self._estimates[value_key(plain)] if value.get("pivotal") else 0.0)

    def settings(self) -> list[str]:
        """Those with at least one run that succeeded."""
        return list(dict.fromkeys(place for place, _ in self._rows))


def last(result: Result, name: str) -> float:
    """A number of a run's last evaluation."""
    return float(result["evaluations"][-1][name])


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def total_rollouts(result: Result) -> int:
    """Everything sampled for a run, online and from pi0, whoever sampled it."""
    return int(sum(result["rollouts"].values()))


ESTIMATES = "estimates.json"


def remembered_estimates(folder: Path) -> dict[str, float]:
    """The dearest estimate of each key so far."""
    path = folder / ESTIMATES
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found


def remember_estimate(folder: Path, document: Mapping[str, Any], cpu_seconds: float) -> None:
    """Keep what an estimate cost: a run that is repeated finds the values there, and would seem to get them free."""
    known = remembered_estimates(folder)
    key = value_key(document)
    known[key] = max(known.get(key, 0.0), cpu_seconds)
    (folder / ESTIMATES).write_text(json.dumps(known, indent=1) + "\n")


def value_key(document: Mapping[str, Any]) -> str:
    """Runs with the same key share values and labels: the same problems, sampled alike."""
    value = document.get("value")
    pivotal = (value or {}).get("pivotal") or {}
    kept = {name: setting for name, setting in pivotal.items() if name != "keep_rollouts"}
    tasks = {name: setting for name, setting in document["tasks"].items() if name != "evaluation_problems"}
    return json.dumps([{**value, "pivotal": kept or None} if value else None, tasks], sort_keys=True)
