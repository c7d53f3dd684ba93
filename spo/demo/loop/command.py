"""`spo demo-loop` in the foreground."""

from __future__ import annotations

import time

from spo.console import ExitCode, console
from spo.demo.demo import RECIPE, fresh_demo, model_of
from spo.demo.loop.course import Course, Loop
from spo.demo.loop.report import markdown, write_report
from spo.observability.logs import configure_logs
from spo.spec.spec_file import read_spec

NAME = "demo-loop"


def run_demo_loop(seed: int = 0) -> None:
    """Run the course and write the report; exits with a status that says whether all claims held. Raises SpoError."""
    configure_logs("launcher", level="error", log_format="console")
    with fresh_demo(NAME, model_of(read_spec(RECIPE))) as demo:
        outcome = Loop(demo, Course(seed=seed)).run()
        cpu = {name: round(seconds, 1) for name, seconds in demo.platform.cpu_seconds().items()}
        seconds = round(time.monotonic() - demo.view.began, 1)
        used = {"seconds": seconds, "cpu_seconds": cpu, "peak_memory_bytes": demo.peak_memory_bytes}
        report = write_report(outcome, used, demo.platform.folder)
    console.print(markdown(report), markup=False, highlight=False, soft_wrap=True)
    if not all(report["claims"].values()):
        raise SystemExit(ExitCode.JOB_DID_NOT_SUCCEED)
