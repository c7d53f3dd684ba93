"""Runs side by side: where they stand, their curves over each other, what differs in their specs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import StringConstraints

from services.orchestrator.http import views
from services.orchestrator.http.dependencies import JOB_ID_PATTERN, ContextDep, PrincipalDep, require_own_job
from services.orchestrator.http.pages.rendering import show

router = APIRouter()

MOST_RUNS = 8
CURVES = (
    ("reward", "Reward; 0 is solved, -1 is not"),
    ("loss", "Loss"),
    ("kl_to_reference", "KL to π₀, nats"),
    ("entropy", "Entropy, nats per token"),
)
JobIds = Annotated[
    list[Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]], Query(default_factory=list, max_length=MOST_RUNS)
]


@router.get("/compare")
def compare_jobs(request: Request, context: ContextDep, principal: PrincipalDep, job: JobIds) -> Response:
    """The runs named by `job`, at most MOST_RUNS."""
    chosen = list(dict.fromkeys(job))
    for job_id in chosen:
        require_own_job(context, principal, job_id)
    found = [views.job(context, job_id) for job_id in chosen]
    ks = {k for run in found for k in context.jobs.spec(run.id).evaluation.ks}
    facts = {
        "jobs": found,
        "metrics": list(dict.fromkeys(name for run in found for name in run.metrics)),
        "ks": sorted(ks),
        "curves": CURVES,
        "differences": differences([run.spec for run in found]),
    }
    return show(request, "compare/page.html", **facts)


def differences(specs: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str | None]]]:
    """JSON pointers whose values are not the same in all specs, with the value in each as JSON; None: not there."""
    fields = [dict(_leaves(spec, "")) for spec in specs]
    pointers = dict.fromkeys(pointer for each in fields for pointer in each)
    values = {pointer: [each.get(pointer) for each in fields] for pointer in pointers}
    return [(pointer, found) for pointer, found in values.items() if len(set(found)) > 1]


def _leaves(node: object, pointer: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from _leaves(child, f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}")
    elif isinstance(node, list) and any(isinstance(child, dict) for child in node):
        for place, child in enumerate(node):
            yield from _leaves(child, f"{pointer}/{place}")
    else:
        yield pointer, json.dumps(node)
