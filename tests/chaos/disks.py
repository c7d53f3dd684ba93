"""Disks that can fail: small ones of the platform's own, a tmpfs each where this process may mount one, can be filled;
calls on the state folder can be refused, by a library that each process preloads.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
from pathlib import Path

from tests.chaos.clocks import compiled

SOURCE = Path(__file__).with_name("storage_fault.c")
MOUNT_SECONDS = 20
FILLING = "filling"


class Disk:
    """A folder on a file system of `size_bytes`; an ordinary one, not `is_small`, where none may be mounted."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        options = f"size={size_bytes},mode=0755"
        command = ["mount", "-t", "tmpfs", "-o", options, "chaos", str(folder)]
        try:
            mounted = subprocess.run(command, capture_output=True, timeout=MOUNT_SECONDS, check=False)
        except OSError:
            self.is_small = False
        else:
            self.is_small = mounted.returncode == 0

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.folder / FILLING).open("wb") as filling, contextlib.suppress(OSError):
            while True:
                free = os.statvfs(self.folder)
                os.posix_fallocate(
                    filling.fileno(), filling.seek(0, os.SEEK_END), max(4096, free.f_bavail * free.f_frsize)
                )

    def empty(self) -> None:
        """Take back what `fill` took."""
        (self.folder / FILLING).unlink(missing_ok=True)

    def unmount(self) -> None:
        if self.is_small:
            subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, timeout=MOUNT_SECONDS, check=True)
            self.is_small = False


class StorageFaults:
    """Errors of calls on files below `root`, one control file per service in `folder`; without a compiler there are
    none, and `works` says so.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        self.root = root
        folder.mkdir(parents=True)
        self._library = compiled(SOURCE, folder)

    @property
    def works(self) -> bool:
        return self._library.exists()

    def environment(self, service: str) -> dict[str, str]:
        """What lets a process's calls fail when this service's do."""
        if not self.works:
            return {}
        self.set(service, 0)
        control = {"CHAOS_STORAGE": str(self.folder / service), "CHAOS_STORAGE_ROOT": str(self.root)}
        return {"LD_PRELOAD": str(self._library), **control}

    def set(self, service: str, number: int, *, can_read: bool = False) -> None:
        """Let the service's calls fail with an errno, or 0: succeed; can_read: those that only read do."""
        # Written in place: the processes have mapped this very file.
        with (self.folder / service).open("r+b" if (self.folder / service).exists() else "w+b", buffering=0) as control:
            control.write(struct.pack("=ii", number, int(can_read)))
