"""The report's first table: held-out pass@1 / pass@10 of every method in the main settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SETTINGS = {"p160": "160 problems", "p32": "32 problems", "hard": "hard", "contaminated": "contaminated"}


def overview(report: Mapping[str, Any]) -> Iterator[str]:
    """Markdown lines: a row per method, a column per setting, and the versions behind the figures."""
    rows = {setting: {row["method"]: row for row in report["tables"].get(setting, ())} for setting in SETTINGS}
    methods = list(dict.fromkeys(method for found in rows.values() for method in found))
    yield "| pass@1 / pass@10 | " + " | ".join(SETTINGS.values()) + " |"
    yield "|---" * (len(SETTINGS) + 1) + "|"
    for method in methods:
        yield f"| {method} | " + " | ".join(_cell(rows[setting].get(method)) for setting in SETTINGS) + " |"
    yield ""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(report["verdicts"].items()))
    seeds = {row["seeds"] for found in rows.values() for row in found.values()} or {0}
    several = str(min(seeds)) if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
    versions = ", ".join(f"{name} {version}" for name, version in report["machine"]["versions"].items() if version)
    yield f"± is half the 95 % interval of pass@10; a row has {several} seeds. Claims: {counts}. {versions}."


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["pass@1"] is None:
        return ""
    half = (row["pass@10"]["high"] - row["pass@10"]["low"]) / 2
    return f"{row['pass@1']['mean']:.2f} / {row['pass@10']['mean']:.2f} ± {half:.2f}"
