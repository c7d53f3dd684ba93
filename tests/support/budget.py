"""What a run of the tests may cost: each test a budget of CPU seconds, each long table a sample of its rows.

CPU seconds of a test and its children, not seconds: on a busy machine a test waits, but does not compute more. The ten
longest are printed, and those that waited longest. Of a table that is sampled a run takes what the day chooses and
every row whose files changed.

`python -m tests.support.budget COSTS...` writes which files a run begins with, from files that SPO_TEST_COSTS named.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")

ROOT = Path(__file__).parents[2]
ALL, DAY, SINCE = "SPO_TEST_ALL", "SPO_TEST_DAY", "SPO_TEST_SINCE"
# A file for the CPU seconds of every test, as JSON: of this run, and of none that a test starts.
COSTS = "SPO_TEST_COSTS"
BUDGET_SECONDS = 60
SLOW_BUDGET_SECONDS = 300
REPORTED = 10
# CPU seconds by file, of those that take so many at least; and what a file with slow tests is taken for that is new.
COSTS_OF_FILES = Path(__file__).with_name("costs_of_files.json")
KNOWN_FROM_SECONDS = 8
SLOW_FILE_SECONDS = 20
PROPERTY = "cpu_seconds"
# Shorter tests are not worth a look through all processes.
SCANNED_AFTER_SECONDS = 0.5
DAY_SECONDS = 86_400
_TICKS = os.sysconf("SC_CLK_TCK")


def sampled(rows: Sequence[Row], count: int, files: Callable[[Row], Iterable[str]]) -> list[Row]:
    """The rows whose files (paths from the root, or folders) changed, and others that the day chooses: `count` in all.

    Where more changed than that, up to twice as many, of the day's choice too: a change to everything must not make a
    run of everything. All rows with SPO_TEST_ALL=1. SPO_TEST_DAY=2026-11-25 repeats a day, SPO_TEST_SINCE=<commit>
    counts as changed what is not as it was in that commit; without it, in the newest that is a day older than the last.
    """
    if ALL in os.environ:
        return list(rows)
    changed = {place for place, row in enumerate(rows) if any(has_changed(path) for path in files(row))}
    by_chance = sorted(range(len(rows)), key=lambda place: zlib.crc32(f"{day()} {place} {len(rows)}".encode()))
    first = sorted(by_chance, key=lambda place: place not in changed)
    chosen = set(first[: max(count, min(len(changed), 2 * count))])
    return [row for place, row in enumerate(rows) if place in chosen]


def costliest_first(files: Iterable[str], is_slow: Callable[[str], bool]) -> list[str]:
    """The files as a run takes them: what is long and begun last runs alone at the end. Equal ones stay in order."""
    known = _costs_of_files()

    def cost(file: str) -> float:
        return known.get(file) or (SLOW_FILE_SECONDS if is_slow(file) else 0)

    return sorted(files, key=cost, reverse=True)


@cache
def _costs_of_files() -> dict[str, float]:
    found: dict[str, float] = json.loads(COSTS_OF_FILES.read_text())
    return found


def write_costs_of_files(paths: Iterable[str]) -> None:
    """From the costs of several runs, since each leaves out what is not of its day: the most that a file has taken."""
    most: dict[str, float] = {}
    for path in paths:
        for file, cost in by_file(json.loads(Path(path).read_text())).items():
            most[file] = max(cost, most.get(file, 0))
    kept = {file: round(cost) for file, cost in sorted(most.items()) if cost >= KNOWN_FROM_SECONDS}
    COSTS_OF_FILES.write_text(
        json.dumps({file: cost for file, cost in kept.items() if (ROOT / file).exists()}, indent=0) + "\n"
    )


def by_file(costs: Mapping[str, float]) -> dict[str, float]:
    """What the tests of each file come to, by their names."""
    files: dict[str, float] = defaultdict(float)
    for name, cost in costs.items():
        files[name.partition("::")[0]] += cost
    return files


def day() -> str:
    """The seed of all samples."""
    return os.environ.setdefault(DAY, datetime.now(UTC).date().isoformat())


def has_changed(path: str) -> bool:
    """Whether a file, or anything in a folder, is other than it was."""
    return any(changed == path or changed.startswith(f"{path}/") for changed in changed_files())


@cache
def changed_files() -> frozenset[str]:
    """Paths of the work tree that are not as they were in SPO_TEST_SINCE; none outside a repository."""
    since = os.environ.get(SINCE) or _a_day_before_the_last() or "HEAD~1"
    return frozenset([*_git("diff", "--name-only", since), *_git("ls-files", "--others", "--exclude-standard")])


def _a_day_before_the_last() -> str:
    """The newest commit that is a day older than the last: what lands together is often many commits. "" if none is."""
    (last,) = _git("log", "-1", "--format=%ct") or ["0"]
    return next(iter(_git("rev-list", "-1", f"--before={int(last) - DAY_SECONDS}", "HEAD")), "")


def _git(*arguments: str) -> list[str]:
    """The lines that git prints; none where it fails."""
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return ran.stdout.splitlines()


def seconds_of(who: int) -> float:
    """CPU seconds of resource.RUSAGE_SELF, or of RUSAGE_CHILDREN, which are those that ended and were waited for."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def living_seconds(root: int) -> float:
    """CPU seconds of the descendants of a process that run now and of what they have waited for; 0 without /proc."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parents[int(name)] = int(fields[1])
        seconds[int(name)] = sum(map(int, fields[11:15])) / _TICKS

    def descends(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == root:
                return True
        return False

    return sum(seconds[process] for process in seconds if descends(process))


# What all tests of a process share and the first that needs it would be charged for.
_shared_seconds = 0.0


def charge_to_nobody(seconds: float) -> None:
    """Leave CPU seconds of the test that runs out of its cost: of a process that it began and that others use too."""
    global _shared_seconds
    _shared_seconds += seconds


class Costs:
    """The CPU seconds of one test after the other."""

    def __init__(self) -> None:
        self._own, self._ended, self._living = (
            seconds_of(resource.RUSAGE_SELF),
            seconds_of(resource.RUSAGE_CHILDREN),
            0.0,
        )
        self._since = time.monotonic()

    def next(self) -> float:
        """CPU seconds since the last call."""
        own, ended, living = seconds_of(resource.RUSAGE_SELF), seconds_of(resource.RUSAGE_CHILDREN), self._living
        # Those that ended are no longer among the living.
        if ended > self._ended or time.monotonic() - self._since > SCANNED_AFTER_SECONDS:
            living = living_seconds(os.getpid())
        global _shared_seconds
        shared, _shared_seconds = _shared_seconds, 0.0
        cost = own + ended + living - self._own - self._ended - self._living - shared
        self._own, self._ended, self._living, self._since = own, ended, living, time.monotonic()
        return max(0.0, cost)


def budget_of(item: pytest.Item) -> float:
    """CPU seconds that a test may cost; what runs at night may take what it takes."""
    if mark := item.get_closest_marker(PROPERTY):
        return float(mark.args[0])
    if item.get_closest_marker("nightly"):
        return math.inf
    return SLOW_BUDGET_SECONDS if item.get_closest_marker("slow") else BUDGET_SECONDS


class Budget:
    """The plugin: in workers it measures, in the process that reports it adds up."""

    def __init__(self, costs_file: str | None) -> None:
        self._costs = Costs()
        self._costs_file = costs_file
        self._longest: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self._busy: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Find the tests without looking for garbage meanwhile: that took a third of the time, since nearly all that
        modules make as they are imported stays.
        """
        gc.disable()
        try:
            return (yield)
        finally:
            gc.enable()

    def pytest_collection_finish(self) -> None:
        """What it takes to find the tests is not the first one's, and what they import stays: no collection has to look
        through it again, which took a second of each that a trainer's engine asks for when it is closed.
        """
        gc.collect()
        gc.freeze()
        self._costs.next()

    def pytest_sessionfinish(self) -> None:
        """Let libraries free what they hold when the interpreter ends; some report all else as leaked."""
        gc.unfreeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Attach the cost to the last of a test's reports, which fails where it is over the budget."""
        report: Any = yield
        if call.when == "teardown":
            cost = self._costs.next()
            report.user_properties.append((PROPERTY, cost))
            budget = budget_of(item)
            if cost > budget and report.passed:
                report.outcome = "failed"
                report.longrepr = (
                    f"{cost:.0f} CPU s, over the budget of {budget}: make it cheaper, "
                    f"or mark it with its cost, @pytest.mark.{PROPERTY}(...)"
                )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the cost, and the seconds on the clock."""
        self._seconds[report.nodeid] += report.duration
        # xdist's, of the worker that ran it.
        self._busy[getattr(report, "worker_id", "all tests")] += report.duration
        if cost := dict(report.user_properties).get(PROPERTY):
            self._longest[report.nodeid] = cost

    def pytest_report_header(self) -> str:
        """Say what the sampled tables were sampled by."""
        return f"sampled tables: {'all rows' if ALL in os.environ else f'of {DAY}={day()}; all rows by {ALL}=1'}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the longest, and the files that add up to most."""
        terminalreporter.section(f"longest of {sum(self._longest.values()):.0f} CPU s")
        if self._costs_file:
            Path(self._costs_file).write_text(json.dumps(self._longest, indent=0))
        waited = {name: self._seconds[name] - cost for name, cost in self._longest.items() if self._seconds[name] > 1}
        for title, longest in (("", self._longest), ("", by_file(self._longest)), (" of waiting", waited)):
            for name, cost in nlargest(REPORTED, longest.items(), key=itemgetter(1)):
                terminalreporter.write_line(f"{cost:7.1f} s{title}  {name}")
        for name, seconds in sorted(self._busy.items()):
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}, on the clock")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    # Before the workers start: all of them collect the same rows, whatever the clock says meanwhile.
    day()
    config.pluginmanager.register(Budget(os.environ.pop(COSTS, None)))


if __name__ == "__main__":
    write_costs_of_files(sys.argv[1:])
