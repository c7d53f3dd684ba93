"""What keeps the tests cheap: costs with children, a budget that fails, and samples that hold what changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support import budget, of_a_day
from tests.support.budget import ALL, COSTS, DAY, Costs, costliest_first, sampled
from tests.support.of_a_day import FILES, LONG, PLATFORMS

ROOT = Path(__file__).parents[3]
ROWS = [f"row {number}" for number in range(20)]
BURN = "import time\nwhile time.process_time() < 0.7: pass"
# Those that a run of a few lines does not need take seconds.
WITHOUT_PLUGINS = ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def of_day(day: str, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setenv(DAY, day)
    return sampled(ROWS, 5, lambda row: [f"programs/{row}.yaml", "folder"] if row == "row 7" else [])


def test_a_table_is_sampled_by_the_day_and_holds_first_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALL, raising=False)
    monkeypatch.setattr(budget, "changed_files", lambda: frozenset())
    days = [of_day(f"2026-11-{day}", monkeypatch) for day in range(10, 30)]

    assert all(len(rows) == 5 for rows in days)
    assert of_day("2026-11-10", monkeypatch) == days[0]
    assert {row for rows in days for row in rows} == set(ROWS), "every row has its day"

    for changed in ("programs/row 7.yaml", "folder/below/it.py"):
        monkeypatch.setattr(budget, "changed_files", lambda changed=changed: frozenset({changed}))
        days = [of_day(f"2026-11-{day}", monkeypatch) for day in range(10, 30)]
        assert all("row 7" in rows and len(rows) == 5 for rows in days)

    monkeypatch.setattr(budget, "has_changed", lambda path: True)
    everything = [sampled(ROWS, 5, lambda row: [row]) for _ in days]
    assert all(len(rows) == 10 for rows in everything), "a change to everything is no run of everything"

    monkeypatch.setenv(ALL, "1")
    assert of_day("2026-11-10", monkeypatch) == ROWS


def test_the_cost_of_a_test_is_that_of_its_children_too_whether_they_ended_or_live() -> None:
    costs = Costs()
    subprocess.run([sys.executable, "-c", BURN], check=True, timeout=250)
    ended = costs.next()
    with subprocess.Popen(
        [sys.executable, "-c", f"{BURN}\nprint(flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living = costs.next()
        child.communicate(b"\n", timeout=250)
    after = costs.next()

    assert ended > 0.6
    assert living > 0.6
    assert after < 0.5, "counted once"


def test_no_collection_looks_through_what_the_tests_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*WITHOUT_PLUGINS)
    (tmp_path / "test_frozen.py").write_text(
        "import gc\n\nMADE, COLLECTS = [[] for _ in range(100_000)], gc.isenabled()\n\n"
        "def test_frozen() -> None:\n    assert gc.get_freeze_count() > 100_000\n    assert gc.isenabled() > COLLECTS\n"
    )
    command = ["-m", "pytest", "-p", "tests.support.budget", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]

    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)

    assert ran.returncode == 0, ran.stdout


def test_a_test_over_its_budget_fails_and_the_longest_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*WITHOUT_PLUGINS)
    tests = "def test_within() -> None: {0}\n\n@pytest.mark.cpu_seconds(0.001)\ndef test_over() -> None: {0}\n"
    (tmp_path / "test_burns.py").write_text("import pytest\n\n" + tests.format("sum(range(5_000_000))"))
    command = ["-m", "pytest", "-p", "tests.support.budget", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]

    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)

    assert ran.returncode == 1
    assert "ERROR at teardown of test_over" in ran.stdout
    assert "2 passed" in ran.stdout
    assert "1 error" in ran.stdout
    assert "s  test_burns.py::test_within" in ran.stdout


def test_the_file_of_costs_is_of_the_run_that_was_asked_and_not_of_one_that_a_test_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "costs.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.budget",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
    ]
    started = [*command, str(tmp_path / "started.py")]
    (tmp_path / "started.py").write_text("def test_started() -> None: sum(range(5_000_000))\n")
    (tmp_path / "asked.py").write_text(
        "import pathlib, subprocess\n\ndef test_asked() -> None:\n"
        f"    subprocess.run({started!r}, cwd={str(ROOT)!r}, check=True)\n"
        f"    assert not pathlib.Path({str(file)!r}).exists()\n"
    )
    monkeypatch.setenv(COSTS, str(file))
    monkeypatch.setenv(*WITHOUT_PLUGINS)

    asked = [*command, "-p", "xdist", "--numprocesses", "1", str(tmp_path / "asked.py")]
    subprocess.run(asked, cwd=ROOT, capture_output=True, timeout=250, check=True)

    (name,) = json.loads(file.read_text())
    assert name.endswith("asked.py::test_asked")


def test_a_run_begins_with_the_files_that_cost_most_in_earlier_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/unit").rglob("test_*.py"))[:6]
    runs = [
        {f"{files[4]}::test_a": 9.0, f"{files[4]}::test_b": 8.0, f"{files[1]}::test": 3.0},
        {f"{files[2]}::test": 41.0},
    ]
    for number, run in enumerate(runs):
        (tmp_path / f"{number}.json").write_text(json.dumps({**run, "tests/test_gone.py::test": 99.0}))
    monkeypatch.setattr(budget, "COSTS_OF_FILES", tmp_path / "of_files.json")

    budget.write_costs_of_files([str(tmp_path / "0.json"), str(tmp_path / "1.json")])

    assert json.loads((tmp_path / "of_files.json").read_text()) == {files[2]: 41, files[4]: 17}
    budget._costs_of_files.cache_clear()
    ordered = costliest_first(files, lambda file: file == files[5])
    budget._costs_of_files.cache_clear()
    assert ordered == [files[2], files[5], files[4], files[0], files[1], files[3]], (
        "a new file with slow tests is no short one"
    )


def test_the_files_that_a_run_begins_with_are_there() -> None:
    assert [file for file in json.loads(budget.COSTS_OF_FILES.read_text()) if not (ROOT / file).exists()] == []


def test_a_run_says_which_tests_wait_and_how_long_each_worker_was_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*WITHOUT_PLUGINS)
    (tmp_path / "test_waits.py").write_text("import time\n\ndef test_waits() -> None: time.sleep(1.5)\n")
    command = ["-m", "pytest", "-p", "tests.support.budget", "-p", "xdist", "-n", "1", "-p", "no:cacheprovider"]

    ran = subprocess.run(
        [sys.executable, *command, "-c", "/dev/null", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert re.search(r"1\.\d s of waiting  \S*test_waits.py::test_waits", ran.stdout), ran.stdout
    assert re.search(r"1\.\d s  gw0, on the clock", ran.stdout)


def test_what_a_day_chooses_from_is_there() -> None:
    tables = {**PLATFORMS, **LONG, **FILES}
    sources = {path for paths in tables.values() for path in paths}
    lost = [
        name
        for name in LONG
        for file, _, test in [name.partition("::")]
        if f"def {test}(" not in (ROOT / file).read_text() and test
    ]

    assert [
        path
        for path in {*PLATFORMS, *FILES, *sources, *(name.partition("::")[0] for name in LONG)}
        if not (ROOT / path).exists()
    ] == []
    assert lost == []


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        (
            ["tests"],
            ["a.py::test_of_the_day[1]", "a.py::test_short", "tests/e2e/today.py::test_it", "b.py::test_of_file"],
        ),
        (
            ["tests/integration/a.py::test_left_out"],
            [
                "a.py::test_of_the_day[1]",
                "a.py::test_left_out",
                "a.py::test_short",
                "tests/e2e/today.py::test_it",
                "b.py::test_of_file",
            ],
        ),
    ],
)
def test_a_run_takes_the_long_tests_of_the_day_and_those_that_are_named(
    arguments: list[str], run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"a.py::test_of_the_day": (), "a.py::test_left_out": (), "b.py": (), "c.py": ()}
    monkeypatch.setattr(of_a_day, "LONG", long)
    monkeypatch.setattr(of_a_day, "PLATFORMS", {"tests/e2e/today.py": (), "tests/e2e/tomorrow.py": ()})
    monkeypatch.setattr(of_a_day, "CHOSEN", {"a.py::test_of_the_day", "tests/e2e/today.py", "b.py"})
    names = ["a.py::test_of_the_day[1]", "a.py::test_left_out", "a.py::test_short"]
    names += ["tests/e2e/today.py::test_it", "tests/e2e/tomorrow.py::test_it"]
    names += ["b.py::test_of_file", "c.py::test_of_another_file"]
    items = [Mock(nodeid=name, path=Path(name.partition("::")[0])) for name in names]

    of_a_day.pytest_collection_modifyitems(Mock(args=arguments), items)

    assert [item.nodeid for item in items if not item.add_marker.called] == run
