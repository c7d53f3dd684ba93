"""What jobs are made of: uploaded datasets with the jobs that use them, and models, given and trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParameter

from services.orchestrator.auth.paths import require_within
from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.datasets.store import Dataset, TaskFormat
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, PrincipalDep
from services.orchestrator.http.pages.rendering import is_part, show
from services.orchestrator.jobs.listing import JobFilter, page_of_jobs
from spo import redis_keys
from spo.errors import InvalidInput

router = APIRouter()

ROWS = 25
# Of so many of the newest jobs it is said what they use.
LOOKED_AT = 300
SHOWN_FAULTS = 50
SHOWN_JOBS = 6
SHOWN_CHANGES = 10
DatasetId = Annotated[str, PathParameter(pattern=r"^ds_[0-9A-HJKMNP-TV-Z]{26}$")]


@router.get("/datasets")
def show_datasets(
    request: Request,
    context: ContextDep,
    principal: PrincipalDep,
    cursor: Annotated[str, Query(pattern=r"^(ds_[0-9A-HJKMNP-TV-Z]{26})?$")] = "",
) -> Response:
    """Datasets, newest first, with the jobs that use them; a form to upload one."""
    found, after = context.datasets.page(principal.sees_tenant, cursor, ROWS)
    specs = _specs(context, principal)
    facts = {
        "datasets": [{"dataset": dataset, "jobs": _users(specs, dataset)[:SHOWN_JOBS]} for dataset in found],
        "older": urlencode({"cursor": after}) if after else "",
        "formats": get_args(TaskFormat),
        "looked_at": LOOKED_AT,
    }
    return show(request, "datasets/table.html" if is_part(request) else "datasets/page.html", **facts)


@router.get("/datasets/{dataset_id}")
def show_dataset(request: Request, context: ContextDep, principal: PrincipalDep, dataset_id: DatasetId) -> Response:
    """One dataset: what its rows hold, what is wrong with them, which jobs use it."""
    dataset = context.datasets.get(dataset_id, principal.sees_tenant)
    users = views.job_summaries(context, _users(_specs(context, principal), dataset))
    facts = {"dataset": dataset, "users": users, "shown_faults": SHOWN_FAULTS, "looked_at": LOOKED_AT}
    return show(request, "datasets/dataset.html", **facts)


@router.get("/models")
def show_models(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """Folders that jobs start from, and the weights that jobs have published."""
    specs = _specs(context, principal)
    trained = [
        {"job": job, "version": versions[-1], "count": len(versions)}
        for job in views.job_summaries(context, list(specs)[:ROWS])
        if (versions := context.weights.versions(job.id))
    ]
    facts = {"models": list(_models(context, principal, specs)), "trained": trained, "looked_at": LOOKED_AT}
    return show(request, "models/page.html", **facts, **_served(context, principal))


@router.get("/models/served")
def show_served(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """Only what is served under which name, and the continual jobs that change it."""
    return show(request, "models/served.html", **_served(context, principal))


def _served(context: AppContext, principal: Principal) -> dict[str, object]:
    """Names with their last changes, and continual jobs with their last rounds."""
    names, tenant = context.served_models, principal.sees_tenant
    store = context.continual
    continual = [(job, store.rounds(job)[:SHOWN_CHANGES], store.wait_of(job)) for job in store.all(tenant)]
    served = [(each, names.history(each.tenant, each.name, SHOWN_CHANGES)) for each in names.all(tenant)]
    return {"served": served[:ROWS], "continual": continual[:ROWS]}


def _specs(context: AppContext, principal: Principal) -> dict[str, bytes]:
    """The specs of the newest jobs that the principal may see, as stored, by job."""
    page = page_of_jobs(context.redis, JobFilter(tenant=principal.sees_tenant), None, LOOKED_AT)
    stored = context.redis.mget(list(map(redis_keys.run_spec, page.job_ids))) if page.job_ids else []
    return {job_id: spec for job_id, spec in zip(page.job_ids, stored, strict=True) if spec}


def _users(specs: dict[str, bytes], dataset: Dataset) -> list[str]:
    named = [job_id for job_id, spec in specs.items() if dataset.id.encode() in spec]
    return [job_id for job_id in named if json.loads(specs[job_id])["tasks"].get("id") == dataset.id]


def _models(context: AppContext, principal: Principal, specs: dict[str, bytes]) -> Iterator[dict[str, object]]:
    """The folders that jobs name, then those of the platform's own that no job names."""
    jobs: dict[str, list[str]] = {}
    for job_id, spec in specs.items():
        jobs.setdefault(json.loads(spec)["model"]["path"], []).append(job_id)
    own = context.settings.state_path.absolute() / "cache" / "models"
    for config in sorted(own.glob("*/config.json")):
        jobs.setdefault(str(config.parent), [])
    for path, users in jobs.items():
        yield {"path": path, "jobs": len(users), "newest": users[:1], **_folder(context, principal, Path(path))}


def _folder(context: AppContext, principal: Principal, folder: Path) -> dict[str, object]:
    """What a folder holds, as far as it may be looked at from here."""
    try:
        if principal.sees_tenant is not None:
            require_within(context.settings.tenant_folders, {"/model/path": str(folder)})
        config = json.loads((folder / "config.json").read_text())
        sizes: Sequence[int] = [file.stat().st_size for file in folder.glob("*.safetensors")]
        kind = (config.get("architectures") or [config.get("model_type", "")])[0]
        return {"kind": str(kind)[:80], "size_bytes": sum(sizes), "there": True}
    except (OSError, ValueError, AttributeError, InvalidInput):
        return {"kind": "", "size_bytes": 0, "there": False}
