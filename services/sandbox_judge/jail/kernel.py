"""The kernel calls that build a jail, straight through ctypes: this runs in the jail, where nothing is installed."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
JAIL_NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC


_SIGCHLD = 17
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_REMOUNT = 32
_MS_BIND = 4096
# What statvfs says of a mount by other bits than mount takes.
_ST_RELATIME, _MS_RELATIME = 4096, 1 << 21
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)

_SYS_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1

# Landlock's file rights by the ABI version that brought them; unknown bits are refused by older kernels.
_FS_EXECUTE = 1 << 0
_FS_READ_FILE = 1 << 2
_FS_READ_DIR = 1 << 3
_FS_FIRST = (1 << 13) - 1
_FS_BY_ABI = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_NET_ALL = 3
_SCOPE_ALL = 3
_FS_OF_FILES = _FS_EXECUTE | 1 << 1 | _FS_READ_FILE | 1 << 14 | 1 << 15
_FS_READ = _FS_EXECUTE | _FS_READ_FILE | _FS_READ_DIR

# PyDLL keeps the interpreter lock: a child made by a raw clone goes on holding it as its only thread.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# For what happens in every test: looking after errno would write to more pages, and each costs a copy after a fork.
_lean_libc = ctypes.PyDLL(None)
# Unlike fork, _Fork (glibc 2.34, musl 1.2.2) runs no handlers; there are no other threads that would need them.
_fork = getattr(_lean_libc, "_Fork", _lean_libc.fork)
_wait4 = _lean_libc.wait4
# Where wait4 writes: the status, then the usage, which begins with user and system time and the peak memory.
_ending = ctypes.create_string_buffer(256)
_ending_status, _ending_usage = ctypes.byref(_ending), ctypes.byref(_ending, 8)
_unpack_ending = struct.Struct("@i4x4ll").unpack_from


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(what: str, number: int, *arguments: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), what)


def _prctl(what: str, option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero), what)


def fork_bare() -> int:
    """Fork without the interpreter's hooks, which cost the child 0.7 ms to redo what a single-threaded parent has."""
    pid: int = _fork()
    if pid < 0:
        raise OSError("fork failed")
    return pid


def wait_for(pid: int) -> tuple[int, float, int]:
    """Wait for a child's end: its wait status, CPU seconds and peak memory in bytes.

    os.wait4 does the same, but looks up a module on the way, which writes to a dozen pages.
    """
    if _wait4(pid, _ending_status, 0, _ending_usage) != pid:
        raise OSError(f"wait4 does not know process {pid}")
    status, user, user_micros, system, system_micros, peak_kib = _unpack_ending(_ending)
    return status, user + system + (user_micros + system_micros) * 1e-6, peak_kib << 10


def fork_into(namespaces: int) -> int:
    """Fork with new namespaces (0: none); returns the pid, 0 in the child. Only for single-threaded processes."""
    zero = ctypes.c_long(0)
    return _syscall("clone", _SYS_CLONE, ctypes.c_ulong(namespaces | _SIGCHLD), zero, zero, zero, zero)


def own_mounts() -> None:
    """Enter a user namespace, as the same user, and a mount namespace in which this process may mount."""
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(ctypes.c_int(CLONE_NEWUSER | CLONE_NEWNS)), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        descriptor = os.open("/proc/self/" + name, os.O_WRONLY)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def mount_tmpfs(path: str, size_bytes: int, inodes: int, *, writable: bool = True) -> None:
    options = f"size={size_bytes},nr_inodes={inodes},mode=0700".encode()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | (0 if writable else _MS_RDONLY))
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options), "mount tmpfs")


def remount_read_only(path: str) -> None:
    """Let nobody change what is on a mount, its owner neither: modes, times, names. Devices on it stay writable."""
    before = os.statvfs(path).f_flag
    # None of the others may be taken away from a mount that came from outside.
    kept = before & ~_ST_RELATIME | (_MS_RELATIME if before & _ST_RELATIME else 0)
    flags = ctypes.c_ulong(kept | _MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    _check(_libc.mount(None, path.encode(), None, flags, None), f"remount {path}")


def set_dumpable(*, dumpable: bool) -> None:
    """Whether /proc/self belongs to the user (needed to map identities) and others may look inside."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, int(dumpable))


def die_with_parent() -> None:
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none of them can get away."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def set_capabilities(mask: int) -> None:
    """Keep exactly these capabilities, permitted and effective."""
    _check(_libc.capset(_CAPABILITY_HEADER, struct.pack("=6I", mask, mask, 0, 0, 0, 0)), "capset")


def become(uid: int, gid: int, keep_capabilities: int) -> None:
    """Leave root for another user, keeping these capabilities only."""
    _prctl("PR_SET_KEEPCAPS", _PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    set_capabilities(keep_capabilities)
    set_dumpable(dumpable=True)


def landlock_abi() -> int:
    """Version of Landlock in this kernel; 0 when there is none."""
    version = ctypes.c_uint(_LANDLOCK_CREATE_RULESET_VERSION)
    number = ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET)
    return max(0, int(_libc.syscall(number, None, ctypes.c_size_t(0), version)))


def landlock(abi: int, allowed: list[tuple[str, bool]]) -> None:
    """Restrict this process and all below it to reading, or also writing, beneath the allowed paths.

    Where the kernel can, TCP and signals or abstract sockets towards outside processes are denied too.
    """
    files = _FS_FIRST
    for version, right in _FS_BY_ABI.items():
        if abi >= version:
            files |= right
    attributes = struct.pack("=QQQ", files, _NET_ALL, _SCOPE_ALL)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    size = ctypes.c_size_t(len(attributes))
    ruleset = _syscall("landlock_create_ruleset", _SYS_LANDLOCK_CREATE_RULESET, attributes, size, ctypes.c_uint(0))
    for path, writable in allowed:
        descriptor = os.open(path, os.O_PATH)
        rights = files if writable else files & _FS_READ
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _FS_OF_FILES, descriptor)
        kind = ctypes.c_int(_LANDLOCK_RULE_PATH_BENEATH)
        _syscall("landlock_add_rule", _SYS_LANDLOCK_ADD_RULE, ctypes.c_int(ruleset), kind, rule, ctypes.c_uint(0))
        os.close(descriptor)
    _syscall("landlock_restrict_self", _SYS_LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)


def prepared_filter(program: bytes) -> Callable[[], None]:
    """What puts a seccomp filter (array of sock_filter) on this process when called; no_new_privs must be set."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    prctl = _lean_libc.prctl

    def install(keep_alive: object = buffer) -> None:
        if prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header):
            raise OSError("the seccomp filter was refused")

    return install
