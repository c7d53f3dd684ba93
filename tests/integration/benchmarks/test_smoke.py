"""A benchmark that nobody runs is no claim: those that can be small run at their smallest sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import names, smoked
from benchmarks.frame import Row

ROOT = Path(__file__).parents[3]
# Those that start an engine, a browser, many jails or torch, or simulate hours, whatever their sizes are.
TAKE_MINUTES = {
    *("api", "autoscaling", "inference", "judge_soak", "learning", "real_widths", "rejudging", "replicas"),
    *("scale", "serving", "soak", "trainer", "value", "verifiers", "weights"),
}


def test_every_benchmark_has_a_run_of_seconds_or_is_known_to_take_minutes() -> None:
    assert set(names()) == {*smoked(), *TAKE_MINUTES}


@pytest.mark.parametrize("name", smoked())
def test_a_benchmark_runs_at_its_smallest_sizes_and_prints_its_document_alone(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert document["benchmark"] == name
    assert [Row(**row) for row in document["rows"]]


def test_one_that_takes_minutes_says_so() -> None:
    command = [sys.executable, "-c", "from benchmarks.frame import run; run('value', lambda: [], ['--smoke'])"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "no smallest sizes" in done.stderr) == (2, True)
