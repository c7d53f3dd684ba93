"""Small disks of the platform's own, which can be filled: a tmpfs each, where this process may mount one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

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
