"""How a program is locked in: isolation tiers, strongest first, the system calls it may make, and the judge's end of
a zygote.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import marshal
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import services.sandbox_judge
from services.sandbox_judge.executor import (
    CompileFailed,
    JudgeFault,
    ProgramRun,
    RunLimits,
    StartedTest,
    memory_file,
    readable_folders,
    run_test,
)
from services.sandbox_judge.settings import IsolationTier
from spo.errors import NotReady

# Stands for "the program's own pid" in the filter; the jail puts the real one in before installing it.
OWN_PID = 0x5E1FF1D0

_CLONE_THREAD = 0x00010000
_AF_UNIX = 1

_FREE = """
read write readv writev pread64 pwrite64 preadv pwritev open openat close close_range fstat stat lstat newfstatat statx
lseek mmap mprotect munmap mremap madvise brk msync mlock munlock rt_sigaction rt_sigprocmask rt_sigreturn
rt_sigtimedwait rt_sigpending rt_sigsuspend sigaltstack pause access faccessat faccessat2 pipe pipe2 select pselect6
poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 dup dup2 dup3
nanosleep clock_nanosleep getitimer setitimer alarm timer_create timer_settime timer_gettime timer_delete
timer_getoverrun timerfd_create timerfd_settime timerfd_gettime
getpid getppid gettid getuid geteuid getgid getegid getpgrp getpgid getsid getgroups getresuid getresgid getrlimit
setrlimit getrusage sysinfo times uname getcpu futex futex_waitv sched_yield getpriority sched_getaffinity
sched_getparam sched_getattr sched_rr_get_interval
sched_getscheduler sched_get_priority_max sched_get_priority_min set_tid_address set_robust_list get_robust_list rseq
membarrier clock_gettime clock_getres gettimeofday time exit exit_group getrandom arch_prctl getcwd chdir fchdir
readlink readlinkat getdents getdents64 mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 ftruncate
truncate fallocate fsync fdatasync fadvise64 flock umask chmod fchmod fchmodat utimensat utimes symlink symlinkat link
linkat statfs fstatfs sendfile copy_file_range splice tee wait4 waitid restart_syscall
sendto recvfrom sendmsg recvmsg shutdown getsockopt setsockopt getsockname getpeername
"""

# No runtime or library calls these: the program is killed and the verdict says security violation.
_ATTACKS = """
ptrace process_vm_readv process_vm_writev mount umount2 pivot_root chroot unshare setns bpf open_by_handle_at
init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff keyctl add_key request_key
iopl ioperm open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr quotactl acct settimeofday clock_settime
adjtimex clock_adjtime sethostname setdomainname syslog
"""

# What runtimes and libraries try and can do without, by the error that makes them: where memory and threads lie (BLAS,
# libnuma, OpenMP), rings (libuv), faults in user space (garbage collectors), copies of attributes (shutil). Whatever is
# named nowhere fails with EPERM, among it perf_event_open, kcmp, memfd_create and the descriptors of processes.
_DECLINED = {
    errno.ENOSYS: """
        mbind set_mempolicy get_mempolicy move_pages migrate_pages set_mempolicy_home_node io_uring_setup io_uring_enter
        io_uring_register userfaultfd process_madvise process_mrelease memfd_secret lookup_dcookie clone3 openat2
        pkey_alloc pkey_free pkey_mprotect cachestat fchmodat2 map_shadow_stack
    """,
    errno.EOPNOTSUPP: """
        name_to_handle_at getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr setxattr lsetxattr fsetxattr
        removexattr lremovexattr fremovexattr
    """,
}
# Calls so new that libseccomp need not have a name for them: a C library that tries one falls back where it is missing.
_NEWEST = range(454, 512)

# What only the jail itself needs (the narrowing filter takes it away from the program) or what can only take away.
_JAIL = "kill tgkill pidfd_open clone fork vfork execve execveat setpgid capset chown fchown lchown fchownat"

# What the owner of a file may do to it without opening it.
_OF_OWNERS = "chmod fchmod fchmodat utimensat utimes truncate"

_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032)  # descriptors, flags, locks, pipe sizes; no owners, no signals
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal questions, FIONREAD, FIONBIO, close-on-exec
_PR_SET_PDEATHSIG = 1
_PRCTL = (_PR_SET_PDEATHSIG, 15, 16, 22, 36, 38, 0x53564D41)  # names, seccomp, subreaper, no_new_privs, mapping names

TIERS: tuple[IsolationTier, ...] = get_args(IsolationTier)

# Programs of worker n run as this user id plus n when the judge is root.
FIRST_PROGRAM_UID = 61000
_CAP_DAC_READ_SEARCH = 1 << 2
_JUDGE_SIDE = "/judge"
# What lies below these outside would be hidden inside: it is bound elsewhere there.
_COVERED = ("/tmp", "/proc", "/dev", _JUDGE_SIDE)
_ELSEWHERE = f"{_JUDGE_SIDE}/outside"
_JAIL_FOLDER = Path("services", "sandbox_judge", "jail")
_OPTIONS = ("-s", "-S", "-B", "-c")
_BOOT = "sys.path.insert(0, sys.argv[1]); from services.sandbox_judge.jail import zygote; zygote.main()"
_PACKAGES = ("site-packages", "dist-packages")
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LC_ALL": "C.UTF-8",
    # One hash seed for all: a program's verdict must not depend on the order of a set.
    "PYTHONHASHSEED": "0",
    # Each child would otherwise look up what the interpreter has not called by then.
    "LD_BIND_NOW": "1",
    # Libraries that were imported before a fork must not have started threads, and pytest has no use for plugins here.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}

START_SECONDS = 30.0
# With libraries to import, on a machine that is busy with other things.
LIBRARY_START_SECONDS = 240.0
COMPILE_SECONDS = 10.0
END_SECONDS = 10.0
FAREWELL_SECONDS = 1.0
_MESSAGE_BYTES = 1 << 18
_MARSHAL_VERSION = 2  # read by every Python 3


class Freedom(enum.Enum):
    """What a run may do beyond computing."""

    INTERPRETED = "interpreted"  # threads, no other program
    COMMAND = "command"  # one exec, threads
    TOOLCHAIN = "toolchain"  # processes and execs: compilers


@cache
def base_filter() -> bytes:
    """BPF of the allow-list that zygotes and all below them live under. Raises NotReady without libseccomp."""
    rules = _Rules(refuse_by_default=True)
    for name in (*_FREE.split(), *_JAIL.split()):
        rules.allow(name)
    for name in _ATTACKS.split():
        rules.kill(name)
    for number, names in _DECLINED.items():
        for name in names.split():
            rules.refuse(name, number)
    for call in _NEWEST:
        rules.filter.add_rule(rules.library.ERRNO(errno.ENOSYS), call)
    rules.allow("prlimit64", (0, 0))
    rules.allow("sched_setaffinity", (0, 0))
    rules.allow("socketpair", (0, _AF_UNIX))
    for argument, name, values in ((1, "fcntl", _FCNTL), (1, "ioctl", _IOCTL), (0, "prctl", _PRCTL)):
        for value in values:
            rules.allow(name, (argument, value))
    rules.refuse("socket", errno.EACCES)
    return rules.export()


@cache
def narrowing_filter(freedom: Freedom, *, namespaces: bool) -> bytes:
    """BPF of the small filter that every run gets on top; without namespaces OWN_PID is left to fill in.

    It is installed for every test, so it only says what the program may not do of what the jail may. Raises NotReady.
    """
    rules = _Rules(refuse_by_default=False)
    rules.refuse("prctl", errno.EPERM, (0, rules.library.EQ, _PR_SET_PDEATHSIG))
    rules.refuse("setpgid", errno.EPERM)
    for name in ("kill", "tgkill"):
        # In a pid namespace only the jail, which is pid 1, has to be kept from signals.
        whom = (0, rules.library.EQ, 1) if namespaces else (0, rules.library.NE, OWN_PID)
        rules.refuse(name, errno.EPERM, whom)
    if freedom is Freedom.TOOLCHAIN:
        return rules.export()
    if not namespaces:
        # The judge's own files may be the program's user's: no mount keeps them from it, and Landlock not in this.
        for name in _OF_OWNERS.split():
            rules.refuse(name, errno.EPERM)
    rules.refuse("clone", errno.EPERM, (0, rules.library.MASKED_EQ, _CLONE_THREAD, 0))
    for name in ("fork", "vfork"):
        rules.refuse(name, errno.EPERM)
    if freedom is Freedom.INTERPRETED:
        for name in ("execve", "execveat"):
            rules.refuse(name, errno.EPERM)
    return rules.export()


class _Rules:
    """A libseccomp filter; calls that this machine's libseccomp does not know are left to the default."""

    def __init__(self, *, refuse_by_default: bool) -> None:
        try:
            import pyseccomp
        except (ImportError, OSError, RuntimeError) as error:
            raise NotReady(f"seccomp filters need pyseccomp and libseccomp2: {error}") from error
        self.library: Any = pyseccomp
        self.filter = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM) if refuse_by_default else pyseccomp.ALLOW)

    def allow(self, name: str, equal: tuple[int, int] | None = None) -> None:
        self._add(self.library.ALLOW, name, (equal[0], self.library.EQ, equal[1]) if equal else None)

    def kill(self, name: str) -> None:
        self._add(self.library.KILL_PROCESS, name, None)

    def refuse(self, name: str, number: int, condition: tuple[int, ...] | None = None) -> None:
        self._add(self.library.ERRNO(number), name, condition)

    def export(self) -> bytes:
        with tempfile.TemporaryFile() as sink:
            self.filter.export_bpf(sink)
            sink.seek(0)
            return sink.read()

    def _add(self, action: int, name: str, condition: tuple[int, ...] | None) -> None:
        try:
            self.library.resolve_syscall(self.library.system_arch(), name)
        except (ValueError, OSError):
            return
        self.filter.add_rule(action, name, *([self.library.Arg(*condition)] if condition else []))


@dataclass(frozen=True)
class Launch:
    """How to start one zygote and what to tell it first."""

    command: tuple[str, ...]
    environment: dict[str, str]
    setting: dict[str, object]
    # Folders that lie elsewhere inside: (outside, inside).
    moved: tuple[tuple[str, str], ...] = ()

    def inside(self, text: str) -> str:
        """A word of a command, with the paths that it has inside."""
        for outside, inside in self.moved:
            text = text.replace(outside, inside)
        return text


@dataclass(frozen=True)
class Preload:
    """What a zygote is for beside programs: the module of the jail that its children run, and what it imports first.

    It reads this environment's packages.
    """

    harness: str
    imports: tuple[str, ...] = ()
    # Whether the harness does before the first fork what every fork would do anew.
    rehearsed: bool = True


def program_uid(worker: int) -> int | None:
    """The user that programs of a worker run as; None: the judge's own, because it is not root."""
    return FIRST_PROGRAM_UID + worker if os.geteuid() == 0 else None


def launch(tier: IsolationTier, worker: int, scratch: str | None = None, preload: Preload | None = None) -> Launch:
    """The way to start a zygote of a worker on this machine; tiers with namespaces bring their own scratch.

    Raises NotReady when seccomp filters cannot be built.
    """
    namespaces = tier.startswith("namespaces")
    source_root = _JUDGE_SIDE if namespaces else str(_source_root())
    root = os.geteuid() == 0
    bound = {folder: inside(folder) if namespaces else folder for folder in _outside_usr(preload)}
    python = (bound_path(_interpreter(), bound), *_OPTIONS, f"import sys; {_BOOT}", source_root)
    moved = tuple((outside, place) for outside, place in bound.items() if outside != place)
    return Launch(
        command=(*_bubblewrap(bound, root=root), *python) if namespaces else python,
        environment=_ENVIRONMENT | (_libraries_of_interpreter(bound) if moved else {}),
        moved=moved,
        setting=_setting(
            preload,
            namespaces=namespaces,
            landlock=tier.endswith("landlock"),
            scratch="/tmp" if namespaces else scratch,
            bound=bound,
        )
        | {
            "uid": program_uid(worker),
            "capabilities": 0
            if namespaces or not root or _open_to_all(_prefix(), *map(Path, package_folders() if preload else ()))
            else _CAP_DAC_READ_SEARCH,
        },
    )


def container_launch(python: str, preload: Preload | None = None) -> Launch:
    """The way to start a zygote in a container that has the folder of the control socket at /judge.

    Raises NotReady when seccomp filters cannot be built.
    """
    connect = (
        "import socket, sys; link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        f"link.connect({_JUDGE_SIDE + '/control'!r}); sys.argv.append(str(link.detach())); "
    )
    return Launch(
        command=(python, *_OPTIONS, connect + _BOOT, _JUDGE_SIDE),
        environment=_ENVIRONMENT,
        setting=_setting(preload, namespaces=False, landlock=True, scratch="/tmp", bound={})
        | {"uid": None, "capabilities": 0},
    )


def jail_sources() -> Path:
    """The folder of the modules that run inside."""
    return _source_root() / _JAIL_FOLDER


def _setting(
    preload: Preload | None, *, namespaces: bool, landlock: bool, scratch: str | None, bound: dict[str, str]
) -> dict[str, object]:
    """What a zygote is told first; bound: where folders outside /usr lie for it, where that is elsewhere."""
    outside = _outside_usr(preload)
    return {
        "namespaces": namespaces,
        "landlock": landlock,
        "readable": [
            "/usr",
            *_SYSTEM_FOLDERS,
            "/etc/ld.so.cache",
            "/etc/alternatives",
            *(bound.get(folder, folder) for folder in outside),
        ],
        "harness": preload.harness if preload else "",
        "rehearsed": bool(preload and preload.rehearsed),
        "imports": preload.imports if preload else (),
        "packages": tuple(bound.get(folder, folder) for folder in package_folders()) if preload else (),
        "scratch": scratch,
        "base_filter": base_filter(),
        "filters": {freedom.value: narrowing_filter(freedom, namespaces=namespaces) for freedom in Freedom},
        "own_pid_marker": struct.pack("=I", OWN_PID),
    }


def inside(folder: str) -> str:
    """Where a folder lies in a jail with mounts of its own."""
    return _ELSEWHERE + folder if any(Path(folder).is_relative_to(covered) for covered in _COVERED) else folder


def bound_path(path: str, bound: dict[str, str]) -> str:
    """A path below one of the bound folders, as it is inside."""
    for outside, place in bound.items():
        if Path(path).is_relative_to(outside):
            return place + path.removeprefix(outside)
    return path


def _libraries_of_interpreter(bound: dict[str, str]) -> dict[str, str]:
    """Where an interpreter finds its shared library when it is not where it was built for."""
    folder, prefix = str(sysconfig.get_config_var("LIBDIR") or ""), str(_prefix())
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or bound.get(prefix, prefix) == prefix:
        return {}
    return {
        "LD_LIBRARY_PATH": bound_path(folder, bound) if Path(folder).is_relative_to(prefix) else bound[prefix] + "/lib"
    }


def _bubblewrap(bound: dict[str, str], *, root: bool) -> tuple[str, ...]:
    arguments = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--as-pid-1"]
    arguments += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if root:
        # A real user id instead of a mapped root: the zygote drops to it with these two capabilities, then loses them.
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--cap-drop", "ALL"]
    # Bubblewrap would give the folders above a bind the modes they have outside: /root, say, closed to the program.
    parents = {parent for place in bound.values() for parent in Path(place).parents[:-1]}
    for parent in sorted(parents):
        arguments += ["--perms", "0755", "--dir", str(parent)]
    for folder, place in {"/usr": "/usr", **bound}.items():
        arguments += ["--ro-bind", folder, place]
    for name in _SYSTEM_FOLDERS:
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        elif os.path.exists(name):
            arguments += ["--ro-bind", name, name]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        arguments += ["--ro-bind-try", name, name]
    arguments += ["--ro-bind", str(jail_sources()), f"{_JUDGE_SIDE}/{_JAIL_FOLDER}"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return (*arguments, "--chdir", "/", "--")


def _interpreter() -> str:
    """The real binary: a virtual environment's link or a version manager's shim would be slower or not in the jail."""
    return os.path.realpath(sys.executable)


def package_folders() -> tuple[str, ...]:
    """Where this environment's packages lie: its own, the user's and the system's where it sees them."""
    paths = sysconfig.get_paths()
    found = [paths["purelib"], paths["platlib"], *(path for path in sys.path if Path(path).name in _PACKAGES)]
    return tuple(dict.fromkeys(os.path.realpath(path) for path in found if os.path.isdir(path)))


def _outside_usr(preload: Preload | None) -> tuple[str, ...]:
    """What programs may read beside the system: this interpreter, the languages of other places, packages."""
    return (str(_prefix()), *readable_folders(), *(package_folders() if preload else ()))


def _prefix() -> Path:
    return Path(os.path.realpath(sysconfig.get_paths()["stdlib"])).parent.parent


def _source_root() -> Path:
    return Path(next(iter(services.sandbox_judge.__path__))).parent.parent


def _open_to_all(*paths: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for path in paths for folder in (path, *path.parents))


@dataclass(frozen=True)
class Executable:
    """What runs in a jail: a Python source, a binary, or a command of the system."""

    source: bytes = b""
    binary: bytes = b""
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    freedom: Freedom = Freedom.INTERPRETED


@dataclass
class OpenProgram:
    """A program in its jail, ready to be run on one input after the other."""

    channel: socket.socket
    limits: RunLimits

    def run(self, stdin: bytes, files: Sequence[bytes] = ()) -> ProgramRun:
        """One run from the program's pristine state. Raises JudgeFault."""
        return run_test(self.channel, stdin, self.limits, files)

    def start(self, stdin: bytes | None, files: Sequence[bytes], link: socket.socket) -> StartedTest:
        """Begin a run with an end of a socket; stdin: None for no standard streams. Raises JudgeFault."""
        return StartedTest(self.channel, self.limits, stdin, files, link)


class Zygote:
    """One zygote process; used by one thread, one program at a time."""

    def __init__(self, launch: Launch) -> None:
        self.programs = 0
        self._inside = launch.inside
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        with theirs:
            try:
                # Standard streams are pipes because the programs' will be: Python decides about them when it starts.
                self._process = subprocess.Popen(
                    [*launch.command, str(theirs.fileno())],
                    env=launch.environment,
                    cwd="/",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise JudgeFault(f"zygote cannot be started: {error}") from error
        self.pid = self._process.pid
        self.landlock_abi = self._greet(launch.setting)

    def _greet(self, setting: dict[str, object]) -> int:
        try:
            self._control.send(marshal.dumps(setting, _MARSHAL_VERSION))
            patience = LIBRARY_START_SECONDS if setting["imports"] else START_SECONDS
            answer = _receive(self._control, patience)
            if answer.startswith(b"ready "):
                return int(answer[6:])
        except OSError as error:
            answer = str(error).encode()
        # It closes its socket before it has written what it died of.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(FAREWELL_SECONDS)
        reason = self._last_words() or answer.decode(errors="replace")
        self.close()
        raise JudgeFault(f"zygote did not start: {reason}")

    @contextlib.contextmanager
    def open(self, executable: Executable, limits: RunLimits) -> Iterator[OpenProgram]:
        """A jail with the program in it. Raises CompileFailed or JudgeFault; afterwards nothing of it is alive."""
        self.programs += 1
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with channel:
            with theirs:
                self._request(executable, limits, theirs.fileno())
            try:
                _expect_ready(channel)
                yield OpenProgram(channel, limits)
            finally:
                # Closing the channel ends an idle jail by itself; one that is stuck is killed.
                channel.close()
                self._wait_until_gone()

    def _request(self, executable: Executable, limits: RunLimits, channel: int) -> None:
        request = {
            "python": executable.freedom is Freedom.INTERPRETED,
            "command": tuple(map(self._inside, executable.command)),
            "freedom": executable.freedom.value,
            "processes": executable.freedom is Freedom.TOOLCHAIN,
            "environment": executable.environment,
            "cpu_seconds": limits.cpu_seconds,
            "wall_seconds": limits.wall_seconds,
            "memory_bytes": limits.memory_bytes,
            "threads": limits.processes,
            "source": executable.source,
            "cores": os.cpu_count() or 1,
        }
        descriptors = [channel]
        try:
            if executable.binary:
                descriptors.append(memory_file("program", executable.binary))
            socket.send_fds(self._control, [marshal.dumps(request, _MARSHAL_VERSION)], descriptors)
        except OSError as error:
            raise JudgeFault(f"zygote gone: {error} {self._last_words()}") from error
        finally:
            for descriptor in descriptors[1:]:
                os.close(descriptor)

    def _wait_until_gone(self) -> None:
        try:
            answer = _receive(self._control, 0.5)
            if not answer:
                self._control.send(b"kill")
                answer = _receive(self._control, END_SECONDS)
        except OSError as error:
            raise JudgeFault(f"zygote gone: {error} {self._last_words()}") from error
        if not answer.startswith(b"ended "):
            raise JudgeFault(f"zygote lost its jail: {self._last_words()}")

    def _last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2000))
        return self._log.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End the process and everything below it; it ends by itself when it is well."""
        self._control.close()
        try:
            self._process.wait(FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _expect_ready(channel: socket.socket) -> None:
    answer = _receive(channel, COMPILE_SECONDS)
    if answer.startswith(b"-"):
        raise CompileFailed(answer[1:].decode(errors="replace"))
    if answer.startswith(b"!"):
        raise JudgeFault(f"the jail failed: {answer[1:].decode(errors='replace')}")
    if answer != b"+":
        # Only the compiler has seen the program so far: it crashed or never finished on it.
        raise CompileFailed("the compiler crashed or did not finish")


def _receive(channel: socket.socket, seconds: float) -> bytes:
    """The next message; empty when the other side is gone or silent for so long."""
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if poller.poll(left * 1000):
            return channel.recv(_MESSAGE_BYTES)
    return b""
