"""python -m benchmarks: run every benchmark in a process of its own and write benchmarks/results/<name>.json."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.frame import Row, as_table

FOLDER = Path(__file__).parent
NOT_BENCHMARKS = {"__init__", "__main__", "frame"}
LIMIT_SECONDS = 7200.0


def names(folder: Path = FOLDER) -> list[str]:
    """The benchmarks in a folder: every module but the frame."""
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def run_all(folder: Path = FOLDER, results: Path = FOLDER / "results") -> int:
    """Run all benchmarks of a folder; the exit status counts those that broke."""
    console = Console()
    results.mkdir(exist_ok=True)
    broken = 0
    for name in names(folder):
        console.print(f"running {name} ...")
        command = [sys.executable, "-m", f"{folder.name}.{name}", "--json"]
        try:
            output = _output(command, folder.parent)
        except (subprocess.SubprocessError, ValueError) as error:
            console.print(f"[bold red]{name} broke: {error}")
            broken += 1
            continue
        (results / f"{name}.json").write_text(output)
        rows: Sequence[Row] = [Row(**row) for row in json.loads(output)["rows"]]
        console.print(as_table(name, rows))
    return broken


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=True)
    # Libraries may print before the object.
    output = done.stdout[done.stdout.index("{") :]
    json.loads(output)
    return output


if __name__ == "__main__":
    sys.exit(run_all())
