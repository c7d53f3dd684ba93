"""Every hostile program meets its expected end, every honest one is accepted, and nothing of either is left behind.

The programs lie in programs/*.yaml. They run on every isolation tier that this machine offers, as the user that runs
the tests; when that is root, once more as an unprivileged user.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from services.sandbox_judge.isolation import TIERS
from services.sandbox_judge.lanes import Lane, Role
from services.sandbox_judge.probe import why_not
from services.sandbox_judge.verdict import Court
from spo.v1 import verdict_pb2

FOLDER = Path(__file__).parent / "programs"
SECRET = {"stdin": "21\n", "stdout": "7391745528"}
TIGHT = verdict_pb2.Limits(cpu_seconds=0.3, wall_seconds=0.6, memory_bytes=64 << 20, output_bytes=64 << 10)
PATIENT = verdict_pb2.Limits(cpu_seconds=3, wall_seconds=3, memory_bytes=64 << 20, output_bytes=64 << 10)
COURT = Court(max_source_bytes=64 << 10)
AS_NOBODY = "SPO_TEST_AS_NOBODY"

# Runs after every program, in the same zygote: is anything of it still there?
CANARY = """
import builtins, os, sys
left = os.listdir(os.getcwd()) if os.getcwd() == "/tmp" else []
print(left, hasattr(builtins, "seen"), "SEEN" in os.environ, str.__name__, sys.getrecursionlimit() < 2000)
"""
CLEAN = "[] False False str True"


def load(path: Path) -> list[Any]:
    return [
        pytest.param(case, id=f"{path.stem}: {case['name']}")
        for case in yaml.safe_load(path.read_text())
        if case.get("machine", platform.machine()) == platform.machine()
    ]


HOSTILE = [case for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "honest" for case in load(path)]
HONEST = load(FOLDER / "honest.yaml")


def source_of(case: dict[str, Any]) -> str:
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


def tiers_to_try() -> list[Any]:
    # The middle tier is the strongest without Landlock: its own kernel, not another user's concern.
    if AS_NOBODY in os.environ:
        return [TIERS[0], TIERS[-1]]
    return [TIERS[0], pytest.param(TIERS[1], marks=pytest.mark.slow), TIERS[-1]]


@pytest.fixture(scope="module", params=tiers_to_try())
def tier(request: pytest.FixtureRequest) -> str:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


@pytest.fixture(scope="module")
def lane(tier: str) -> Iterator[Lane]:
    lane = Lane(tier, 0)
    lane.zygote(Role.PROGRAM)
    yield lane
    lane.close()


def outcome_of(lane: Lane, source: str, tests: verdict_pb2.TestSet) -> tuple[str, str]:
    verdict = COURT.judge(lane, source, "python", tests, want_details=False)
    return verdict_pb2.Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower(), verdict.detail


def assert_nothing_is_left(lane: Lane, descriptors: int) -> None:
    tests = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdout=CLEAN.encode())])
    assert outcome_of(lane, CANARY, tests) == ("accepted", "")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    below = psutil.Process(lane.zygote(Role.PROGRAM).pid).children(recursive=True)
    assert [child for child in below if child.children() == [] and "zygote" not in " ".join(child.cmdline())] == []


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_program_meets_its_end(lane: Lane, case: dict[str, Any]) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    expected = [case["outcome"]] if isinstance(case["outcome"], str) else case["outcome"]

    # Touching memory takes CPU time too, on a busy machine a lot.
    limits = PATIENT if "memory_limit" in expected else TIGHT
    outcome, detail = outcome_of(lane, source_of(case), case_tests(case, limits))

    assert outcome in expected, detail
    assert_nothing_is_left(lane, descriptors)


@pytest.mark.parametrize("case", HONEST)
def test_an_honest_program_is_accepted(lane: Lane, tier: str, case: dict[str, Any]) -> None:
    if case.get("needs", "") not in tier:
        pytest.skip(f"needs {case['needs']}")
    descriptors = len(os.listdir("/proc/self/fd"))

    assert outcome_of(lane, source_of(case), case_tests(case, verdict_pb2.Limits())) == ("accepted", "")
    assert_nothing_is_left(lane, descriptors)


def test_there_are_at_least_sixty_hostile_programs_and_thirty_honest_ones() -> None:
    assert len(HOSTILE) >= 60
    assert len(HONEST) >= 30


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="already runs as an unprivileged user")
def test_all_of_it_holds_for_an_unprivileged_user_too(tmp_path: Path) -> None:
    """The interpreter may lie in root's home; a mount namespace of the test's own opens the way to it."""
    for tool in ("unshare", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    prefix = Path(sysconfig.get_paths()["stdlib"]).parent.parent
    closed = [folder for folder in reversed(prefix.parents) if not folder.stat().st_mode & 0o001]
    way = f"mount --bind {prefix} {tmp_path}"
    for folder in closed:
        way += f" && mount -t tmpfs -o mode=0755 tmpfs {folder}"
    if closed:
        way += f" && mkdir -p {prefix} && mount --bind {tmp_path} {prefix}"
    command = f"{sys.executable} -m pytest -q -p no:cacheprovider {__file__}"
    script = f"{way} && exec setpriv --reuid 65534 --regid 65534 --clear-groups {command}"
    finished = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", AS_NOBODY: "1", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-2000:]
    assert " passed" in finished.stdout
