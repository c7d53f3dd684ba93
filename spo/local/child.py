"""One child process of the launcher: started in its own process group, watched, restarted, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from spo.local import die_with_parent

FAST_DEATH_SECONDS = 20.0
LONGEST_BACKOFF_SECONDS = 30.0


def bound_to_this_process(command: list[str]) -> list[str]:
    """The command, made to die with this process; start it from a thread that lives as long as it is needed."""
    return [sys.executable, "-I", "-S", str(die_with_parent.__file__), str(os.getpid()), *command]


class ChildStatus(TypedDict):
    """What state.json and reports say of a child; pid is None before its first start."""

    name: str
    pid: int | None
    restarts: int
    address: str


@dataclass
class Child:
    """A command that should be running; address is where it answers, is_ready asks whether it does.

    Start it from a thread that lives as long as the launcher: the kernel ends the child with that thread.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log_path: Path
    address: str
    is_ready: Callable[[], bool]
    restarts: int = field(default=0, init=False)
    fast_deaths: int = field(default=0, init=False)
    exit_status: int | None = field(default=None, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _started_at: float = field(default=0.0, init=False)
    _restart_at: float | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def status(self) -> ChildStatus:
        return {"name": self.name, "pid": self.pid, "restarts": self.restarts, "address": self.address}

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                bound_to_this_process(self.command),
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal then reaches the launcher alone, which stops the children in order.
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        self._restart_at = None

    def revive(self) -> bool:
        """Restart a dead child once its pause is over; True when a process was started.

        The pause doubles with every death that came soon after the start.
        """
        if self._process is None or self._process.poll() is None:
            return False
        now = time.monotonic()
        if self._restart_at is None:
            self.exit_status = self._process.returncode
            self._kill_group()
            died_fast = now - self._started_at < FAST_DEATH_SECONDS
            self.fast_deaths = self.fast_deaths + 1 if died_fast else 0
            self._restart_at = now + min(LONGEST_BACKOFF_SECONDS, 0.5 * 2**self.fast_deaths)
        if now < self._restart_at:
            return False
        self.start()
        self.restarts += 1
        return True

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask_to_stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def stop_by(self, deadline: float) -> bool:
        """Wait until deadline (monotonic) for the end, then kill the whole group; True when it ended by itself."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._kill_group()
            self._process.wait()

    def last_log_lines(self, count: int = 15) -> str:
        """The end of its log, for messages."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])
        return ""

    def _kill_group(self) -> None:
        """What the child had started itself (ranks, sandboxes) must not outlive it."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
