"""README's results table, from a committed report: nobody types numbers in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spo.console import console
from spo.errors import InvalidInput

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
SETTINGS = {"p160": "160 problems", "p32": "32 problems", "hard": "hard", "contaminated": "contaminated"}


def write_readme_table(report_path: Path, readme: Path) -> None:
    """Replace what is between the two markers. Raises InvalidInput naming what is missing."""
    try:
        report = json.loads(report_path.read_text())
        text = readme.read_text()
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read it: {error}", code="unreadable_report") from None
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InvalidInput(f"{readme} needs the lines {BEGIN} and {END}, once each", code="no_markers")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(before + BEGIN + "\n" + "\n".join(table_lines(report, report_path)) + "\n" + END + after)
    console.print(f"{readme} has the results of {report_path}")


def table_lines(report: Mapping[str, Any], report_path: Path) -> Iterator[str]:
    """The table: held-out pass@1 / pass@10 per method and setting, with the machine and the versions behind it."""
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
    yield f"± is half the 95 % interval of pass@10; a row has {several} seeds, as the report says."
    yield f"Claims: {counts}. {'QUICK run, which decides nothing. ' if report['quick'] else ''}"
    at = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in at["versions"].items() if version)
    yield (
        f"Made by `make reproduce` ([{report_path.as_posix()}]({report_path.as_posix()})) on {at['processor']}, "
        f"{at['cores']} cores, Python {at['python']}, {versions}, {at['at']}."
    )


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["pass@1"] is None:
        return ""
    half = (row["pass@10"]["high"] - row["pass@10"]["low"]) / 2
    return f"{row['pass@1']['mean']:.2f} / {row['pass@10']['mean']:.2f} ± {half:.2f}"
