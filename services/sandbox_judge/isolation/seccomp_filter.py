"""The system calls a judged program may make; built once in the judge, installed in every run."""

from __future__ import annotations

import enum
import errno
import tempfile
from functools import cache
from typing import Any

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
