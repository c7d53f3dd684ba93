"""Compiled languages: build in a jail, keep the binary, run it in a jail of its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from blake3 import blake3

from services.sandbox_judge.backends.zygote import Executable
from services.sandbox_judge.executor import CompileFailed, JudgeFault, RunEnding, RunLimits
from services.sandbox_judge.isolation.seccomp_filter import Freedom
from services.sandbox_judge.languages import BUILD_LIMITS, Language
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker
from spo.redis_keys import digest

_KEPT_BYTES = 256 << 20


class Binaries:
    """Built programs by digest of their source; the oldest go when they need too much memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0

    def built(self, language: Language, source: bytes, worker: SandboxWorker) -> bytes:
        """What the program's build has made. Raises CompileFailed, or JudgeFault when the compiler could not run."""
        key = digest(*language.build, blake3(source).hexdigest())
        with self._lock:
            binary = self._kept.get(key)
        if binary is None:
            binary = build(language, source, worker)
            self._keep(key, binary)
        return binary

    def _keep(self, key: str, binary: bytes) -> None:
        with self._lock:
            self._kept_bytes += len(binary) - len(self._kept.pop(key, b""))
            self._kept[key] = binary
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])


def command_of(language: Language, limits: RunLimits) -> Executable:
    """What runs a built program of a language that has a runtime."""
    command = tuple(word.replace("{memory_mib}", str(limits.memory_bytes >> 20)) for word in language.run)
    return Executable(command=command, environment=language.environment, freedom=Freedom.COMMAND)


def limits_in(language: Language, limits: RunLimits) -> RunLimits:
    """A program's limits with what the language's runtime takes itself."""
    return replace(
        limits,
        memory_bytes=limits.memory_bytes + language.allowance_bytes,
        processes=max(limits.processes, language.processes),
    )


def build(language: Language, source: bytes, worker: SandboxWorker) -> bytes:
    """The binary of a program, built inside a jail. Raises CompileFailed or JudgeFault."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": ".", "LC_ALL": "C.UTF-8", **language.environment}
    executable = Executable(command=language.command, environment=environment, freedom=Freedom.TOOLCHAIN)
    with worker.open(Role.COMPILER, executable, BUILD_LIMITS) as compiler:
        run = compiler.run(source)
    if run.ending is RunEnding.EXITED and run.code == 0 and run.stdout:
        return run.stdout
    if run.ending is RunEnding.EXITED and run.code == 127:
        raise JudgeFault(f"{language.build[0]} cannot be run in the jail: {run.stderr.decode(errors='replace')}")
    reason = "" if run.ending is RunEnding.EXITED else f"{run.ending.value} of the compiler: "
    raise CompileFailed(reason + run.stderr.decode(errors="replace"))
