"""python -m benchmarks.race NAME ... [--seeds 0 1 2]: run and examine contestants, all of them where none is named.

A contestant's time is the CPU of all its processes and their children, from being ready to learn until the first
checkpoint (one every 10 steps) whose held-out pass@10 reaches a goal: 80 problems, 20 samples at temperature 0.4,
top-p 0.95. Examinations are nobody's time; they come afterwards and end at .90. A trainer of TRL's is stopped after 250
CPU seconds. What is done lies below runs/race and is not done again unless what the contestant runs has changed.
`python -m benchmarks.learning` collects.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.race.contestants import contestants
from benchmarks.race.held import held, reference_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Race those that are named; says what each needed."""
    known = contestants()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    wanted = parser.parse_args(arguments)
    if unknown := sorted(set(wanted.names) - set(known)):
        parser.error(f"no contestant is called {', '.join(unknown)}; there are {', '.join(known)}")
    console, pi0 = Console(), reference_model()
    for name in wanted.names or known:
        for seed in wanted.seeds:
            for course in held(name, known[name], pi0, seed):
                best = course.best()
                goals = ", ".join(
                    f"{score:.2f} after {seconds:.1f}" if reached else f"{score:.2f} missed"
                    for score, (seconds, reached) in ((score, course.until(score)) for score in (0.8, 0.9))
                )
                console.print(
                    f"{course.contestant}, seed {seed}: {goals}; best {best.pass_at_10:.3f} "
                    f"after {best.cpu_seconds:.1f} of {course.points[-1].cpu_seconds:.1f} CPU s"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
