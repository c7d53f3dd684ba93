"""A process that has loaded the heavy libraries and forks into services: those start at once and share its memory.

    python -m spo.local.warm_parent DESCRIPTOR LAUNCHER_PID MODULE...

Torch, transformers and the engine are half of what a start of the platform costs, and three services load them. Here
they are loaded once. Nothing may run in this process but the thread that forks: a lock that another thread holds would
be held for ever in every fork. So it serves nothing, and a library that starts a thread when it is loaded ends it, as
does a GPU that was initialised: services are started one by one then, as they are on machines with GPUs.

Over the socket come orders, one JSON document a message, and go reports:

    order     {"module", "environment", "log_path"}        fork, and run the module as `python -m module` would
    report    {"ready": true}                              once everything is loaded
              {"pid"}                                      of the order before
              {"pid", "status"}                            it ended, as subprocess has it: negative is a signal
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from spo.local.die_with_parent import bound_to_this_process, die_with_parent

LARGEST_MESSAGE_BYTES = 1 << 20
# Arrow's allocator tidies up in a thread of its own otherwise, from the moment when it is loaded.
WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# A fork of a process of a gigabyte takes milliseconds; what takes this long has stopped.
FORK_SECONDS = 30.0
KILLED = -signal.SIGKILL


class WarmParent:
    """The launcher's side: starts the process, asks it for forks and knows which of them ended, and how.

    Safe to use from several threads.
    """

    def __init__(self, modules: tuple[str, ...], environment: Mapping[str, str], log_path: Path) -> None:
        """modules: what it loads. environment: its own; what libraries read while they are loaded holds for all."""
        self._modules = modules
        self._environment = {**environment, **WITHOUT_THREADS}
        self.log_path = log_path
        self._ends: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_MESSAGE_BYTES)

    def begin(self) -> None:
        """Start to load, from a thread that lives as long as forks are needed: the kernel ends them with it."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "spo.local.warm_parent", str(self._theirs.fileno()), *self._modules]
        with self._theirs, self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                bound_to_this_process(command),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def is_ready(self) -> bool:
        """Whether everything is loaded and it can fork."""
        with self._lock:
            self._read_reports()
            return self._ready and not self.is_gone()

    def is_gone(self) -> bool:
        """Whether it has begun and ended; it is not begun again."""
        return self._process is not None and self._process.poll() is not None

    def start(self, module: str, environment: Mapping[str, str], log_path: Path) -> WarmProcess | None:
        """A fork that runs the module; None where there is none to be had: start the module by itself then."""
        order = {"module": module, "environment": dict(environment), "log_path": os.fspath(log_path.absolute())}
        with self._lock:
            self._read_reports()
            if not self._ready or self.is_gone():
                return None
            try:
                self._socket.send(json.dumps(order).encode())
            except OSError:  # it has just ended, or the order is too large for one message
                return None
            pid = self._pid_of_fork(time.monotonic() + FORK_SECONDS)
            if pid is None:  # it may yet fork, and nobody would know the child
                self._kill()
                return None
            return WarmProcess(self, pid)

    def exit_status(self, pid: int) -> int | None:
        """How the fork ended, None while it runs. Forks die with this process."""
        with self._lock:
            self._read_reports()
            if pid not in self._ends and self.is_gone():
                self._ends[pid] = KILLED
            return self._ends.get(pid)

    def close(self) -> None:
        """End it, and with it whatever still runs of its forks."""
        self._kill()
        self._socket.close()
        self._theirs.close()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _pid_of_fork(self, deadline: float) -> int | None:
        while (left := deadline - time.monotonic()) > 0 and not self.is_gone():
            if select.select([self._socket], [], [], min(left, 1.0))[0]:
                for report in self._read_reports():
                    return report
        return None

    def _read_reports(self) -> list[int]:
        """Take in what has come; the pids of new forks."""
        forked = []
        with contextlib.suppress(OSError):
            while message := self._socket.recv(LARGEST_MESSAGE_BYTES, socket.MSG_DONTWAIT):
                report = json.loads(message)
                if "ready" in report:
                    self._ready = True
                elif "status" in report:
                    self._ends[report["pid"]] = report["status"]
                else:
                    forked.append(int(report["pid"]))
        return forked


class WarmProcess:
    """A fork of the warm parent, with what `subprocess.Popen` has that its users need."""

    def __init__(self, parent: WarmParent, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        if self.returncode is None:
            self.returncode = self._parent.exit_status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forker:
    """The process itself: reads orders, forks, and reports its forks' ends."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._forks: dict[int, int] = {}

    def serve(self) -> dict[str, object] | None:
        """In this process: until the launcher is gone, then None. In each fork: the order that it carries out."""
        self._report(ready=True)
        waiting = select.poll()
        waiting.register(self._orders, select.POLLIN)
        while True:
            for descriptor, _ in waiting.poll():
                if descriptor != self._orders.fileno():
                    self._reap(descriptor)
                    waiting.unregister(descriptor)
                    os.close(descriptor)
                    continue
                message = self._orders.recv(LARGEST_MESSAGE_BYTES)
                if not message:
                    return None
                pid = os.fork()
                if not pid:
                    return dict(json.loads(message))
                ended = os.pidfd_open(pid)
                self._forks[ended] = pid
                waiting.register(ended, select.POLLIN)
                self._report(pid=pid)

    def close_in_fork(self) -> None:
        """The launcher sees the end of this process by its socket, and other forks are none of a fork's business."""
        self._orders.close()
        for descriptor in self._forks:
            os.close(descriptor)

    def _reap(self, descriptor: int) -> None:
        pid = self._forks.pop(descriptor)
        _, status = os.waitpid(pid, 0)
        self._report(pid=pid, status=os.waitstatus_to_exitcode(status))

    def _report(self, **report: object) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone, which the next read tells
            self._orders.send(json.dumps(report).encode())


def _become(order: dict[str, object], parent_pid: int) -> None:
    """Make this fork what a process would be that was started for the order."""
    die_with_parent(parent_pid)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(str(order["log_path"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    environment = order["environment"]
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    # Seeded when it was loaded: every fork would draw the same numbers. Python's own generator looks after itself.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    sys.argv = [f"-m {order['module']}"]
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"{sys.executable} -m {order['module']}")


def _why_not() -> str:
    """Why this process may not be forked, or nothing."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads} threads run in it"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a GPU is initialised in it"
    return ""


def main() -> None:
    """Load, fork on demand, and in each fork run what was asked for."""
    descriptor, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    # What is loaded is never looked at again by the collector, and so not copied by it.
    gc.freeze()
    if reason := _why_not():
        sys.exit(f"services start by themselves: this process cannot be forked, {reason}")
    own_pid = os.getpid()
    forker = _Forker(socket.socket(fileno=int(descriptor)))
    order = forker.serve()
    if order is None:
        return
    forker.close_in_fork()
    _become(order, own_pid)
    runpy.run_module(str(order["module"]), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
