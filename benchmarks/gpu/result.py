"""How a part gives its figures to `python -m benchmarks.gpu`: one marked line, among whatever libraries print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping

MARK = "GPU-CHECK "


def report(measure: Callable[[bool], Mapping[str, object]]) -> int:
    """Run one part, `measure(dry_run)`, and print what it found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-run", action="store_true")
    found = measure(parser.parse_args().dry_run)
    print(f"\n{MARK}{json.dumps(found)}", flush=True)
    return 0
