"""`spo real-demo`: a real model of 135 million parameters learns a verifiable task with the whole platform.

    start services ------------------------------\\
    SmolLM2-135M from the package index (cached) --> submit deploy/recipes/real/smollm2_addition.yaml -> follow
    two-digit additions as a task file ----------/   -> runs/real-demo/report.{json,png}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spo.console import ExitCode
from spo.demo.addition import write_addition_tasks
from spo.demo.demo import RECIPE, Demo, fresh_demo, print_summary
from spo.demo.report import DemoOutcome, write_report
from spo.observability.logs import configure_logs
from spo.spec.spec_file import read_spec

NAME = "real-demo"
# What `spo.demo.reference_model` calls it.
MODEL = "smollm2-135m"
REAL_RECIPE = RECIPE.parents[1] / "real" / "smollm2_addition.yaml"


def run_real_demo(seed: int = 0) -> None:
    """Run the demo in the foreground; exits with a status that says whether the job succeeded. Raises SpoError."""
    configure_logs("launcher", level="error", log_format="console")
    with fresh_demo(NAME, MODEL) as demo:
        report = write_report(learn_addition(demo, {**read_spec(REAL_RECIPE), "seed": seed}), demo.platform.folder)
    print_summary(report, demo.platform.folder)
    if report["state"] != "succeeded":
        raise SystemExit(ExitCode.JOB_DID_NOT_SUCCEED)


def learn_addition(demo: Demo, document: Mapping[str, Any]) -> DemoOutcome:
    """Carry the recipe's job to its end, its problems beside the demo's other files. Raises SpoError."""
    tasks = demo.platform.folder / "addition.jsonl"
    write_addition_tasks(tasks)
    return demo.run({**document, "tasks": {**document["tasks"], "path": str(tasks.absolute())}})
