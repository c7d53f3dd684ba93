"""The task of the real demo: two-digit addition after one example; `python -m spo.demo.addition FILE` writes it.

Every sum of two two-digit numbers once, its terms in one order only: however problems are split into training and
held-out ones, none is in both, not even with its terms swapped.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import combinations_with_replacement
from pathlib import Path

EXAMPLE = (59, 63)
SEED = 0


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
        statement = f"{_sum(*EXAMPLE)} {sum(EXAMPLE)}\n{_sum(first, second)}"
        yield {"statement": statement, "answer": {"expected": [str(first + second)]}}


def _sum(first: int, second: int) -> str:
    return f"{first} + {second} ="


if __name__ == "__main__":
    write_addition_tasks(Path(sys.argv[1]))
