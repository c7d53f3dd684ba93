"""Processes killed, and processes stopped for a while: each service, and what services start themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import psutil

from spo.local.die_with_parent import bound_to_this_process
from spo.local.launcher import REDIS, SERVICES
from spo.testing.peers import wait_until
from tests.chaos.faults.fault import Fault, Inflicted, Stage
from tests.chaos.platform import LEASE_SECONDS, RUNNER

SECOND_ORCHESTRATOR_SECONDS = 25.0
SECOND_LAUNCH_SECONDS = 20.0
STANDBY_SECONDS = 30.0
TAKEOVER_SECONDS = 20.0


def kill(stage: Stage, name: str) -> None:
    """kill -9 of a child, whichever of its lives it is in."""
    pid = stage.platform.child(name).pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_service(service: str, stage: Stage, random: Random) -> Inflicted:
    kill(stage, service)
    return Inflicted(f"kill -9 of {service}", killed=(service,))


def _kill_two(stage: Stage, random: Random) -> Inflicted:
    victims = tuple(random.sample(SERVICES, 2))
    for service in victims:
        kill(stage, service)
    return Inflicted(f"kill -9 of {' and '.join(victims)}", killed=victims)


def _kill_sandbox(stage: Stage, random: Random) -> Inflicted | None:
    return _kill_descendant(stage, random, "sandbox-judge", "a sandbox process")


def _kill_rank(stage: Stage, random: Random) -> Inflicted | None:
    """Of several ranks: the others end with it, and torchrun's end makes the launcher start all anew."""
    killed = _kill_descendant(stage, random, "trainer", "a rank of the trainer")
    return replace(killed, killed=("trainer",)) if killed else None


def _kill_descendant(stage: Stage, random: Random, service: str, what: str) -> Inflicted | None:
    pid = stage.platform.child(service).pid
    try:
        descendants = psutil.Process(pid).children(recursive=True)
        victim = random.choice(sorted(descendants, key=lambda process: process.pid))
        victim.kill()
    except (psutil.NoSuchProcess, IndexError):
        return None
    return Inflicted(f"kill -9 of {what}, pid {victim.pid}")


def _stop(longest: bool, stage: Stage, random: Random) -> Inflicted | None:
    """SIGSTOP of a service, for less than a lease or for longer."""
    service = random.choice(SERVICES)
    seconds = LEASE_SECONDS * (random.uniform(1.5, 2) if longest else random.uniform(0.3, 0.6))
    return stopped(stage, service, seconds)


def stopped(stage: Stage, name: str, seconds: float) -> Inflicted | None:
    """SIGSTOP of a child and all that it started."""
    pid = stage.platform.child(name).pid
    try:
        head = psutil.Process(pid)
        whole = [head, *head.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    for process in whole:
        _signal(process, signal.SIGSTOP)

    def go_on() -> None:
        for process in whole:
            _signal(process, signal.SIGCONT)

    return Inflicted(f"SIGSTOP of {name} for {seconds:.1f} s", seconds, go_on)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _second_orchestrator(stage: Stage, random: Random) -> Inflicted:
    """Another orchestrator on the same Redis and state, killed after a while: at most one of them may act."""
    second, _ = _start_second(stage)
    seconds = SECOND_ORCHESTRATOR_SECONDS
    return Inflicted(f"a second orchestrator, pid {second.pid}, for {seconds:g} s", seconds, partial(_end, second))


def _second_launch(stage: Stage, random: Random) -> Inflicted:
    """Another `spo up` on this state folder, under another name: it starts nothing and ends."""
    launcher = stage.platform.launcher
    name = f"{launcher.name}-second-{time.monotonic_ns()}"
    log = (launcher.folder / "logs" / f"{name}.log").open("wb")
    command = [
        sys.executable,
        "-m",
        "spo.cli",
        "up",
        "--name",
        name,
        "--port",
        "0",
        "--state",
        str(launcher.state_path),
    ]
    second = psutil.Popen(
        bound_to_this_process(command),
        env={**os.environ, "SPO_LAUNCHER_RUNS_PATH": str(launcher.settings.runs_path)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )

    def end() -> None:
        with contextlib.suppress(psutil.TimeoutExpired):
            second.wait(SECOND_LAUNCH_SECONDS)
        status = second.poll()
        log.close()
        if status in (0, None) or "state_folder_in_use" not in Path(log.name).read_text():
            stage.broken.append(f"a second launch on the state folder: exit status {status}, see {log.name}")
        _end(second)

    return Inflicted(f"a second launch, pid {second.pid}", SECOND_LAUNCH_SECONDS, end)


def _takeover(stage: Stage, random: Random) -> Inflicted | None:
    """The leader is stopped until its standby has taken over, and wakes up as one who leads no more; then that dies."""
    second, log = _start_second(stage)
    try:
        wait_until(lambda: b'"standby"' in log.read_bytes(), "a standby", STANDBY_SECONDS, 0.2)
    except TimeoutError:
        _end(second)
        return None
    first = stopped(stage, "orchestrator", TAKEOVER_SECONDS)
    if first is None:
        _end(second)
        return None

    def end() -> None:
        first.end()
        _end(second)

    # Whoever wakes up behind a new leader ends, and is started anew.
    return Inflicted(f"the standby, pid {second.pid}, takes over and dies", first.seconds, end, ("orchestrator",))


def _start_second(stage: Stage) -> tuple[psutil.Popen, Path]:
    child = stage.platform.child("orchestrator")
    ports = {"SPO_ORCHESTRATOR_PORT": "0", "SPO_ORCHESTRATOR_HTTP_PORT": "0"}
    path = stage.platform.launcher.folder / "logs" / f"orchestrator-second-{time.monotonic_ns()}.log"
    with path.open("wb") as log:
        second = psutil.Popen(
            bound_to_this_process(child.command),
            env={**child.environment, **ports},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return second, path


def _end(second: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        second.kill()
    second.wait(10)


def _kill_agent(stage: Stage, random: Random) -> Inflicted | None:
    """Of an agent in the middle of its episode, which has failed then and is begun anew."""
    return _kill_descendant(stage, random, RUNNER, "an agent")


def _stop_runner(stage: Stage, random: Random) -> Inflicted | None:
    return stopped(stage, RUNNER, random.uniform(2, 8))


# Where agents play the episodes of jobs.
RUNNERS = (
    Fault("kill runner", partial(_kill_service, RUNNER), often=True),
    Fault("stop runner", _stop_runner, often=True),
    Fault("kill agent", _kill_agent, often=True),
)
PROCESSES = (
    *(Fault(f"kill {service}", partial(_kill_service, service)) for service in SERVICES),
    Fault("kill two", _kill_two),
    Fault("kill sandbox", _kill_sandbox),
    Fault("kill rank", _kill_rank),
    Fault("kill redis", partial(_kill_service, REDIS), restarts_redis=True),
    Fault("stop below lease", partial(_stop, False)),
    Fault("stop beyond lease", partial(_stop, True)),
    Fault("two orchestrators", _second_orchestrator),
    Fault("second launch", _second_launch),
    Fault("takeover", _takeover),
)
