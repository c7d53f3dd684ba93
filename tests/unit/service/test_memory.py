"""What counts as a want of memory, and what the machine lets a process take."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import psutil
import pytest
import torch

from spo import observability
from spo.observability import is_out_of_memory, memory_limit_bytes, oom_kills


def wrapped() -> Exception:
    try:
        torch.empty(1 << 50, dtype=torch.float32)
    except RuntimeError as error:
        outer = ValueError("the engine could not be built")
        outer.__cause__ = error
        return outer
    raise AssertionError("there are four pebibytes")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (wrapped(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
    ],
)
def test_errors_for_want_of_memory_are_told_from_others(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own = tmp_path / "own"
    own.write_text("0::/platform/trainer\n")
    inner = tmp_path / "fs" / "platform" / "trainer"
    inner.mkdir(parents=True)
    monkeypatch.setattr(observability, "OWN_CGROUPS", own)
    monkeypatch.setattr(observability, "CGROUPS", tmp_path / "fs")
    return inner


def test_the_least_limit_around_the_process_counts(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("max\n")
    assert memory_limit_bytes() == psutil.virtual_memory().total

    (cgroup.parent / "memory.max").write_text("1000000\n")
    assert memory_limit_bytes() == 1_000_000


def test_a_limit_of_the_process_itself_counts() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        assert memory_limit_bytes() <= limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_what_the_kernel_has_killed_is_read_of_the_cgroup(cgroup: Path) -> None:
    assert oom_kills() is None

    (cgroup / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")

    assert oom_kills() == 2
