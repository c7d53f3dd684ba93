"""What the judge may use is its cgroup's, not the node's; kernels without Landlock, gVisor among them, are named."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from services.sandbox_judge import sandbox_worker as sandbox_worker_module
from services.sandbox_judge.sandbox_worker import (
    LANE_BYTES,
    RESERVED_BYTES,
    Machine,
    MemoryBudget,
    lanes,
    program_memory,
    this_machine,
)

# Recorded: /proc/version of runsc (docker run --runtime=runsc; a newer release), and of Linux.
GVISOR = "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n"
NEWER_GVISOR = "Linux version 4.19.0-gvisor #1 SMP Sun Jan 10 15:06:54 PST 2016\n"
LINUX = "Linux version 6.8.0-45-generic (buildd@lcy02-amd64-115) (x86_64-linux-gnu-gcc-13) #45-Ubuntu SMP\n"
OLD_LINUX = "Linux version 4.18.0-553.el8_10.x86_64 (mockbuild@x86) (gcc version 8.5.0) #1 SMP\n"
VERSION_2 = "0::/\n"
VERSION_1 = "11:memory:/kubepods/burstable/pod1/c1\n4:cpu,cpuacct:/kubepods/burstable/pod1/c1\n1:name=systemd:/\n"


def found(folder: Path, version: str, cgroup: str, files: dict[str, str]) -> Machine:
    for name, text in {"proc/version": version, "proc/self/cgroup": cgroup, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return this_machine(folder / "proc", folder / "cgroup")


@pytest.fixture(autouse=True)
def a_node_of_64_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_worker_module.os, "sched_getaffinity", lambda pid: set(range(64)))


@pytest.mark.parametrize(("quota", "cores"), [("200000 100000", 2), ("max 100000", 64), ("50000 100000", 1)])
def test_the_cores_are_those_of_the_pod_and_not_of_the_node(tmp_path: Path, quota: str, cores: int) -> None:
    files = {"cgroup/cpu.max": quota, "cgroup/memory.max": "4294967296\n"}
    machine = found(tmp_path, LINUX, VERSION_2, files)
    assert (machine.cores, machine.memory_bytes) == (cores, 4 << 30)


def test_the_narrowest_cgroup_above_the_judge_counts(tmp_path: Path) -> None:
    files = {
        "cgroup/kube/cpu.max": "300000 100000",
        "cgroup/kube/judge/cpu.max": "max 100000",
        "cgroup/kube/memory.max": "max",
        "cgroup/kube/judge/memory.max": "1073741824",
    }
    machine = found(tmp_path, LINUX, "0::/kube/judge\n", files)
    assert (machine.cores, machine.memory_bytes) == (3, 1 << 30)


def test_version_1_of_cgroups_says_the_same_in_other_files(tmp_path: Path) -> None:
    files = {
        "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "350000\n",
        "cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cgroup/memory/memory.limit_in_bytes": "2147483648\n",
    }
    machine = found(tmp_path, LINUX, VERSION_1, files)
    assert (machine.cores, machine.memory_bytes) == (3, 2 << 30)
    (tmp_path / "cgroup/cpu,cpuacct/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    free = this_machine(tmp_path / "proc", tmp_path / "cgroup")
    assert (free.cores, free.memory_bytes) == (64, None)


@pytest.mark.parametrize("version", [GVISOR, NEWER_GVISOR])
def test_gvisor_is_known_by_what_it_says_of_itself(tmp_path: Path, version: str) -> None:
    machine = found(tmp_path, version, "", {})
    assert machine.gvisor
    assert machine.why_no_landlock().startswith("gVisor (Linux 4.")


def test_a_kernel_without_landlock_is_named_with_the_reason(tmp_path: Path) -> None:
    assert found(tmp_path, OLD_LINUX, "", {}).why_no_landlock().startswith("Linux 4.18.0-553.el8_10.x86_64 has no")
    machine = found(tmp_path, LINUX, "", {})
    assert not machine.gvisor
    assert "started without (lsm=)" in machine.why_no_landlock()


def test_there_are_as_many_lanes_as_cores_whose_memory_fits(caplog: pytest.LogCaptureFixture) -> None:
    def of(cores: int, memory: int | None) -> int:
        return lanes(0, Machine(cores, memory, "Linux 6.8", gvisor=False))

    assert of(2, 4 << 30) == 2
    assert of(16, 2 << 30) == ((2 << 30) - RESERVED_BYTES) // LANE_BYTES == 4
    assert of(16, 256 << 20) == 1
    assert of(16, None) == 16
    assert lanes(8, Machine(2, 1 << 30, "Linux 6.8", gvisor=False)) == 8


def test_programs_wait_until_the_memory_of_all_fits_and_a_giant_runs_alone() -> None:
    budget = MemoryBudget(program_memory(Machine(4, RESERVED_BYTES + 2 * LANE_BYTES, "Linux 6.8", gvisor=False)))
    inside, most = [0], [0]
    lock = threading.Lock()

    def program(memory_bytes: int) -> None:
        with budget.hold(memory_bytes, waits=True):
            with lock:
                inside[0] += memory_bytes
                most[0] = max(most[0], inside[0])
            with lock:
                inside[0] -= memory_bytes

    sizes = [256 << 20] * 20 + [4 << 30] * 2
    threads = [threading.Thread(target=program, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] == 4 << 30
    with budget.hold(4 << 30, waits=True), budget.hold(256 << 20, waits=False):
        pass
