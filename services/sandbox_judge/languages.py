"""The languages this judge runs, as a table. Adding one is adding a row: see docs/judge.md."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

from services.sandbox_judge.sandbox import RunLimits
from spo.errors import InvalidInput

BUILD_LIMITS = RunLimits(cpu_seconds=15, wall_seconds=30, memory_bytes=512 << 20, output_bytes=32 << 20, processes=32)


@dataclass(frozen=True)
class Language:
    """How programs of one language become something that runs.

    build: the compiler and its arguments; it reads the source on stdin and writes the file `program` where it stands.
    Empty: the program is run by the zygote itself.
    """

    name: str
    build: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """A shell line that builds and then hands the binary over on stdout."""
        return ("/bin/sh", "-c", f"{' '.join(self.build)} && cat program")


_TABLE = (
    Language("python"),
    Language("cpp", ("g++", "-x", "c++", "-std=gnu++20", "-O2", "-pipe", "-o", "program", "-")),
    Language("c", ("gcc", "-x", "c", "-std=gnu17", "-O2", "-pipe", "-o", "program", "-", "-lm")),
)


@cache
def languages() -> dict[str, Language]:
    """The languages of the table whose compiler is installed, by name."""
    return {each.name: each for each in _TABLE if not each.build or shutil.which(each.build[0])}


def language_of(name: str) -> Language:
    """Raises InvalidInput (code "unknown_language") for a name that is not in the table or cannot be built here."""
    found = languages().get(name)
    if found is None:
        raise InvalidInput(f"unknown language {name!r}; known: {', '.join(languages())}", code="unknown_language")
    return found


@cache
def version_of(name: str) -> str:
    """What decides how a program of the language behaves: part of the key of a cached verdict."""
    build = language_of(name).build
    if not build:
        return platform.python_version()
    answer = subprocess.run([build[0], "-dumpfullversion"], capture_output=True, text=True, timeout=20, check=True)
    return " ".join((*build, answer.stdout.strip()))
