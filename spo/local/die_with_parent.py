"""Replace this process by a command that the kernel ends when the launcher dies, even by kill -9.

    python die_with_parent.py LAUNCHER_PID COMMAND [ARGUMENT...]

A process of its own instead of a `preexec_fn`: forking a multi-threaded launcher to run Python code is not safe.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent dies; ends at once where another is the parent by now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above.
    if os.getppid() != parent_pid:
        sys.exit(1)


def bound_to_this_process(command: list[str]) -> list[str]:
    """The command, made to die with this process; start it from a thread that lives as long as it is needed."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def die_with_torchrun() -> None:
    """Where torchrun started this process: have it end with torchrun, or at once where that has died already.

    torchrun gives every rank a session of its own, so nobody else would end them: ranks left behind train on beside
    their successors, or hold the port that those need.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    parent_pid = os.getppid()
    # The parent of an orphan is whoever adopts orphans; torchrun itself may have that number too, in a container.
    try:
        command = Path(f"/proc/{parent_pid}/cmdline").read_bytes()
    except OSError:
        command = b""
    if b"torch" not in command:
        sys.exit(f"the torchrun that started this rank is gone: process {parent_pid} is its parent now")
    die_with_parent(parent_pid)


if __name__ == "__main__":
    launcher_pid, *command = sys.argv[1:]
    die_with_parent(int(launcher_pid))
    os.execv(command[0], command)
