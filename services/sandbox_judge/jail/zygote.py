"""The process that lives in the outer jail, imports what programs import, and forks one inner jail per program.

It never sees tests or answers. It obeys the judge on the control descriptor: a request starts an inner jail and gives
it the channel over which the judge runs tests, "kill" ends it. It reports each jail's end; then nothing of it is left.
Everything that is the same for all programs is set up here once, because every fork inherits it: limits, Landlock, the
base seccomp filter, the private scratch.
"""

from __future__ import annotations

import _socket as socket  # the full module brings 60 pages of constants, which every fork would copy
import gc
import importlib
import marshal
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from services.sandbox_judge.jail import kernel, program, python_child

FILE_BYTES = 64 << 20
OPEN_FILES = 64
STACK_BYTES = 64 << 20
SCRATCH_BYTES = 64 << 20
SCRATCH_INODES = 4096
MOST_DESCRIPTORS = 8
MOUNTED_DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "console", "pts")]
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# The two sides of responses and their tests, which rehearse with each other.
_SIDES = {"tests_child": "response_child", "response_child": "tests_child"}
# What contest programs import most. More would make every fork dearer (0.02-0.1 ms each); the rest is imported by those
# programs that need it.
COMMON_IMPORTS = """
sys os io math time itertools functools collections collections.abc heapq bisect operator string re copy types typing
abc enum contextlib threading encodings.utf_8 encodings.latin_1 encodings.ascii
"""


def main() -> None:
    """Set up from the judge's first message, say so, and serve until the judge goes away."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, int(sys.argv[-1]))
    setting = marshal.loads(control.recv(1 << 20))
    try:
        python_child.input_as_file()
        harness, rehearse = _harness(setting)
        landlock_abi = _settle(setting, rehearse)
    except Exception as error:
        control.send(b"!" + repr(error).encode()[:4000])
        raise
    jail = program.Setting(
        namespaces=setting["namespaces"],
        capabilities=setting["capabilities"],
        scratch=setting["scratch"],
        filters=setting["filters"],
        own_pid_marker=setting["own_pid_marker"],
        prepared={name: kernel.prepared_filter(narrowing) for name, narrowing in setting["filters"].items()}
        if setting["namespaces"]
        else {},
        main=python_child.prepare(),
        harness=harness,
    )
    # The jail's own modules are none of the programs' business.
    for name in [name for name in sys.modules if name.split(".")[0] == "services"]:
        del sys.modules[name]
    python_child.rehearse()
    gc.disable()
    gc.collect()
    gc.freeze()
    control.send(b"ready %d" % landlock_abi)
    _serve(control, jail)


def _settle(setting: dict[str, Any], rehearse: Callable[[], None]) -> int:
    """Enter the state that all programs inherit; returns the Landlock version in force, 0 for none."""
    if setting["uid"] is not None:
        kernel.become(setting["uid"], setting["uid"], setting["capabilities"])
    # A judge started in the background of a shell inherits an ignored interrupt; programs expect the usual one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kernel.forbid_new_privileges()
    kernel.adopt_orphans()
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    _import_usual_modules()
    landlock_abi = kernel.landlock_abi() if setting["landlock"] else 0
    if setting["namespaces"]:
        kernel.own_mounts()
        # Programs may be the owner of what bubblewrap has made, and the devices are the host's.
        for path in filter(os.path.ismount, ("/", "/dev", *MOUNTED_DEVICES)):
            kernel.remount_read_only(path)
        kernel.mount_tmpfs(setting["scratch"], SCRATCH_BYTES, SCRATCH_INODES)
    _import_libraries(setting, rehearse)
    if setting["imports"] and setting["scratch"]:
        program.empty_folder(setting["scratch"])
    if setting["namespaces"] and not landlock_abi:
        kernel.mount_tmpfs("/proc", 4096, 1, writable=False)  # nothing else would keep programs from what is in it
    if landlock_abi:
        kernel.landlock(landlock_abi, _allowed_paths(setting))
    if setting["scratch"]:
        os.chdir(setting["scratch"])
    kernel.set_dumpable(dumpable=False)
    kernel.set_capabilities(setting["capabilities"])
    _limit_resources()
    kernel.prepared_filter(setting["base_filter"])()
    return landlock_abi


def _allowed_paths(setting: dict[str, Any]) -> list[tuple[str, bool]]:
    """Paths that programs may use, and whether they may write there."""
    writable = [*DEVICES, *([setting["scratch"]] if setting["scratch"] else [])]
    paths = [(path, False) for path in setting["readable"]] + [(path, True) for path in writable]
    return [(path, write) for path, write in paths if os.path.exists(path)]


def _import_usual_modules() -> None:
    for name in COMMON_IMPORTS.split():
        importlib.import_module(name)
    # `exit` and `quit` come from site, which is switched off because it costs 5 ms and reads the file system.
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))


def _harness(setting: dict[str, Any]) -> tuple[Callable[[], NoReturn] | None, Callable[[], None]]:
    """What the children run where they are no programs, and its rehearsal; only zygotes that need it pay for these."""
    if not setting["harness"]:
        return None, lambda: None
    harness = _of_jail(setting["harness"])
    run: Callable[[], NoReturn] = harness.run
    if setting["harness"] in _SIDES:
        loading, other = _of_jail("loading"), _of_jail(_SIDES[setting["harness"]])
        return run, lambda: loading.rehearse(harness.play, other.play)
    return run, lambda: harness.rehearse(setting["imports"])


def _of_jail(name: str) -> ModuleType:
    return importlib.import_module(f"services.sandbox_judge.jail.{name}")


def _import_libraries(setting: dict[str, Any], rehearse: Callable[[], None]) -> None:
    """Import what the children would, and let it do what is done once; no threads may be left of that."""
    sys.path += [path for path in setting["packages"] if os.path.isdir(path)]
    if setting["imports"] and setting["scratch"]:
        os.environ["MPLCONFIGDIR"] = setting["scratch"]  # matplotlib, which some library imports, insists on a folder
    for name in setting["imports"]:
        importlib.import_module(name)
    if setting["rehearsed"]:
        rehearse()


def _limit_resources() -> None:
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (FILE_BYTES, FILE_BYTES),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_NOFILE: (OPEN_FILES, OPEN_FILES),
        resource.RLIMIT_STACK: (STACK_BYTES, resource.RLIM_INFINITY),
    }
    for kind, (soft, hard) in limits.items():
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            hard = most if hard == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _serve(control: socket.socket, setting: program.Setting) -> None:
    # A pid namespace takes everything in it along when its jail ends.
    clean_up = program.cleaner(setting, processes=not setting.namespaces)
    while True:
        message, descriptors = receive(control)
        if not message:
            return
        if message == b"kill":
            continue  # it was meant for a jail that has ended meanwhile
        pid = kernel.fork_into(kernel.JAIL_NAMESPACES if setting.namespaces else 0)
        if pid == 0:
            control.close()
            program.live(setting, marshal.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        status = _watch(control, pid)
        clean_up(pid)
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


def receive(channel: socket.socket, size: int = 1 << 18) -> tuple[bytes, list[int]]:
    """One message and the descriptors that came with it."""
    message, ancillary, _, _ = channel.recvmsg(size, socket.CMSG_SPACE(4 * MOST_DESCRIPTORS))
    content = ancillary[0][2] if ancillary else b""
    return message, list(struct.unpack(f"={len(content) // 4}i", content))
