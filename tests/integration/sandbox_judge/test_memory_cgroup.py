"""Memory of a whole tree, files in its scratch included, counts where the judge may make cgroups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.sandbox_judge.executor import RunEnding, RunLimits
from services.sandbox_judge.isolation import Executable, Freedom
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.sandbox_worker import (
    OVERHEAD_BYTES,
    MemoryCgroup,
    Role,
    SandboxWorker,
    child_name,
    memory_parent,
)
from services.sandbox_judge.settings import Settings

# Each of the four processes is within its own limits; each keeps what it has read while the others read.
FOUR_PROCESSES = """
for number in 1 2 3 4; do
  (kept=$(head -c 50000000 /dev/zero | tr '\\0' x); sleep 2) & pids="$pids $!"
done
for pid in $pids; do wait $pid || exit 1; done
"""
LIMITS = RunLimits(cpu_seconds=20, wall_seconds=20, memory_bytes=64 << 20, processes=32)


@pytest.fixture(scope="module")
def parent() -> Path:
    folder = memory_parent("auto")
    if folder is None:
        pytest.skip("NO WRITABLE MEMORY CGROUP HERE: limits of whole trees are not tested")
    return folder


@pytest.fixture
def worker(parent: Path) -> Iterator[SandboxWorker]:
    worker = SandboxWorker(choose_tier(Settings()), 0, cgroups=parent)
    yield worker
    worker.close()


def ending(worker: SandboxWorker, script: str) -> RunEnding:
    executable = Executable(command=("/bin/sh", "-c", script), freedom=Freedom.TOOLCHAIN)
    with worker.open(Role.COMPILER, executable, LIMITS) as opened:
        return opened.run(b"").ending


def test_processes_count_together_and_the_next_program_is_unharmed(worker: SandboxWorker) -> None:
    assert ending(worker, FOUR_PROCESSES) is RunEnding.MEMORY_LIMIT
    assert ending(worker, "exit 0") is RunEnding.EXITED
    assert ending(worker, "kill -9 $$") is RunEnding.SIGNALLED
    assert ending(worker, FOUR_PROCESSES) is RunEnding.MEMORY_LIMIT


def test_a_closed_worker_leaves_no_cgroup(worker: SandboxWorker, parent: Path) -> None:
    ending(worker, "exit 0")
    assert (parent / child_name(0, "compiler")).is_dir()
    worker.close()
    assert not (parent / child_name(0, "compiler")).exists()


def test_cgroups_of_judges_that_were_killed_are_removed_at_the_next_start(parent: Path) -> None:
    left = parent / "spo-judge-4194305-0-program"  # no process has so high a number
    left.mkdir()
    assert memory_parent("auto") == parent
    assert not left.exists()


def test_where_no_cgroup_can_be_made_the_judge_does_without(tmp_path: Path) -> None:
    assert memory_parent("off") is None
    assert memory_parent(str(tmp_path)) is None
    assert memory_parent("/proc") is None
    assert list(tmp_path.iterdir()) == []


def test_version_2_is_written_and_read_under_its_own_names(tmp_path: Path) -> None:
    """No controller of version 2 is to be had everywhere, so its files are plain ones here."""
    for name in ("memory.max", "memory.swap.max", "cgroup.procs"):
        (tmp_path / name).write_text("max")
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 0\n")
    cgroup = MemoryCgroup(tmp_path)

    cgroup.limit(64 << 20)
    assert (tmp_path / "memory.max").read_text() == str((64 << 20) + OVERHEAD_BYTES)
    assert not cgroup.has_killed()
    events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\n")
    assert cgroup.has_killed()
    assert not cgroup.has_killed()
    entered = cgroup.enter(("/bin/true",))
    assert os.spawnv(os.P_WAIT, entered[0], entered) == 0
    assert int((tmp_path / "cgroup.procs").read_text()) != os.getpid()
