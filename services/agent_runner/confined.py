"""`python confined.py /FOLDER:... COMMAND...`: becomes the command, confined by Landlock.

Agents run as the user that the runner runs as, in its container: without this they could read the platform's key from
its environment or from the secrets that are mounted there, and write into each other's episodes. What is confined
reads what the image brings, reads and writes the folder that it is started in, and neither traces nor signals what is
outside. The network is as it was: a session has to be called.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

# System calls, the same on every machine; rights by the version of Landlock that brought them (linux/landlock.h).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
_HAS_CAPABILITY, _DROP_CAPABILITY = 23, 24
_CAPABILITIES = 64
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_READ = 1 << 0 | 1 << 2 | 1 << 3
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
# Abstract sockets and signals to what is outside, from version 6 on.
_SCOPES = 3
# Of the root what an image does not bring: secrets, other episodes, state, people's homes.
HIDDEN = frozenset(("home", "mnt", "root", "run", "srv", "sys", "tmp", "var"))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def landlock_version() -> int:
    """Version of Landlock in this kernel; 0 where there is none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))))


def require_landlock() -> None:
    """Raises OSError where agents would see the runner's key."""
    if not landlock_version():
        raise OSError("this kernel offers no Landlock: SPO_AGENT_RUNNER_CONFINED=false where agents may see the key")


def words_before(readable: list[str]) -> tuple[str, ...]:
    """What goes before a command that is to be confined; readable: folders beside the image's own."""
    # By its path: with -m the agent's folder would be searched for modules first.
    return sys.executable, __file__, ":".join([sys.prefix, sys.base_prefix, *readable])


def confine(folder: str, readable: list[str]) -> None:
    """Confine this process and all that it starts. Raises OSError."""
    require_landlock()
    version = landlock_version()
    rights = _FIRST_RIGHTS
    for since, right in _LATER_RIGHTS.items():
        rights |= right if version >= since else 0
    attributes = struct.pack("=QQQ", rights, 0, _SCOPES)[: 24 if version >= 6 else 8]
    size = ctypes.c_size_t(len(attributes))
    ruleset = _asked(_CREATE_RULESET, attributes, size, ctypes.c_uint(0))
    seen = [entry.path for entry in os.scandir("/") if entry.name not in HIDDEN and not entry.is_symlink()]
    for path, allowed in [*((each, _READ) for each in (*seen, *readable)), ("/dev", rights), (folder, rights)]:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        granted = rights & allowed if os.path.isdir(path) else rights & allowed & _OF_FILES
        rule = struct.pack("=Qi", granted, descriptor)
        _asked(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
        os.close(descriptor)
    # Of a runner that is root: with CAP_PERFMON the environment of every process can be read, whatever Landlock says.
    for capability in range(_CAPABILITIES):
        _libc.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
        if os.geteuid() == 0 and _libc.prctl(_HAS_CAPABILITY, capability, 0, 0, 0) == 1:
            raise OSError(f"capability {capability} cannot be dropped: run the runner as another user than root")
    if _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    _asked(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)


def _asked(number: int, *arguments: object) -> int:
    answer = int(_libc.syscall(number, *arguments))
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return answer


if __name__ == "__main__":
    confine(os.getcwd(), sys.argv[1].split(":"))
    os.environ["TMPDIR"] = os.getcwd()
    os.execvp(sys.argv[2], sys.argv[2:])
