"""`make real-demo` on the GPU: what a job of the whole platform takes, and what it learned."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.gpu.result import report
from spo.demo.addition import run_real_demo

REPORT = Path("runs/real-demo/report.json")


def measure(dry_run: bool) -> dict[str, object]:
    """Wall time, and the demo's own report."""
    began = time.monotonic()
    run_real_demo()
    return {"seconds": round(time.monotonic() - began, 1), "report": json.loads(REPORT.read_text())}


if __name__ == "__main__":
    sys.exit(report(measure))
