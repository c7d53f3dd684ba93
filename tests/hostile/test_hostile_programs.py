"""Every hostile program meets its expected end, every honest one is accepted, and nothing of either is left behind.

The programs lie in programs/*.yaml; tests/support/places.py says where they run.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import subprocess
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from services.sandbox_judge.program_judge import ProgramJudge
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker
from spo.v1 import verdict_pb2
from tests.support.budget import ALL
from tests.support.places import (
    TOOLS,
    everywhere,
    require_passed,
    require_some_everywhere,
    run_as_nobody,
    why_absent,
)

FOLDER = Path(__file__).parent / "programs"
SECRET = {"stdin": "21\n", "stdout": "7391745528"}
TIGHT = verdict_pb2.Limits(cpu_seconds=0.3, wall_seconds=0.6, memory_bytes=64 << 20, output_bytes=64 << 10)
PATIENT = verdict_pb2.Limits(cpu_seconds=3, wall_seconds=3, memory_bytes=64 << 20, output_bytes=64 << 10)
PROGRAM_JUDGE = ProgramJudge(max_source_bytes=64 << 10)

# Runs after every program, in the same zygote: is anything of it still there?
CANARY = """
import builtins, os, sys
left = os.listdir(os.getcwd()) if os.getcwd() == "/tmp" else []
print(left, hasattr(builtins, "seen"), "SEEN" in os.environ, str.__name__, sys.getrecursionlimit() < 2000)
"""
CLEAN = "[] False False str True"


# At its first test a program leaves something, at its second it looks for it.
TWICE = [{"stdin": "1\n", "stdout": "A"}, {"stdin": "2\n", "stdout": "LEAK"}]
LEAVES = """
import contextlib, os, sys, time
try:
    import fcntl
    if input() == "1":
        with contextlib.suppress(Exception):
{leave}
        print("A")
    else:
        print("LEAK" if {look} else "clean")
except (ImportError, OSError) as error:
    print("clean:", error)
"""


def load(path: Path) -> list[Any]:
    return [
        pytest.param(case, id=f"{path.stem}: {case['name']}")
        for case in map(completed, yaml.safe_load(path.read_text()))
        if case.get("machine", platform.machine()) == platform.machine()
    ]


def completed(case: dict[str, Any]) -> dict[str, Any]:
    return {"tests": TWICE, "outcome": "wrong_answer", **case} if "leave" in case else case


HOSTILE = [case for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "honest" for case in load(path)]
HONEST = load(FOLDER / "honest.yaml")


def source_of(case: dict[str, Any]) -> str:
    if "leave" in case:
        return LEAVES.format(leave=textwrap.indent(case["leave"], 12 * " "), look=case["look"])
    if "repeat" in case:
        text, times, end = case["repeat"]
        return str(text * times + end)
    return str(case["program"])


def case_tests(case: dict[str, Any], limits: verdict_pb2.Limits) -> verdict_pb2.TestSet:
    return verdict_pb2.TestSet(
        limits=limits,
        tests=[
            verdict_pb2.TestCase(
                stdin=(test["stdin"] * test.get("times", 1)).encode(),
                stdout=(test["stdout"] * test.get("times_out", 1)).encode(),
            )
            for test in case.get("tests", [SECRET])
        ],
    )


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> str:
    reason = why_absent(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_set_aside() -> None:
    """What ran before, beside what the tests import: else each look at the open descriptors walks through it all.

    Until the end of the run: thawing it would thaw what the tests import too.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, SandboxWorker]]:
    """One per tier, for all programs."""
    opened = dict[str, SandboxWorker]()
    yield opened
    for worker in opened.values():
        worker.close()


@pytest.fixture
def worker(tier: str, workers: dict[str, SandboxWorker]) -> SandboxWorker:
    if tier not in workers:
        workers[tier] = SandboxWorker(tier, 0)
        workers[tier].zygote(Role.PROGRAM)
    return workers[tier]


def outcome_of(worker: SandboxWorker, source: str, tests: verdict_pb2.TestSet) -> tuple[str, str]:
    verdict = PROGRAM_JUDGE.judge(worker, source, "python", tests)
    return verdict_pb2.Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower(), verdict.detail


def open_descriptors() -> Counter[str]:
    """How many descriptors of each kind this process holds: the judge's pipes, Unix sockets, files and memory."""
    gc.collect()
    network = {connection.fd for connection in psutil.Process().net_connections("inet")}
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        # The judge speaks to its sandboxes over no network; clients of earlier tests in this process may reconnect.
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(f"/proc/self/fd/{number}")
            if int(number) not in network:
                kinds[link.partition(":[")[0]] += 1
    return kinds


def assert_nothing_is_left(worker: SandboxWorker, before: Counter[str]) -> None:
    tests = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdout=CLEAN.encode())])
    assert outcome_of(worker, CANARY, tests) == ("accepted", "")
    # Fewer is no leak, and other threads of this process open files for moments: what stays is a leak.
    end = time.monotonic() + 5
    while (left := open_descriptors() - before) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
    below = psutil.Process(worker.zygote(Role.PROGRAM).pid).children(recursive=True)
    assert [child for child in below if child.children() == [] and "zygote" not in " ".join(child.cmdline())] == []


@everywhere("case", HOSTILE)
def test_a_hostile_program_meets_its_end(worker: SandboxWorker, case: dict[str, Any]) -> None:
    before = open_descriptors()
    expected = [case["outcome"]] if isinstance(case["outcome"], str) else case["outcome"]

    # On a busy machine whatever ends by itself takes long; only who is to meet a limit of time meets it soon.
    limits = TIGHT if any(outcome.endswith("time_limit") for outcome in expected) else PATIENT
    outcome, detail = outcome_of(worker, source_of(case), case_tests(case, limits))

    assert outcome in expected, detail
    assert_nothing_is_left(worker, before)


@everywhere("case", HONEST)
def test_an_honest_program_is_accepted(worker: SandboxWorker, tier: str, case: dict[str, Any]) -> None:
    if case.get("needs", "") not in tier:
        pytest.skip(f"needs {case['needs']}")
    before = open_descriptors()

    assert outcome_of(worker, source_of(case), case_tests(case, verdict_pb2.Limits())) == ("accepted", "")
    assert_nothing_is_left(worker, before)


def test_there_are_at_least_two_hundred_hostile_programs_and_thirty_honest_ones() -> None:
    assert len(HOSTILE) >= 200
    assert len(HONEST) >= 30


@pytest.mark.skipif(ALL in os.environ, reason="all run everywhere")
def test_every_place_has_some_of_the_hostile_programs_and_none_runs_in_one_alone() -> None:
    require_some_everywhere([case.id for case in HOSTILE])


@pytest.fixture(scope="module")
def place_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interpreter")


@pytest.fixture(scope="module", autouse=True)
def unprivileged_run(request: pytest.FixtureRequest, place_of_nobody: Path) -> Iterator[subprocess.Popen[str] | None]:
    """All of this once more as another user, beside the tests of this process: a machine has more than one core."""
    name = test_all_of_it_holds_for_an_unprivileged_user_too.__name__
    if not any(each.name == name for each in request.session.items):
        yield None
        return
    with run_as_nobody(__file__, place_of_nobody) as process:
        yield process


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="already runs as an unprivileged user")
def test_all_of_it_holds_for_an_unprivileged_user_too(
    unprivileged_run: subprocess.Popen[str] | None, place_of_nobody: Path
) -> None:
    if unprivileged_run is None:
        pytest.skip(f"not all of {', '.join(TOOLS)} are installed")
    require_passed(unprivileged_run, place_of_nobody)
