"""The report on an uploaded file, made in a confined process, so that a hostile file harms only its reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NotRequired, TypedDict

from blake3 import blake3

CHECK_SECONDS = 3600
INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")


class FileFault(TypedDict):
    """What is wrong where; places are lines or rows, counted from 1."""

    place: str
    message: str


class FileReport(TypedDict):
    """What `spo.tasks.check_file` prints; a file that could not be read has only the required counts."""

    rows: int
    problems: int
    faults_total: int
    faults: list[FileFault]
    left_out: NotRequired[int]
    duplicates: NotRequired[int]
    tests: NotRequired[int]
    answers: NotRequired[int]
    with_solutions: NotRequired[int]
    difficulties: NotRequired[dict[str, int]]


def report_on(file: Path, task_format: str) -> tuple[FileReport, str]:
    """The report of `spo.tasks.check_file` and the file's blake3."""
    digest = blake3().update_mmap(file).hexdigest()
    command = [sys.executable, "-m", "spo.tasks.check_file", str(file), task_format]
    # Without our secrets.
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=CHECK_SECONDS, check=False
        )
        report: FileReport = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        report = broken_report(f"it could not be read in {CHECK_SECONDS} s")
    except ValueError:
        report = broken_report("it unpacks to too much, or broke its reader")
    return report, digest


def broken_report(reason: str) -> FileReport:
    """The report on a file that could not be read at all."""
    return {"rows": 0, "problems": 0, "faults_total": 1, "faults": [{"place": "the file", "message": reason}]}
