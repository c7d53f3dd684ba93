"""Every hostile program meets its expected end, every honest one is accepted, and nothing of either is left behind.

The programs lie in programs/*.yaml. All run on the strongest isolation tier, as the user that runs the tests, and each
in one more place that its name chooses: on another tier, or as an unprivileged user when the tests run as root. With
SPO_TEST_ALL=1 all run everywhere.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from services.sandbox_judge.isolation import TIERS
from services.sandbox_judge.probe import why_not
from services.sandbox_judge.program_judge import ProgramJudge
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker
from services.sandbox_judge.settings import Settings
from spo.v1 import verdict_pb2

FOLDER = Path(__file__).parent / "programs"
SECRET = {"stdin": "21\n", "stdout": "7391745528"}
TIGHT = verdict_pb2.Limits(cpu_seconds=0.3, wall_seconds=0.6, memory_bytes=64 << 20, output_bytes=64 << 10)
PATIENT = verdict_pb2.Limits(cpu_seconds=3, wall_seconds=3, memory_bytes=64 << 20, output_bytes=64 << 10)
# A probe runs programs.
why_absent = cache(why_not)
PROGRAM_JUDGE = ProgramJudge(max_source_bytes=64 << 10)
AS_NOBODY = "SPO_TEST_AS_NOBODY"
ALL = "SPO_TEST_ALL"
TOOLS = ("unshare", "setpriv")

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


def tiers_to_try(nobody: bool) -> list[str]:
    # The middle tier is the strongest without Landlock: its own kernel, not another user's concern.
    if nobody:
        return [TIERS[0], TIERS[-1]]
    # Containers where an image is named: SPO_SANDBOX_JUDGE_DOCKER_IMAGE.
    containers = ["docker"] if Settings().docker_image else []
    return [TIERS[0], TIERS[1], *containers, TIERS[-1]]


def is_tried(name: str, tier: str, nobody: bool) -> bool:
    """Whether a program runs on a tier as this user: see above."""
    if ALL in os.environ or tier == "docker" or (tier, nobody) == (TIERS[0], False):
        return True
    further = [(TIERS[1], False), (TIERS[-1], False), (TIERS[0], True), (TIERS[-1], True)]
    return further[zlib.crc32(name.encode()) % len(further)] == (tier, nobody)


def everywhere(cases: list[Any]) -> pytest.MarkDecorator:
    """The cases with the tiers that they run on, a tier after the other."""
    nobody = AS_NOBODY in os.environ
    found = [
        pytest.param(tier, *case.values, id=f"{tier}-{case.id}", marks=[pytest.mark.slow] if tier == TIERS[1] else [])
        for tier in tiers_to_try(nobody)
        for case in cases
        if is_tried(case.id, tier, nobody)
    ]
    return pytest.mark.parametrize(("tier", "case"), found, indirect=["tier"])


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> str:
    reason = why_absent(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_set_aside() -> Iterator[None]:
    """Thousands of collected tests and whatever ran before: else each look at the open descriptors walks them all."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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


@everywhere(HOSTILE)
def test_a_hostile_program_meets_its_end(worker: SandboxWorker, case: dict[str, Any]) -> None:
    before = open_descriptors()
    expected = [case["outcome"]] if isinstance(case["outcome"], str) else case["outcome"]

    # On a busy machine whatever ends by itself takes long; only who is to meet a limit of time meets it soon.
    limits = TIGHT if any(outcome.endswith("time_limit") for outcome in expected) else PATIENT
    outcome, detail = outcome_of(worker, source_of(case), case_tests(case, limits))

    assert outcome in expected, detail
    assert_nothing_is_left(worker, before)


@everywhere(HONEST)
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
    places = [(tier, nobody) for nobody in (False, True) for tier in tiers_to_try(nobody) if tier != "docker"]
    tried = {place: {case.id for case in HOSTILE if is_tried(case.id, *place)} for place in places}
    assert len(tried.pop((TIERS[0], False))) == len(HOSTILE)
    assert min(map(len, tried.values())) >= len(HOSTILE) // 6
    assert sum(map(len, tried.values())) == len(HOSTILE)


@pytest.fixture(scope="module", autouse=True)
def unprivileged_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str] | None]:
    """All of this once more as another user, beside the tests of this process: a machine has more than one core."""
    wanted = any(
        each.name == test_all_of_it_holds_for_an_unprivileged_user_too.__name__ for each in request.session.items
    )
    if not wanted or os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        yield None
        return
    # The interpreter may lie in root's home; a mount namespace of the test's own opens the way to it.
    folder = tmp_path_factory.mktemp("interpreter")
    prefix = Path(sysconfig.get_paths()["stdlib"]).parent.parent
    closed = [parent for parent in reversed(prefix.parents) if not parent.stat().st_mode & 0o001]
    way = f"mount --bind {prefix} {folder}"
    for parent in closed:
        way += f" && mount -t tmpfs -o mode=0755 tmpfs {parent}"
    if closed:
        way += f" && mkdir -p {prefix} && mount --bind {folder} {prefix}"
    command = f"{sys.executable} -m pytest -q -p no:cacheprovider {__file__}"
    script = f"{way} && exec setpriv --reuid 65534 --regid 65534 --clear-groups {command}"
    log = folder.with_suffix(".log")
    with log.open("w") as sink:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script],
            env={"PATH": os.environ["PATH"], "HOME": "/tmp", AS_NOBODY: "1", "PYTHONDONTWRITEBYTECODE": "1"}
            | {name: os.environ[name] for name in (ALL,) if name in os.environ},
            cwd=Path(__file__).parents[2],
            stdout=sink,
            stderr=sink,
            text=True,
        )
    yield process
    if process.poll() is None:
        process.kill()
        process.wait(20)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="already runs as an unprivileged user")
def test_all_of_it_holds_for_an_unprivileged_user_too(
    unprivileged_run: subprocess.Popen[str] | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if unprivileged_run is None:
        pytest.skip(f"not all of {', '.join(TOOLS)} are installed")
    status = unprivileged_run.wait(850)

    said = next(tmp_path_factory.getbasetemp().glob("interpreter*.log")).read_text()
    assert status == 0, said[-5000:]
    assert " passed" in said
