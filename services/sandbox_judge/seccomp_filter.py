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
setrlimit getrusage sysinfo times uname getcpu futex futex_waitv sched_yield sched_getaffinity sched_getparam
sched_getscheduler sched_get_priority_max sched_get_priority_min set_tid_address set_robust_list get_robust_list rseq
membarrier clock_gettime clock_getres gettimeofday time exit exit_group getrandom arch_prctl getcwd chdir fchdir
readlink readlinkat getdents getdents64 mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 ftruncate
truncate fallocate fsync fdatasync fadvise64 flock umask chmod fchmod fchmodat utimensat utimes symlink symlinkat link
linkat statfs fstatfs sendfile copy_file_range splice tee wait4 waitid restart_syscall
sendto recvfrom sendmsg recvmsg shutdown getsockopt setsockopt getsockname getpeername
"""

# Nobody calls these by accident: the program is killed and the verdict says security violation.
_ATTACKS = """
ptrace process_vm_readv process_vm_writev mount umount2 pivot_root chroot unshare setns bpf perf_event_open
init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff keyctl add_key request_key
userfaultfd io_uring_setup io_uring_enter io_uring_register open_by_handle_at name_to_handle_at iopl ioperm
open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr quotactl acct settimeofday clock_settime
adjtimex clock_adjtime sethostname setdomainname syslog lookup_dcookie modify_ldt kcmp process_madvise
pidfd_getfd memfd_secret migrate_pages move_pages mbind set_mempolicy
"""

_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032)  # descriptors, flags, locks, pipe sizes; no owners, no signals
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal questions, FIONREAD, FIONBIO, close-on-exec
_PRCTL = (15, 16, 38, 0x53564D41)  # names, no_new_privs, names of mappings
_REFUSED = {"socket": errno.EACCES, "clone3": errno.ENOSYS, "fork": errno.EAGAIN, "vfork": errno.EAGAIN}


class Freedom(enum.Enum):
    """What a run may do beyond computing."""

    INTERPRETED = "interpreted"  # threads, no other program
    COMMAND = "command"  # one exec, threads
    TOOLCHAIN = "toolchain"  # processes and execs: compilers


@cache
def filter_program(freedom: Freedom) -> bytes:
    """The BPF program of a seccomp allow-list with OWN_PID left to fill in. Raises NotReady without libseccomp."""
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise NotReady(f"seccomp filters need pyseccomp and libseccomp2: {error}") from error
    rules = _Rules(pyseccomp)
    for name in _FREE.split():
        rules.allow(name)
    for name in _ATTACKS.split():
        rules.kill(name)
    for name in ("kill", "tgkill"):
        rules.allow(name, (0, OWN_PID))
    for own in (0, OWN_PID):
        rules.allow("prlimit64", (0, own))
    rules.allow("socketpair", (0, _AF_UNIX))
    for argument, name, values in ((1, "fcntl", _FCNTL), (1, "ioctl", _IOCTL), (0, "prctl", _PRCTL)):
        for value in values:
            rules.allow(name, (argument, value))
    _rule_processes(rules, freedom)
    return rules.export()


def _rule_processes(rules: _Rules, freedom: Freedom) -> None:
    if freedom is Freedom.TOOLCHAIN:
        for name in ("clone", "fork", "vfork", "execve", "execveat", "chown", "fchown", "lchown"):
            rules.allow(name)
        rules.refuse("clone3", errno.ENOSYS)
        rules.refuse("socket", errno.EACCES)
        return
    rules.allow_masked("clone", 0, _CLONE_THREAD)
    for name, number in _REFUSED.items():
        rules.refuse(name, number)
    if freedom is Freedom.COMMAND:
        for name in ("execve", "execveat"):
            rules.allow(name)


class _Rules:
    """A libseccomp filter whose unknown calls fail with EPERM; calls this machine does not have are left out."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.filter = library.SyscallFilter(library.ERRNO(errno.EPERM))

    def allow(self, name: str, equal: tuple[int, int] | None = None) -> None:
        conditions = [self.library.Arg(equal[0], self.library.EQ, equal[1])] if equal else []
        self._add(self.library.ALLOW, name, conditions)

    def allow_masked(self, name: str, argument: int, bit: int) -> None:
        self._add(self.library.ALLOW, name, [self.library.Arg(argument, self.library.MASKED_EQ, bit, bit)])

    def kill(self, name: str) -> None:
        self._add(self.library.KILL_PROCESS, name, [])

    def refuse(self, name: str, number: int) -> None:
        self._add(self.library.ERRNO(number), name, [])

    def export(self) -> bytes:
        with tempfile.TemporaryFile() as sink:
            self.filter.export_bpf(sink)
            sink.seek(0)
            return sink.read()

    def _add(self, action: int, name: str, conditions: list[Any]) -> None:
        try:
            self.library.resolve_syscall(self.library.system_arch(), name)
        except (ValueError, OSError):
            return
        self.filter.add_rule(action, name, *conditions)
