"""The table and the JSON file of a campaign."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.chaos.invariants import JobOutcome
from tests.chaos.recovery import Recovery


def document_of(
    seed: int, minutes: float, recoveries: Sequence[Recovery], jobs: Sequence[JobOutcome], broken: Sequence[str]
) -> dict[str, Any]:
    """What the campaign found, as plain values."""
    kinds = sorted({recovery.fault.kind for recovery in recoveries})
    rows = {kind: _row([each for each in recoveries if each.fault.kind == kind]) for kind in kinds}
    others = [recovery for recovery in recoveries if not recovery.fault.restarts_redis]
    return {
        "campaign": "chaos",
        "seed": seed,
        "minutes": minutes,
        "machine": f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores",
        "faults": len(recoveries),
        "kinds": len(kinds),
        "apart_from_redis_restarts": _row(others),
        "by_kind": rows,
        "lost": sum(job.lost for job in jobs),
        "doubled": sum(job.doubled for job in jobs),
        "trajectories": sum(job.trajectories for job in jobs),
        "jobs": [asdict(job) for job in jobs],
        "broken": list(broken),
        "schedule": [
            {
                "kind": each.fault.kind,
                "what": each.inflicted.what,
                "restart_seconds": _rounded(each.restart_seconds),
                "recovery_seconds": _rounded(each.recovery_seconds),
            }
            for each in recoveries
        ],
    }


def write(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def show(document: dict[str, Any], console: Console) -> None:
    """The table, and each invariant that did not hold."""
    table = Table(title=f"{document['faults']} faults of {document['kinds']} kinds, seed {document['seed']}")
    table.add_column("fault")
    for column in ("count", "recovery median s", "maximum s", "restart median s", "maximum s", "died by itself"):
        table.add_column(column, justify="right")
    for kind, row in [*document["by_kind"].items(), ("all but Redis restarts", document["apart_from_redis_restarts"])]:
        table.add_row(kind, *(_shown(value) for value in row.values()))
    console.print(table)
    counted = ("trajectories", "lost", "doubled", "given_up", "dropped")
    columns = [name.replace("_", " ") for name in counted[:4]]
    jobs = Table("job", "state", "seconds", "score", *columns, "dropped with the job", "Redis MiB after deletion")
    for job in document["jobs"]:
        score = "" if job["score"] is None else f"{job['score']:.2f}"
        memory = f"{job['memory_bytes'] / 2**20:.1f}"
        counts = [str(job[name]) for name in counted]
        jobs.add_row(job["job_id"][-6:], job["state"], f"{job['seconds']:.0f}", score, *counts, memory)
    console.print(jobs)
    for line in document["broken"]:
        console.print(f"[red]broken[/] {escape(line)}", highlight=False, soft_wrap=True)
    verdict = "[red]BROKEN[/]" if document["broken"] else "[green]all invariants held[/]"
    console.print(f"{document['lost']} lost, {document['doubled']} doubled, {verdict}")


def _row(recoveries: Sequence[Recovery]) -> dict[str, float | int | None]:
    recovered = [each.recovery_seconds for each in recoveries if each.recovery_seconds is not None]
    restarted = [each.restart_seconds for each in recoveries if each.restart_seconds is not None]
    return {
        "count": len(recoveries),
        "recovery_median_seconds": _rounded(statistics.median(recovered) if recovered else None),
        "recovery_maximum_seconds": _rounded(max(recovered, default=None)),
        "restart_median_seconds": _rounded(statistics.median(restarted) if restarted else None),
        "restart_maximum_seconds": _rounded(max(restarted, default=None)),
        "own_deaths": sum(each.own_deaths for each in recoveries),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _shown(value: float | int | None) -> str:
    return "" if value is None else str(value)
