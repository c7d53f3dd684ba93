"""CPU seconds until pi0 has learnt the toy contest: a whole job on the platform against TRL's GRPO at its best.

    python -m benchmarks.learning [--json | --markdown]     claims and curves of what was raced
    python -m benchmarks.learning --plot FILE               draws pass@10 over CPU seconds

The goals are a held-out pass@10 of .80 and of .90 (80 problems, 20 samples at temperature 0.4, top-p 0.95). All start
from the same pi0, learn on the same 160 problems and ask the same kind of judge. `python -m benchmarks.race` says what
counts as a contestant's time, runs contestants by name and keeps what they did; this module runs the three of the
claims when they have not been (about an hour of two cores), and collects all that is there:

    first run    deploy/recipes/toy/thrifty.yaml: human solutions imitated, SPO on rollouts; nothing is known before
    second run   deploy/recipes/toy/thrifty_second.yaml: from the first one's stored experience
    TRL          GRPO with the setting that was cheapest to .80 with seed 0, of those that were tried

Read the rows with this in mind: SPO learns from people's solutions too, taken as published, for which GRPO has no use;
`docs/results/race.md` has what imitation alone does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.frame import as_table, machine
from benchmarks.race.contestants import contestants, searched_settings
from benchmarks.race.course import Course
from benchmarks.race.held import held, kept_courses, reference_model
from benchmarks.race.picture import draw
from benchmarks.race.rows import best_setting, claims, intervals, table

SEEDS = (0, 1, 2)
CLAIMED = ("spo", "grpo")


def document(courses: Sequence[Course]) -> str:
    """The JSON object: the claims' rows, the intervals of their ratios, and every examined checkpoint."""
    peer = best_setting(courses, searched_settings())
    rows = [row.to_json() for row in claims(courses, peer)]
    found = {"benchmark": "learning", "machine": machine(), "rows": rows, "intervals": intervals(courses, peer)}
    return json.dumps({**found, "courses": [asdict(each) for each in courses]}, indent=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Race what the claims need, then show all that was raced."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--markdown", action="store_true", help="print a line per contestant and seed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what was raced so far")
    parser.add_argument("--kept", action="store_true", help="run nothing, take what was raced so far")
    wanted = parser.parse_args(arguments)
    if not (wanted.kept or wanted.markdown or wanted.plot):
        for name in CLAIMED:
            for seed in SEEDS:
                held(name, contestants()[name], reference_model(), seed)
    courses = kept_courses()
    if wanted.plot:
        draw(courses, wanted.plot)
    elif wanted.markdown:
        print(table(courses))
    elif wanted.json:
        print(document(courses))
    else:
        Console().print(as_table("learning", claims(courses, best_setting(courses, searched_settings()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
