"""Forks of a process that has loaded their libraries: as if each had been started by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from spo.local.judge_client import Child
from spo.local.warm_parent import KILLED, WarmParent
from spo.testing.peers import wait_until

LIBRARY = "import random, numpy\nLOADED_BY = __import__('os').getpid()\n"
SERVICE = """
    import os, random, signal, sys, time
    import numpy, library

    print("library", library.LOADED_BY, "me", os.getpid(), os.environ["COLOUR"], "GONE" in os.environ, flush=True)
    print("drawn", random.random(), numpy.random.random(), "session", os.getsid(0), __name__, flush=True)
    print("handlers", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, len(os.listdir("/proc/self/fd")), flush=True)
    if os.environ["COLOUR"] == "red":
        sys.exit(7)
    if os.environ["COLOUR"] == "broken":
        raise RuntimeError("it broke")
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "service.py").write_text(textwrap.dedent(SERVICE))
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\n"
    )
    return tmp_path


@contextmanager
def begun(folder: Path, *modules: str) -> Iterator[WarmParent]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.getcwd()}", "GONE": "with the environment of a fork"}
    parent = WarmParent(modules, environment, folder / "warm.log")
    parent.begin()
    try:
        yield parent
    finally:
        parent.close()


@pytest.fixture
def parent(folder: Path) -> Iterator[WarmParent]:
    with begun(folder, "library") as parent:
        wait_until(parent.is_ready, "everything is loaded", 60)
        yield parent


def environment(colour: str) -> dict[str, str]:
    return {"COLOUR": colour, "PATH": os.environ["PATH"]}


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def words(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def test_a_fork_is_a_process_of_its_own_with_what_was_loaded(parent: WarmParent, folder: Path) -> None:
    forks = [parent.start("service", environment("blue"), folder / f"{number}.log") for number in range(2)]
    logs = [folder / f"{number}.log" for number in range(2)]
    wait_until(lambda: all("handlers" in words(log) for log in logs), "both to have begun", 30)
    drawn = []
    for fork, log in zip(forks, logs, strict=True):
        assert fork is not None
        told = log.read_text().splitlines()
        assert told[0] == f"library {parent.pid} me {fork.pid} blue False"
        assert told[1].endswith(f"session {fork.pid} __main__")
        # Standard input, output and error, and the folder that is listed: nothing of the launcher's or of another fork.
        assert told[2] == "handlers True 4"
        drawn += told[1].split()[1:3]
        assert fork.poll() is None
        fork.terminate()
        assert fork.wait(10) == -signal.SIGTERM
    assert len(set(drawn)) == 4


def test_its_end_is_reported_as_that_of_any_process(parent: WarmParent, folder: Path) -> None:
    ended = parent.start("service", environment("red"), folder / "red.log")
    broken = parent.start("service", environment("broken"), folder / "broken.log")
    assert ended is not None
    assert broken is not None
    assert ended.wait(30) == 7
    assert broken.wait(30) == 1
    assert "RuntimeError: it broke" in (folder / "broken.log").read_text()
    lives = parent.start("service", environment("blue"), folder / "blue.log")
    assert lives is not None
    with pytest.raises(subprocess.TimeoutExpired):
        lives.wait(0.1)
    os.kill(lives.pid, signal.SIGKILL)
    assert lives.wait(10) == -signal.SIGKILL


def test_forks_end_with_their_parent_and_a_service_starts_by_itself_then(parent: WarmParent, folder: Path) -> None:
    child = Child(
        name="service",
        command=[sys.executable, "-m", "service"],
        environment={**environment("blue"), "PYTHONPATH": str(folder)},
        log_path=folder / "service.log",
        address="",
        is_ready=lambda: True,
        warm_parent=parent,
        module="service",
    )
    child.start()
    first = child.pid
    assert first is not None
    wait_until(lambda: "handlers" in words(child.log_path), "the fork to have begun", 30)
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(child.revive, "it is started again", 30)
    assert child.exit_status == KILLED
    wait_until(lambda: not lives(first), "the fork to be gone", 10)
    wait_until(lambda: words(child.log_path).count("handlers") == 2, "the new process to have begun", 30)
    assert f"library {child.pid} me {child.pid}" in child.log_path.read_text()
    child.ask_to_stop()
    assert child.stop_by(time.monotonic() + 10)


def test_a_process_with_threads_is_not_forked_and_says_why(folder: Path) -> None:
    with begun(folder, "library", "threaded") as parent:
        wait_until(parent.is_gone, "it has ended", 60)
        assert not parent.is_ready()
        assert parent.start("service", environment("blue"), folder / "blue.log") is None
    assert "2 threads run in it" in (folder / "warm.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_everything_ends_with_the_launcher(folder: Path, number: int) -> None:
    script = textwrap.dedent(f"""
        import os, sys, time
        sys.path.insert(0, {os.getcwd()!r})
        from pathlib import Path
        from tests.integration.local.test_warm_parent import begun, environment
        folder = Path({str(folder)!r})
        with begun(folder, "library") as parent:
            while not parent.is_ready():
                time.sleep(0.05)
            fork = parent.start("service", environment("blue"), folder / "blue.log")
            print(parent.pid, fork.pid, flush=True)
            time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert [lives(pid) for pid in pids] == [True, True]
        launcher.send_signal(number)
    wait_until(lambda: not any(map(lives, pids)), "both are gone", 10)
