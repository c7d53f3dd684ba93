"""python -m benchmarks [--smoke]: run every benchmark in a process of its own, write benchmarks/results/<name>.json and
print one table. --smoke: those that take seconds at their smallest sizes; nothing is written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.frame import Row, as_table

FOLDER = Path(__file__).parent
NOT_BENCHMARKS = {"__init__", "__main__", "frame"}
LIMIT_SECONDS = 7200.0


def names(folder: Path = FOLDER) -> list[str]:
    """The benchmarks in a folder: every module but the frame."""
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def smoked(folder: Path = FOLDER) -> list[str]:
    """Those that name the sizes of a run of seconds."""
    return [name for name in names(folder) if "smoke=SMOKE" in (folder / f"{name}.py").read_text()]


def run_all(folder: Path = FOLDER, results: Path = FOLDER / "results", *, smoke: bool = False) -> int:
    """Run all benchmarks of a folder, or at their smallest sizes those that have some, whose results are not kept.

    The exit status counts those that broke.
    """
    console = Console()
    results.mkdir(exist_ok=True)
    broken = 0
    rows: list[Row] = []
    for name in smoked(folder) if smoke else names(folder):
        console.print(f"running {name} ...")
        command = [sys.executable, "-m", f"{folder.name}.{name}", "--json", *(["--smoke"] if smoke else [])]
        try:
            output = _output(command, folder.parent)
        except (subprocess.SubprocessError, ValueError) as error:
            console.print(f"[bold red]{name} broke: {error}")
            broken += 1
            continue
        if not smoke:
            (results / f"{name}.json").write_text(output)
        rows += [replace(Row(**row), name=f"{name}: {row['name']}") for row in json.loads(output)["rows"]]
    console.print(as_table("all", rows))
    return broken


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=True)
    # Libraries may print before the object.
    output = done.stdout[done.stdout.index("{") :]
    json.loads(output)
    return output


if __name__ == "__main__":
    sys.exit(run_all(smoke="--smoke" in sys.argv[1:]))
