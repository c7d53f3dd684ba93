"""Replace this process by a command that the kernel ends when the launcher dies, even by kill -9.

    python die_with_parent.py LAUNCHER_PID COMMAND [ARGUMENT...]

A process of its own instead of a `preexec_fn`: forking a multi-threaded launcher to run Python code is not safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    launcher_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have died before the line above.
    if os.getppid() != int(launcher_pid):
        sys.exit(1)
    os.execv(command[0], command)
