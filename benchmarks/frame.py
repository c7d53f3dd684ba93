"""How every benchmark of the platform measures and reports.

    python -m benchmarks.<name>          prints a table
    python -m benchmarks.<name> --json   prints one JSON object
    python -m benchmarks.<name> --smoke  smallest sizes, seconds: whether it still runs; its figures mean nothing
    python -m benchmarks                 runs all of them and writes benchmarks/results/<name>.json

Product and yardstick are measured in the same run, in turns, so that a noisy neighbour hits both; what is reported is
the median, with the spread between the quartiles beside it in the table. Where the machine is noisy, measure CPU time
(`CpuClock`) instead of wall time. A ratio above 1 always means that the product is better.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

DEFAULT_ROUNDS = 5

Measure = Callable[[], float]


def _alone() -> int | None:
    """With --json: where the object goes, and nothing else does.

    Libraries print when they are imported, which is after this module, and in processes of their own.
    """
    if "--json" not in sys.argv[1:] or Path(sys.argv[0]).resolve().parent != Path(__file__).resolve().parent:
        return None
    own = os.dup(1)
    os.dup2(2, 1)
    return own


_OBJECT = _alone()


@dataclass(frozen=True)
class Row:
    """One claim: the product's value, the yardstick's, and whether their ratio reaches the goal."""

    name: str
    value: float
    unit: str
    yardstick: str
    yardstick_value: float
    ratio: float
    goal: float
    holds: bool
    # Quartile distances of value and yardstick_value; for the table alone.
    spread: tuple[float, float] = field(default=(0.0, 0.0), compare=False)

    def to_json(self) -> dict[str, Any]:
        """The published keys."""
        return {name: value for name, value in asdict(self).items() if name != "spread"}


class CpuClock:
    """Seconds of CPU that this process and the named ones have used, read twice and subtracted."""

    def __init__(self, *others: int) -> None:
        self._others = [psutil.Process(pid) for pid in others]

    def seconds(self) -> float:
        # The kernel counts other processes in hundredths of a second, this one exactly.
        others = (process.cpu_times() for process in self._others)
        return time.process_time() + sum(times.user + times.system for times in others)


def compare(
    name: str,
    unit: str,
    yardstick: str,
    product: Measure,
    peer: Measure,
    *,
    goal: float,
    rounds: int = DEFAULT_ROUNDS,
    lower_is_better: bool = False,
    warm_up: bool = True,
) -> Row:
    """Measure product and peer in turns; goal is the least ratio that holds the claim.

    `warm_up`: one measurement of each beforehand does not count. The ratio is the median over rounds of product / peer
    (peer / product when lower_is_better).
    """
    if warm_up:
        product()
        peer()
    values, peers = [], []
    for number in range(rounds):
        # The order changes from round to round, so that drift favours neither.
        if number % 2:
            peers.append(peer())
            values.append(product())
        else:
            values.append(product())
            peers.append(peer())
    pairs = zip(values, peers, strict=True)
    ratio = statistics.median(other / own if lower_is_better else own / other for own, other in pairs)
    return Row(
        name,
        statistics.median(values),
        unit,
        yardstick,
        statistics.median(peers),
        ratio,
        goal,
        ratio >= goal,
        (_spread(values), _spread(peers)),
    )


def within(name: str, unit: str, measure: Measure, *, limit: float, rounds: int = DEFAULT_ROUNDS) -> Row:
    """A claim without a peer: the median of measure stays below a limit, which stands in as the yardstick."""
    values = [measure() for _ in range(rounds)]
    value = statistics.median(values)
    ratio = limit / value if value else float(sys.maxsize)
    return Row(name, value, unit, "limit", limit, ratio, 1.0, value <= limit, (_spread(values), 0.0))


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[2] - quartiles[0]


def machine() -> str:
    """The machine in one line: processor, cores, memory, Python."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores, {memory_gib:.0f} GiB, "
        f"Python {platform.python_version()}"
    )


def as_json(benchmark: str, rows: Sequence[Row]) -> str:
    """The JSON object of a benchmark."""
    return json.dumps({"benchmark": benchmark, "machine": machine(), "rows": [row.to_json() for row in rows]}, indent=2)


def as_table(benchmark: str, rows: Sequence[Row]) -> Table:
    """The table of a benchmark."""
    table = Table(title=f"{benchmark} ({machine()})")
    for heading in ("what", "value", "unit", "yardstick", "its value", "ratio", "goal", "holds"):
        table.add_column(heading, justify="left" if heading in ("what", "unit", "yardstick") else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.value:,.4g} ± {row.spread[0] / 2:,.2g}",
            row.unit,
            row.yardstick,
            f"{row.yardstick_value:,.4g} ± {row.spread[1] / 2:,.2g}",
            f"{row.ratio:.2f}",
            f"{row.goal:.2f}",
            "yes" if row.holds else "[bold red]no",
        )
    return table


def run(
    benchmark: str,
    measure: Callable[[], Sequence[Row]],
    arguments: Sequence[str] | None = None,
    smoke: Mapping[str, object] | None = None,
) -> int:
    """The command line of one benchmark: measure, then print a table, or with --json the object.

    smoke: its sizes, by the names of its module, for a run of seconds; one without any refuses --smoke.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, one round: whether it still runs")
    wanted = parser.parse_args(arguments)
    if wanted.smoke:
        if smoke is None:
            parser.error(f"{benchmark} has no smallest sizes: it takes minutes whatever they are")
        vars(sys.modules[measure.__module__]).update(smoke)
    # Libraries print where they like; the object stands alone.
    with contextlib.redirect_stdout(sys.stderr) if wanted.json else contextlib.nullcontext():
        rows = measure()
    if wanted.json and _OBJECT is not None:
        with open(_OBJECT, "w", closefd=False) as own:
            print(as_json(benchmark, rows), file=own)
    elif wanted.json:
        print(as_json(benchmark, rows))
    else:
        Console().print(as_table(benchmark, rows))
    return 0
