"""The languages this judge runs, as a table. Adding one is adding a row: see docs/judge.md."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from services.sandbox_judge.executor import RunLimits
from services.sandbox_judge.settings import Settings
from spo.errors import InvalidInput
from spo.redis_keys import digest

BUILD_LIMITS = RunLimits(cpu_seconds=15, wall_seconds=30, memory_bytes=512 << 20, output_bytes=32 << 20, processes=32)
VERSION_SECONDS = 30
_UTF8 = {"LC_ALL": "C.UTF-8", "HOME": "/tmp"}


@dataclass(frozen=True)
class Language:
    """How programs of one language become something that runs.

    build: a command that reads the source on stdin and writes the file `program` where it stands. Empty: the program is
    run by the zygote itself.
    run: what runs that file, which it finds at descriptor 3; "{memory_mib}" stands for the limit. Empty: the file is a
    native binary.
    version: a command that prints what decides how programs behave.
    readable: folders outside /usr that the commands need.
    allowance_bytes, processes: what the runtime itself needs beyond the program's memory, and at least in threads.
    """

    name: str
    build: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    version: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    allowance_bytes: int = 0
    processes: int = 0

    @property
    def command(self) -> tuple[str, ...]:
        """A shell line that builds and then hands the result over on stdout."""
        return ("/bin/sh", "-c", f"{shlex.join(self.build)} && cat program")


_CPP = ("g++", "-x", "c++", "-std=gnu++20", "-O2", "-pipe", "-o", "program", "-")
_C = ("gcc", "-x", "c", "-std=gnu17", "-O2", "-pipe", "-o", "program", "-", "-lm")
_NATIVE = (
    Language("cpp", _CPP, version=("g++", "-dumpfullversion")),
    Language("c", _C, version=("gcc", "-dumpfullversion")),
)

# A syntax error is a compile error: so the build compiles, and hands on the source itself.
_CHECK_PYTHON = (
    "import sys; source = sys.stdin.buffer.read(); compile(source, 'program.py', 'exec'); "
    "open('program', 'wb').write(source)"
)
_RUN_PYTHON = "exec(compile(open(3, 'rb').read(), 'program.py', 'exec', dont_inherit=True))"

# The public class gives the file its name; where there is none, the first class does.
_BUILD_JAVA = r"""
cat > source
name=$(grep -oE 'public +(final +|abstract +)*class +[A-Za-z_0-9]+' source | head -n 1 | grep -oE '[A-Za-z_0-9]+$')
[ -n "$name" ] || name=$(grep -oE '\bclass +[A-Za-z_0-9]+' source | head -n 1 | grep -oE '[A-Za-z_0-9]+$')
name=${name:-Main}
mkdir classes && mv source "$name.java" && "$1/javac" $2 -encoding UTF-8 -d classes "$name.java" &&
  "$1/jar" $2 --create --file program --main-class "$name" -C classes .
"""
# Reserved address space counts against the limit, so none of it is left to the machine's size.
_JVM = (
    "-XX:+UseSerialGC",
    "-XX:-UsePerfData",
    "-XX:ReservedCodeCacheSize=48m",
    "-XX:CompressedClassSpaceSize=32m",
    "-XX:VMThreadStackSize=1024",
)


@cache
def languages() -> dict[str, Language]:
    """The languages that are installed here, by name; python is the judge's own version, run by zygotes."""
    own = (Language("python"), Language(_python_name(sys.version_info[:2])))
    rows = (*own, *_other_pythons(), *_pypy(), *_NATIVE, *_java())
    found = {
        language.name: language for language in reversed(rows) if not language.build or shutil.which(language.build[0])
    }
    return dict(sorted(found.items(), key=lambda pair: [row.name for row in rows].index(pair[0])))


def language_of(name: str) -> Language:
    """Raises InvalidInput (code "unknown_language") for a name that is not in the table or cannot be built here."""
    found = languages().get(name)
    if found is None:
        raise InvalidInput(f"unknown language {name!r}; known: {', '.join(languages())}", code="unknown_language")
    return found


@cache
def version_of(name: str) -> str:
    """The version of what builds or runs programs of the language."""
    language = language_of(name)
    if not language.version:
        return platform.python_version()
    told = subprocess.run(language.version, capture_output=True, text=True, timeout=VERSION_SECONDS, check=True)
    return " ".join((told.stdout + told.stderr).split())


@cache
def behaviour_of(name: str) -> str:
    """What decides how a program of the language behaves: part of the key of a cached verdict."""
    language = language_of(name)
    return digest(*language.build, "", *language.run, "", version_of(name))


@cache
def readable_folders() -> tuple[str, ...]:
    """Folders outside /usr that languages need; they are bound read-only into the jail."""
    return tuple(dict.fromkeys(folder for language in languages().values() for folder in language.readable))


def _python_name(version: tuple[int, ...]) -> str:
    return "python" + ".".join(map(str, version))


def _other_pythons() -> Iterator[Language]:
    """Interpreters of other versions below /usr, and those whose prefix the settings name."""
    prefixes = [Path("/usr"), Path("/usr/local"), *map(Path, Settings().python_prefixes)]
    for prefix in prefixes:
        for path in sorted(prefix.glob("bin/python3.*")):
            if re.fullmatch(r"python3\.\d+", path.name) and path.name != _python_name(sys.version_info[:2]):
                yield _interpreter(path.name, path, () if prefix.is_relative_to("/usr") else (str(prefix.resolve()),))


def _pypy() -> Iterator[Language]:
    path = shutil.which("pypy3")
    if path:
        prefix = Path(path).resolve().parent.parent
        yield _interpreter("pypy", Path(path), () if prefix.is_relative_to("/usr") else (str(prefix),))


def _interpreter(name: str, path: Path, readable: tuple[str, ...]) -> Language:
    interpreter = (os.path.realpath(path), "-s", "-S", "-B")
    return Language(
        name,
        build=(*interpreter, "-c", _CHECK_PYTHON),
        run=(*interpreter, "-c", _RUN_PYTHON),
        version=(interpreter[0], "--version"),
        readable=readable,
        environment={**_UTF8, "PYTHONHASHSEED": "0", "PYTHONINTMAXSTRDIGITS": "0"},
        # PyPy's own start takes more than CPython's.
        allowance_bytes=64 << 20 if name == "pypy" else 0,
    )


def _java() -> Iterator[Language]:
    path = shutil.which("javac")
    if path is None:
        return
    tools = Path(path).resolve().parent
    # Distributions keep a runtime's configuration elsewhere and link to it.
    linked = {str(path.resolve().parent) for path in (tools.parent / "conf").rglob("*") if path.is_symlink()}
    outside = tuple(sorted(folder for folder in {str(tools.parent), *linked} if not folder.startswith("/usr/")))
    options = " ".join(f"-J{option}" for option in (*_JVM, "-Xmx256m", "-XX:TieredStopAtLevel=1"))
    yield Language(
        "java",
        build=("/bin/sh", "-c", _BUILD_JAVA, "build", str(tools), options),
        run=(str(tools / "java"), *_JVM, "-Xss16m", "-Xmx{memory_mib}m", "-jar", "/dev/fd/3"),
        version=(str(tools / "java"), "-version"),
        readable=outside,
        environment={**_UTF8, "MALLOC_ARENA_MAX": "1"},
        allowance_bytes=128 << 20,
        processes=64,
    )
