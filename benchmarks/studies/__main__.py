"""python -m benchmarks.studies STUDY [--seeds 0 1 2]: carry out what has no result yet, then collect.

The study of memory has parts, each a grid of its own (`--part grid`, `trl`, `ages`, `long`), which may run beside each
other, and so may the grid's two sets of problems (`--settings p160`, `hard`). Results lie below runs/studies; documents
and pictures of docs/results are made of them, and a table is printed.
"""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from benchmarks.studies.carry_out import DOCUMENTS, FOLDER, baselines, imitation, memory, staleness
from benchmarks.studies.collect import write
from benchmarks.studies.memory import SETTINGS, Part


def main() -> int:
    """One study."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies", description=__doc__)
    parser.add_argument("study", choices=["staleness", "imitation", "baselines", "memory"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--part", choices=get_args(Part), default="grid", help="of the study of memory")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="of the study of memory")
    wanted = parser.parse_args()
    if wanted.study == "memory":
        memory(wanted.seeds, wanted.part, wanted.settings)
    else:
        {"staleness": staleness, "imitation": imitation, "baselines": baselines}[wanted.study](wanted.seeds)
    write(wanted.study, FOLDER / wanted.study, DOCUMENTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
