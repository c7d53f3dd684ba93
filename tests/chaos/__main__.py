"""The chaos campaign: `python -m tests.chaos --minutes 20 --seed 1`, or `make chaos MINUTES=20 SEED=1`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from spo.local.launcher import Interrupted, signals_interrupt
from tests.chaos.command import carry_out

LOG_COLUMNS = 140
RESULTS = Path("benchmarks") / "results"


def main() -> int:
    """0 when every invariant held, 1 when one did not, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults are inflicted")
    parser.add_argument("--faults", type=int, default=10**6, help="and no more than so many")
    parser.add_argument("--patience", type=float, default=1.0, help="how many times slower this machine is")
    parser.add_argument("--seed", type=int, default=0, help="decides the faults, their order and their choices")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the trainer; above 1 they are killed too")
    parser.add_argument("--kinds", default="", help="these kinds of faults alone, a,b; or all others, -a,-b")
    parser.add_argument("--agents", action="store_true", help="agents play the jobs' episodes; their runner dies too")
    parser.add_argument("--result", type=Path, help="the JSON file; default benchmarks/results/chaos_seed_<seed>.json")
    chosen = parser.parse_args()
    bounds = chosen.minutes, chosen.faults, chosen.patience
    name = "chaos_agents_seed" if chosen.agents else "chaos_seed"
    result = chosen.result or RESULTS / f"{name}_{chosen.seed}.json"
    kinds = [kind.strip() for kind in chosen.kinds.split(",") if kind.strip()]
    # A table of many columns is unreadable in the 80 of a log file.
    console = Console() if sys.stdout.isatty() else Console(width=LOG_COLUMNS)
    try:
        with signals_interrupt():
            return carry_out(bounds, chosen.seed, kinds, chosen.ranks, result, console, agents=chosen.agents)
    except Interrupted:
        return 130


if __name__ == "__main__":
    sys.exit(main())
