"""The platform: replicas and how many, the experience store, keys and the audit log."""

from __future__ import annotations

from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, Field

from services.orchestrator.auth.principals import Scope
from services.orchestrator.experience import queries
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import RUN_PATTERN, ContextDep, PrincipalDep
from services.orchestrator.http.pages.rendering import is_part, show
from services.orchestrator.replicas.registry import POOLS
from spo.spec.job_spec import SourceName

router = APIRouter()

ROWS = 25
AUDIT_ENTRIES = 50


class StoredRowsForm(BaseModel):
    """What the rows of a stored run are filtered by."""

    source: str = Field("", pattern=f"^({'|'.join(get_args(SourceName))})?$")
    right: str = Field("", pattern="^(true|false)?$")
    prompt_id: str = Field("", pattern=r"^[A-Za-z0-9_.-]{0,200}$")
    cursor: str = Field("", max_length=4000)


@router.get("/replicas")
def show_replicas(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """Every live replica by pool, and sliders for the pools that scale."""
    facts = {"replicas": views.replicas(context, principal.sees_tenant), "pools": POOLS, "scale": views.scale(context)}
    return show(request, "replicas/table.html" if is_part(request) else "replicas/page.html", **facts)


@router.get("/attention")
def show_attention(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """What is wrong now on the whole platform, each with what to do about it."""
    entries = views.attention(context, principal).items
    return show(request, "attention/table.html" if is_part(request) else "attention/page.html", entries=entries)


@router.get("/experience")
def show_experience(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """What the cross-run store holds, run by run."""
    scope = queries.Scope(principal.sees_tenant)
    return show(request, "experience/runs.html", runs=queries.runs(context.redis, context.experience, scope))


@router.get("/experience/{run}")
def show_stored_run(
    request: Request,
    context: ContextDep,
    principal: PrincipalDep,
    run: Annotated[str, Path(pattern=RUN_PATTERN)],
    query: Annotated[StoredRowsForm, Query()],
) -> Response:
    """One stored run: counts, lineage and its trajectories."""
    scope = queries.Scope(principal.sees_tenant, run)
    chosen = query.model_dump(exclude={"cursor"})
    wanted = queries.RowFilter(query.prompt_id, query.source, query.right == "true" if query.right else None)
    page = queries.rows(context.experience, scope, wanted, ROWS, query.cursor)
    kept = {name: value for name, value in chosen.items() if value}
    facts = {
        "run": run,
        "rows": page.items,
        "chosen": chosen,
        "cursor": query.cursor,
        "newest": urlencode(kept),
        "older": urlencode({**kept, "cursor": page.next_cursor}) if page.next_cursor else "",
        "sources": get_args(SourceName),
    }
    if is_part(request):
        return show(request, "experience/rows.html", **facts)
    (found,) = queries.runs(context.redis, context.experience, scope)
    return show(
        request, "experience/run.html", about=found, statistics=queries.statistics(context.experience, scope), **facts
    )


@router.get("/keys")
def show_keys(
    request: Request,
    context: ContextDep,
    cursor: Annotated[str, Query(pattern=r"^([0-9]{1,16}-[0-9]{1,16})?$")] = "",
) -> Response:
    """Keys without their secrets, and who changed what lately."""
    entries, next_cursor = context.audit.page(cursor, AUDIT_ENTRIES)
    facts = {
        "keys": context.authenticator.keys.all()[::-1],
        "scopes": get_args(Scope),
        "entries": entries,
        "older": urlencode({"cursor": next_cursor}) if next_cursor else "",
        "cursor": cursor,
    }
    return show(request, "keys/tables.html" if is_part(request) else "keys/page.html", **facts)
