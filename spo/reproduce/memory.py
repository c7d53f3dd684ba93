"""The trainer's peak memory, SPO against PPO: measured by the trainer's benchmark, in a process of its own.

In a run of the toy contest the libraries outweigh a model of 240 thousand parameters a hundred times; the benchmark
counts what the training itself holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from spo.console import console

REPOSITORY = Path(__file__).parents[2]
# Two processes that import torch and DeepSpeed; on a busy machine each takes minutes.
LIMIT_SECONDS = 1200.0
MEASURE = """
import json, pathlib, tempfile
from benchmarks.trainer import peak_memory
with tempfile.TemporaryDirectory() as folder:
    print(json.dumps([peak_memory(pathlib.Path(folder)).to_json()]))
"""
KEPT = "memory.json"


def measured_memory(folder: Path) -> list[dict[str, Any]]:
    """The benchmark's rows about PPO, measured once per folder; none when it could not run."""
    kept = kept_memory(folder)
    if not kept:
        kept = _rows()
        if kept:
            (folder / KEPT).write_text(json.dumps(kept) + "\n")
    return kept


def kept_memory(folder: Path) -> list[dict[str, Any]]:
    """What was measured before; none when nothing was."""
    path = folder / KEPT
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def _rows() -> list[dict[str, Any]]:
    command = [sys.executable, "-c", MEASURE]
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=True,
        )
        # Libraries may print before it.
        found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError, OSError) as error:
        reason = f"{type(error).__name__} {_last_line(getattr(error, 'stderr', None))}".rstrip()
        console.print(f"the trainer's memory was not measured: {reason}", style="yellow", markup=False)
        return []
    return found


def _last_line(said: str | bytes | None) -> str:
    """What a process said last; a timeout's output comes as bytes."""
    text = said.decode(errors="replace") if isinstance(said, bytes) else said or ""
    return next(reversed(text.strip().splitlines()), "")
