"""Where hostile code is tried: on each isolation tier that can be had, as this user and as an unprivileged one.

All of it on the strongest tier as the user that runs the tests, and each piece in one more place that its name chooses;
with SPO_TEST_ALL=1 everywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from services.sandbox_judge.isolation import TIERS
from services.sandbox_judge.probe import why_not
from services.sandbox_judge.settings import Settings
from tests.support.budget import ALL, ROOT

# A probe runs programs.
why_absent = cache(why_not)
AS_NOBODY = "SPO_TEST_AS_NOBODY"
TOOLS = ("unshare", "setpriv")
_NOBODY = "65534"
_PATIENCE_SECONDS = 850


def tiers_to_try(*, nobody: bool) -> list[str]:
    """The tiers that a user tries; the one without Landlock differs by the kernel alone, and not by the user."""
    if nobody:
        return [TIERS[0], TIERS[-1]]
    # Containers where an image is named: SPO_SANDBOX_JUDGE_DOCKER_IMAGE.
    containers = ["docker"] if Settings().docker_image else []
    return [TIERS[0], TIERS[1], *containers, TIERS[-1]]


def is_tried(name: str, tier: str, *, nobody: bool) -> bool:
    """Whether what has this name is tried on a tier as this user."""
    if ALL in os.environ or tier == "docker" or (tier, nobody) == (TIERS[0], False):
        return True
    further = [(TIERS[1], False), (TIERS[-1], False), (TIERS[0], True), (TIERS[-1], True)]
    return further[zlib.crc32(name.encode()) % len(further)] == (tier, nobody)


def everywhere(parameter: str, cases: Sequence[Any]) -> pytest.MarkDecorator:
    """The cases, each a `pytest.param` of one value with an id, with the tiers that they run on, tier by tier."""
    nobody = AS_NOBODY in os.environ
    found = [
        pytest.param(tier, *case.values, id=f"{tier}-{case.id}", marks=[pytest.mark.slow] if tier == TIERS[1] else [])
        for tier in tiers_to_try(nobody=nobody)
        for case in cases
        if is_tried(case.id, tier, nobody=nobody)
    ]
    return pytest.mark.parametrize(("tier", parameter), found, indirect=["tier"])


def require_some_everywhere(names: Sequence[str]) -> None:
    """Assert that every place has some of them and that, beside the strongest, each is tried in one."""
    places = [(tier, nobody) for nobody in (False, True) for tier in tiers_to_try(nobody=nobody) if tier != "docker"]
    tried = {(tier, nobody): {n for n in names if is_tried(n, tier, nobody=nobody)} for tier, nobody in places}
    assert len(tried.pop((TIERS[0], False))) == len(names)
    assert min(map(len, tried.values())) >= len(names) // 8
    assert sum(map(len, tried.values())) == len(names)


@contextmanager
def run_as_nobody(file: str, folder: Path) -> Iterator[subprocess.Popen[str] | None]:
    """A run of a file of tests as an unprivileged user, beside the tests of this process; None where that cannot be.

    What it says goes to `folder`.log.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        yield None
        return
    # The interpreter may lie in root's home; a mount namespace of the test's own opens the way to it.
    prefix = Path(sysconfig.get_paths()["stdlib"]).parent.parent
    closed = [parent for parent in reversed(prefix.parents) if not parent.stat().st_mode & 0o001]
    way = f"mount --bind {prefix} {folder}"
    for parent in closed:
        way += f" && mount -t tmpfs -o mode=0755 tmpfs {parent}"
    if closed:
        way += f" && mkdir -p {prefix} && mount --bind {folder} {prefix}"
    command = f"{sys.executable} -m pytest -q -p no:cacheprovider {file}"
    script = f"{way} && exec setpriv --reuid {_NOBODY} --regid {_NOBODY} --clear-groups {command}"
    with folder.with_suffix(".log").open("w") as sink:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script],
            env={"PATH": os.environ["PATH"], "HOME": "/tmp", AS_NOBODY: "1", "PYTHONDONTWRITEBYTECODE": "1"}
            | {name: os.environ[name] for name in (ALL,) if name in os.environ},
            cwd=ROOT,
            stdout=sink,
            stderr=sink,
            text=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(20)


def require_passed(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for a run as nobody, and assert that it has passed."""
    status = process.wait(_PATIENCE_SECONDS)
    said = folder.with_suffix(".log").read_text()
    assert status == 0, said[-5000:]
    assert " passed" in said
