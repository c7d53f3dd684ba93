"""Replace this process by a command that the kernel ends when the launcher dies, even by kill -9.

    python die_with_parent.py LAUNCHER_PID COMMAND [ARGUMENT...]

A process of its own instead of a `preexec_fn`: forking a multi-threaded launcher to run Python code is not safe.

    python die_with_parent.py --keep GRACE_SECONDS FOLDER LAUNCHER_PID COMMAND [ARGUMENT...]

Here the process stays beside the command, and ends whatever that has started, however far it went from it: once the
command has ended, when it is told to by SIGTERM, and when the launcher dies. Then the folder goes as well.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Of processes that are killed: what starts more faster than it can be killed is left, which is none of an honest agent.
KILL_SECONDS = 10.0
_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM)


def die_with_parent(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent dies; ends at once where another is the parent by now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    # The parent may have died before the line above.
    if os.getppid() != parent_pid:
        sys.exit(1)


def bound_to_this_process(command: list[str]) -> list[str]:
    """The command, made to die with this process; start it from a thread that lives as long as it is needed."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def kept_by_this_process(command: list[str], folder: Path, grace_seconds: float) -> list[str]:
    """The command, with a keeper that ends it and all that it has started; SIGTERM to it gives it so long to end.

    folder: goes when this process dies. SIGINT is passed on. Start it as `bound_to_this_process`, in a session of its
    own. Its exit status is the command's.
    """
    words = ["--keep", str(grace_seconds), os.fspath(folder), str(os.getpid())]
    return [sys.executable, "-I", "-S", __file__, *words, *command]


def keep(grace_seconds: float, folder: str, parent_pid: int, command: list[str]) -> int:
    """Run a command, and end all that is left of it when it, its time, or the parent ends; its exit status."""
    # Held until they are waited for, so that none is missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    if sys.platform == "linux":
        # Whoever outlives its own parent becomes this process's child, whatever session it is in.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(parent_pid, signal.SIGTERM)
    child = _started(command)
    status: int | None = None
    while status is None:
        heard = signal.sigwait(_HEARD)
        status = _reaped(child)
        if heard == signal.SIGALRM or os.getppid() != parent_pid:
            break
        if status is None and heard == signal.SIGINT:
            os.kill(child, signal.SIGINT)
        elif status is None and heard == signal.SIGTERM:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, grace_seconds)
    _end_all(child)
    if os.getppid() != parent_pid:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if status is None else status


def _started(command: list[str]) -> int:
    """The command in a group of its own, which the kernel ends when this process dies. Nobody else runs in here."""
    keeper = os.getpid()
    child = os.fork()
    if child:
        # By both: a group is there before anybody signals it, or the child has ended.
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        return child
    try:
        os.setpgid(0, 0)
        die_with_parent(keeper)
        # Python ignores these, and a command would as well.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _reaped(child: int) -> int | None:
    """The exit status of the child where it has ended; what else has ended goes too."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                status = code if code >= 0 else 128 - code
    return status


def _end_all(child: int) -> None:
    """Kill what this process has started, and what that has, until nothing is left."""
    until = time.monotonic() + KILL_SECONDS
    while time.monotonic() < until:
        for pid in [-child] if sys.platform != "linux" else _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _descendants() -> list[int]:
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: list[int] = []
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found += generation
    return found


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
    if sys.argv[1] == "--keep":
        grace, folder, launcher_pid, *command = sys.argv[2:]
        sys.exit(keep(float(grace), folder, int(launcher_pid), command))
    launcher_pid, *command = sys.argv[1:]
    die_with_parent(int(launcher_pid))
    os.execv(command[0], command)
