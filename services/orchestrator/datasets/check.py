"""The report on an uploaded file, made by a confined process: what a hostile file does to its reader ends there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from blake3 import blake3

CHECK_SECONDS = 3600
INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")


def report_on(file: Path, task_format: str) -> tuple[dict[str, Any], str]:
    """The report of `spo.tasks.check_file` and the file's blake3."""
    digest = blake3().update_mmap(file).hexdigest()
    command = [sys.executable, "-m", "spo.tasks.check_file", str(file), task_format]
    # None of our secrets are in it.
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=CHECK_SECONDS, check=False
        )
        report: dict[str, Any] = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        report = broken_report(f"it could not be read in {CHECK_SECONDS} s")
    except ValueError:
        report = broken_report("it unpacks to too much, or broke its reader")
    return report, digest


def broken_report(reason: str) -> dict[str, Any]:
    """The report on a file that could not be read at all."""
    return {"rows": 0, "problems": 0, "faults_total": 1, "faults": [{"place": "the file", "message": reason}]}
