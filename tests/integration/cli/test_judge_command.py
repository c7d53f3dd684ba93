"""`spo judge` as scripts use it: real command, real embedded judge, hostile programs, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.sandbox_judge.executor import languages
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from spo.testing.peers import wait_until

PROGRAMS = {
    "accepted": "print(2 * int(input()))",
    "wrong_answer": "print(0)",
    "cpu_time_limit": "while True: pass",
    "wall_time_limit": "import time\ntime.sleep(100)",
    "memory_limit": "x = bytearray(1 << 30)",
    "output_limit": "while True: print('x' * 1000)",
    "runtime_error": "import os\nwhile True: os.fork()",
    "compile_error": "print(",
    "security_violation": "import ctypes\nctypes.CDLL(None).ptrace(0, 0, 0, 0)",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tests = [{"stdin": f"{n}\n", "stdout": str(2 * n)} for n in (1, 2, 0)]
    (tmp_path / "tests.json").write_text(json.dumps(tests))
    for name, source in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(source)
    return tmp_path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "spo.cli", "judge", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[3]), **more}


def run(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(
            "--tests", "tests.json", *([] if "--cpu-seconds" in arguments else ["--cpu-seconds", "0.3"]), *arguments
        ),
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=120,
    )


def rows_of(finished: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def test_every_outcome_is_one_json_object_per_line_with_all_tests(folder: Path) -> None:
    programs = [f"{name}.py" for name in PROGRAMS]
    if "cpp" in languages():
        (folder / "accepted.cpp").write_bytes(
            b'#include <cstdio>\nint main(){int n; scanf("%d",&n); printf("%d",2*n);} // \xe9'
        )
        programs.append("accepted.cpp")

    rows = rows_of(run(folder, *programs, "-o", "json"))

    assert [row["program"] for row in rows] == programs
    assert [row["outcome"] for row in rows] == [name.split(".")[0] for name in programs]
    for row in rows:
        assert len(row["tests"]) == 3
        assert set(row["tests"][0]) == {"outcome", "cpu_seconds", "wall_seconds", "memory_bytes", "detail"}
        assert "seccomp" in row["isolation"]
    by_outcome = {row["outcome"]: [test["outcome"] for test in row["tests"]] for row in rows}
    assert by_outcome["wrong_answer"] == ["wrong_answer", "wrong_answer", "accepted"]
    assert by_outcome["compile_error"] == ["skipped"] * 3


def test_further_python_versions_are_offered_where_settings_name_their_prefix(folder: Path) -> None:
    own = Path(sysconfig.get_paths()["stdlib"]).parent.parent
    others = [path for path in own.parent.glob("*/bin/python3.*") if re.fullmatch(r"python3\.\d\d", path.name)]
    others = [path for path in others if path.name != f"python3.{sys.version_info.minor}"]
    if not others:
        pytest.skip("NO OTHER PYTHON VERSION HERE beside the one that runs the tests")
    prefixes = json.dumps([str(others[0].parent.parent)])
    (folder / "version.py").write_text("import sys\nprint(2 * int(input()) if __name__ == '__main__' else sys.version)")
    programs = ["version.py", "compile_error.py", "runtime_error.py"]

    shown = run(
        folder,
        *("--language", others[0].name, "--cpu-seconds", "2", "-o", "json"),
        *programs,
        SPO_SANDBOX_JUDGE_PYTHON_PREFIXES=prefixes,
    )

    assert [row["outcome"] for row in rows_of(shown)] == ["accepted", "compile_error", "runtime_error"]


def test_early_stop_skips_what_follows_the_first_failure(folder: Path) -> None:
    (row,) = rows_of(run(folder, "wrong_answer.py", "--stop-early", "-o", "json"))

    assert [test["outcome"] for test in row["tests"]] == ["wrong_answer", "skipped", "skipped"]


def test_people_get_a_line_per_program_with_the_reason(folder: Path) -> None:
    (folder / "escape.py").write_text("raise SystemExit('\\x1b]0;owned\\x07[red]hello')")
    shown = run(folder, "accepted.py", "wrong_answer.py", "escape.py")

    assert shown.returncode == 0
    first, second, third = shown.stdout.splitlines()
    assert third.endswith("exit status 1: ?]0;owned?[red]hello")
    assert first.split()[:2] == ["accepted", "3/3"]
    assert second.split()[:2] == ["wrong_answer", "1/3"]
    assert "test 1: wrong_answer: token 1: expected '2', found '0'" in second


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (("absent.py",), 4, "no file absent.py"),
        (("accepted.py", "--language", "cobol"), 3, "it runs python"),
        (("accepted.py", "--cpu-seconds", "nan"), 2, "--cpu-seconds"),
        (("accepted.py", "--judge", "127.0.0.1:1"), 6, "127.0.0.1:1"),
    ],
)
def test_wrong_usage_has_a_stable_exit_status_and_a_reason(
    folder: Path, arguments: tuple[str, ...], status: int, complaint: str
) -> None:
    failed = run(folder, *arguments, "-o", "json")

    assert (failed.returncode, failed.stdout) == (status, "")
    assert complaint in failed.stderr


def test_a_machine_below_the_required_isolation_judges_nothing(folder: Path) -> None:
    failed = run(
        folder,
        "accepted.py",
        SPO_SANDBOX_JUDGE_ISOLATION="seccomp+landlock",
        SPO_SANDBOX_JUDGE_MINIMUM_ISOLATION="namespaces+seccomp",
    )

    assert failed.returncode == 6
    assert "below the required" in failed.stderr


def test_the_doctor_names_the_tier_and_why_a_floor_is_not_met(tmp_path: Path) -> None:
    def doctor(**more: str) -> subprocess.CompletedProcess[str]:
        asked = [sys.executable, "-m", "spo.cli", "doctor"]
        wide = environment(COLUMNS="400", **more)
        return subprocess.run(asked, cwd=tmp_path, env=wide, capture_output=True, text=True, timeout=120, check=False)

    well = doctor()
    strict = doctor(
        SPO_SANDBOX_JUDGE_ISOLATION="seccomp+landlock", SPO_SANDBOX_JUDGE_MINIMUM_ISOLATION="namespaces+seccomp"
    )

    assert f"the judge runs programs under {choose_tier(Settings())}" in well.stdout
    assert strict.returncode == 1
    assert "seccomp+landlock: below the required namespaces+seccomp" in strict.stdout


def test_a_judge_that_dies_in_the_middle_costs_no_verdict(folder: Path) -> None:
    for number in range(60):
        (folder / f"{number}.py").write_text(f"print(2 * int(input()))  # {number}")
    programs = [f"{number}.py" for number in range(60)]
    with subprocess.Popen(
        command("--tests", "tests.json", *programs, "-o", "json"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        (judge,) = psutil.Process(process.pid).children()
        judge.kill()
        rest = process.stdout.read()
    assert process.returncode == 0
    rows = [json.loads(line) for line in [first, *rest.splitlines()]]
    assert [(row["program"], row["outcome"]) for row in rows] == [(name, "accepted") for name in programs]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_command_leaves_no_process_behind(folder: Path, number: int) -> None:
    programs = [f"{name}.py" for name in ("accepted", "wall_time_limit", "cpu_time_limit")]
    with subprocess.Popen(
        command("--tests", "tests.json", "--cpu-seconds", "60", *programs, "-o", "json"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        # Where the tests run in the background of a shell they ignore SIGINT, and so would the command.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = descendants(process)
        assert len(started) >= 3
        process.send_signal(number)
        process.wait(30)
    wait_until(lambda: psutil.wait_procs(started, timeout=0.1)[1] == [], "every process has ended")
