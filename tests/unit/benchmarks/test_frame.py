"""The frame of the benchmarks: what is measured in turns, what is published."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import names, run_all
from benchmarks.frame import CpuClock, Row, compare, run, within

ROOT = Path(__file__).parents[3]
KEYS = {"name", "value", "unit", "yardstick", "yardstick_value", "ratio", "goal", "holds"}


def test_product_and_yardstick_are_measured_in_turns_and_reported_by_their_medians() -> None:
    order: list[str] = []
    products, peers = itertools.cycle([100.0, 10.0, 11.0, 12.0]), itertools.cycle([100.0, 5.0, 5.0, 5.0])

    def product() -> float:
        order.append("product")
        return next(products)

    def peer() -> float:
        order.append("peer")
        return next(peers)

    row = compare("speed", "things/s", "peer", product, peer, goal=2.0, rounds=3)
    assert order == ["product", "peer", "product", "peer", "peer", "product", "product", "peer"]
    assert (row.value, row.yardstick_value, row.ratio, row.holds) == (11.0, 5.0, 2.2, True)
    assert row.spread == (1.0, 0.0)


def test_a_ratio_below_its_goal_does_not_hold() -> None:
    assert not compare("speed", "1/s", "peer", lambda: 1.0, lambda: 2.0, goal=0.8).holds


def test_for_costs_the_ratio_is_turned_so_that_above_one_is_better() -> None:
    row = compare("cost", "s", "peer", lambda: 1.0, lambda: 4.0, goal=2.0, lower_is_better=True)
    assert (row.ratio, row.holds) == (4.0, True)


def test_a_claim_without_a_peer_is_held_against_its_limit() -> None:
    assert within("idle", "cores", lambda: 0.04, limit=0.05).holds
    row = within("idle", "cores", lambda: 0.10, limit=0.05)
    assert (row.yardstick, row.yardstick_value, row.ratio, row.holds) == ("limit", 0.05, 0.5, False)


def test_the_json_object_has_exactly_the_published_keys(capsys: pytest.CaptureFixture[str]) -> None:
    row = within("idle", "cores", lambda: 0.01, limit=0.05)
    assert run("idle", lambda: [row], ["--json"]) == 0
    published = json.loads(capsys.readouterr().out)
    assert set(published) == {"benchmark", "machine", "rows"}
    assert published["benchmark"] == "idle"
    assert [set(each) for each in published["rows"]] == [KEYS]
    assert Row(**published["rows"][0]) == row


def test_without_json_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("idle", lambda: [within("idle", "cores", lambda: 0.01, limit=0.05)], []) == 0
    assert "idle" in capsys.readouterr().out


def test_the_cpu_clock_counts_the_named_processes_too() -> None:
    loop = "while True: pass"
    busy = subprocess.Popen([sys.executable, "-c", loop])
    try:
        alone, both = CpuClock(), CpuClock(busy.pid)
        while both.seconds() - alone.seconds() < 0.05:
            pass
    finally:
        busy.kill()
        busy.wait()


def test_all_benchmarks_run_and_a_broken_one_is_counted(tmp_path: Path) -> None:
    folder, results = tmp_path / "measured", tmp_path / "results"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "good.py").write_text('print("noise"); print(\'{"benchmark": "good", "machine": "m", "rows": []}\')')
    (folder / "bad.py").write_text("raise SystemExit(3)")
    assert names(folder) == ["bad", "good"]
    assert run_all(folder, results) == 1
    assert json.loads((results / "good.json").read_text())["benchmark"] == "good"
    assert not (results / "bad.json").exists()


def test_the_frame_is_not_taken_for_a_benchmark() -> None:
    assert "frame" not in names()
    assert "inference" in names()


def test_with_json_what_libraries_print_while_they_are_imported_or_in_processes_of_their_own_is_no_output() -> None:
    called = [str(ROOT / "benchmarks" / "x.py"), "--json"]
    program = (
        f"import os, sys; sys.argv = {called!r}; import benchmarks.frame as frame;"
        "print('imported'); os.system('echo of a child'); sys.exit(frame.run('x', lambda: [], ['--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout)["benchmark"] == "x"
    assert "of a child" in done.stderr
