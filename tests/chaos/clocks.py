"""A wall clock per service that can be stepped while the service runs, by a library that its process preloads."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_offset.c")
COMPILE_SECONDS = 60


def compiled(source: Path, folder: Path) -> Path:
    """Where the library of a C file is, to be preloaded; without a C compiler there is none."""
    library = folder / f"{source.stem}.so"
    if compiler := shutil.which("gcc") or shutil.which("cc"):
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, timeout=COMPILE_SECONDS)
    return library


class Clocks:
    """Offsets below a folder, one file per service; without a C compiler there are none, and `works` says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._library = compiled(SOURCE, folder)

    @property
    def works(self) -> bool:
        return self._library.exists()

    def environment(self, service: str) -> dict[str, str]:
        """What makes a process read this service's clock."""
        if not self.works:
            return {}
        self.set(service, 0)
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._file(service))}

    def set(self, service: str, seconds: float) -> None:
        """Let the service's clock be so many seconds ahead of the true one; below 0: behind."""
        # Written in place: the processes have mapped this very file.
        if not self._file(service).exists():
            self._file(service).write_bytes(bytes(8))
        with self._file(service).open("r+b", buffering=0) as offset:
            offset.write(struct.pack("=q", int(seconds * 1e9)))

    def _file(self, service: str) -> Path:
        return self.folder / service
