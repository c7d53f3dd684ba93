"""The process that lives in the outer jail, imports what programs import, and forks one inner jail per program.

It never sees tests or answers. It obeys the judge on the control descriptor: a request starts an inner jail
and gives it the channel over which the judge runs tests, "kill" ends it. It reports each jail's end; then nothing of
it is left.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any

from services.sandbox_judge.jail import kernel, program

# What contest programs import; loaded once, shared by every fork.
COMMON_IMPORTS = """
sys os math cmath collections collections.abc itertools functools heapq bisect re string random operator copy
io array threading time datetime decimal fractions json typing dataclasses enum statistics queue textwrap
contextlib warnings traceback numbers struct types abc linecache tokenize encodings.utf_8
encodings.latin_1 encodings.ascii
"""


def main() -> None:
    """Set up from the judge's first message, say so, and serve until the judge goes away."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    setting = json.loads(control.recv(1 << 20))
    try:
        _settle(setting)
        jail = program.Setting(
            namespaces=setting["namespaces"],
            uid=os.getuid(),
            gid=os.getgid(),
            landlock_abi=kernel.landlock_abi() if setting["landlock"] else 0,
            readable=[(os.open(path, os.O_PATH), kernel.READ) for path in setting["readable"] if os.path.exists(path)]
            + [(os.open(path, os.O_PATH), None) for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")],
            capabilities=setting["capabilities"],
            filters={freedom: bytes.fromhex(text) for freedom, text in setting["filters"].items()},
            own_pid_marker=struct.pack("=I", setting["own_pid_marker"]),
        )
    except Exception as error:
        control.send(b"!" + repr(error).encode()[:4000])
        raise
    _import_common()
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"landlock": jail.landlock_abi, "version": sys.version.split()[0]}).encode())
    _serve(control, jail)


def _settle(setting: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if setting["uid"] is not None:
        kernel.become(setting["uid"], setting["uid"], setting["capabilities"])
    kernel.forbid_new_privileges()
    kernel.adopt_orphans()
    os.chdir("/")
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]


def _import_common() -> None:
    for name in COMMON_IMPORTS.split():
        importlib.import_module(name)
    # `exit` and `quit` come from site, which is switched off because it costs 5 ms and reads the file system.
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))


def _serve(control: socket.socket, setting: program.Setting) -> None:
    while True:
        message, descriptors = receive(control)
        if not message:
            return
        if message == b"kill":
            continue  # it was meant for a jail that has ended meanwhile
        pid = kernel.fork_into(kernel.JAIL_NAMESPACES if setting.namespaces else 0)
        if pid == 0:
            control.close()
            program.live(setting, message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        status = _watch(control, pid)
        program.kill_descendants()
        control.send(b"ended %d" % status)


def _watch(control: socket.socket, pid: int) -> int:
    """Wait for the jail's end, killing it when the judge says so or is gone; returns its wait status."""
    ended = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(control, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poller.poll()]
        if ended in ready:
            os.close(ended)
            return os.waitpid(pid, 0)[1]
        if not control.recv(64):
            poller.unregister(control)
        os.kill(pid, signal.SIGKILL)


def receive(link: socket.socket, size: int = 1 << 18) -> tuple[bytes, list[int]]:
    """One message and the descriptors that came with it."""
    descriptors = array.array("i")
    message, ancillary, _, _ = link.recvmsg(size, socket.CMSG_SPACE(8 * descriptors.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return message, list(descriptors)
