"""Pages on the platform: replicas, experience, keys, datasets, models, the API, documents, and error codes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path as PathlibPath
from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Path as PathParameter, Query, Request, Response
from fastapi.responses import FileResponse
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from pydantic import BaseModel, Field

from services.orchestrator import stored_experience
from services.orchestrator.auth import Principal, require_within
from services.orchestrator.container import AppContext, ContextDep, PrincipalDep
from services.orchestrator.datasets import Dataset
from services.orchestrator.http.errors import is_part, show
from services.orchestrator.http.jobs import job_summaries
from services.orchestrator.http.platform import attention_list, jobs_in_queue, replica_documents, scale_document
from services.orchestrator.job_records import JobFilter, page_of_jobs
from services.orchestrator.replicas import POOLS
from services.orchestrator.versions import published_versions
from spo import api, redis_keys
from spo.errors import InvalidInput, NotFound, catalogue
from spo.spec.job_spec import SourceName

router = APIRouter()

ROWS = 25
AUDIT_ENTRIES = 50

catalogue_router = APIRouter()

# Of so many of the newest jobs it is said what they use.
LOOKED_AT = 300
SHOWN_FAULTS = 50
SHOWN_JOBS = 6
SHOWN_CHANGES = 10
DatasetId = Annotated[str, PathParameter(pattern=r"^ds_[0-9A-HJKMNP-TV-Z]{26}$")]

reference_router = APIRouter()

# Of a clone, of the image.
_DOCUMENT = re.compile(r"((tutorials|results|decisions)/)?[a-z0-9_]{1,80}\.md")
_PICTURE = re.compile(r"(images|results)/[a-z0-9_-]{1,80}\.png")
DOCUMENT_FOLDERS = (PathlibPath(__file__).parents[4] / "docs", PathlibPath("/usr/share/spo/docs"))
METHODS = ("get", "put", "post", "patch", "delete")

errors_router = APIRouter(prefix="/errors", include_in_schema=False)


class StoredRowsForm(BaseModel):
    """What the rows of a stored run are filtered by."""

    source: str = Field("", pattern=f"^({'|'.join(get_args(SourceName))})?$")
    right: str = Field("", pattern="^(true|false)?$")
    prompt_id: str = Field("", pattern=r"^[A-Za-z0-9_.-]{0,200}$")
    cursor: str = Field("", max_length=4000)


@router.get("/replicas")
def show_replicas(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """Every live replica by pool, and sliders for the pools that scale."""
    facts = {
        "replicas": replica_documents(context, principal.sees_tenant),
        "pools": POOLS,
        "scale": scale_document(context),
    }
    return show(request, "replicas/table.html" if is_part(request) else "replicas/page.html", **facts)


@router.get("/attention")
def show_attention(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """What is wrong now on the whole platform, each with what to do about it; apart, the jobs that wait for a slot."""
    facts = {"entries": attention_list(context, principal).items, "waiting": jobs_in_queue(context, principal)}
    return show(request, "attention/table.html" if is_part(request) else "attention/page.html", **facts)


@router.get("/experience")
def show_experience(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """What the cross-run store holds, run by run."""
    scope = stored_experience.Scope(principal.sees_tenant)
    return show(request, "experience/runs.html", runs=stored_experience.runs(context.redis, context.experience, scope))


@router.get("/experience/{run}")
def show_stored_run(
    request: Request,
    context: ContextDep,
    principal: PrincipalDep,
    run: Annotated[str, Path(pattern=api.RUN_PATTERN)],
    query: Annotated[StoredRowsForm, Query()],
) -> Response:
    """One stored run: counts, lineage and its trajectories."""
    scope = stored_experience.Scope(principal.sees_tenant, run)
    chosen = query.model_dump(exclude={"cursor"})
    wanted = stored_experience.RowFilter(query.prompt_id, query.source, query.right == "true" if query.right else None)
    page = stored_experience.rows(context.experience, scope, wanted, ROWS, query.cursor)
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
    (found,) = stored_experience.runs(context.redis, context.experience, scope)
    return show(
        request,
        "experience/run.html",
        about=found,
        statistics=stored_experience.statistics(context.experience, scope),
        **facts,
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
        "scopes": get_args(api.Scope),
        "entries": entries,
        "older": urlencode({"cursor": next_cursor}) if next_cursor else "",
        "cursor": cursor,
    }
    return show(request, "keys/tables.html" if is_part(request) else "keys/page.html", **facts)


@catalogue_router.get("/datasets")
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
        "formats": get_args(api.TaskFormat),
        "looked_at": LOOKED_AT,
    }
    return show(request, "datasets/table.html" if is_part(request) else "datasets/page.html", **facts)


@catalogue_router.get("/datasets/{dataset_id}")
def show_dataset(request: Request, context: ContextDep, principal: PrincipalDep, dataset_id: DatasetId) -> Response:
    """One dataset: what its rows hold, what is wrong with them, which jobs use it."""
    dataset = context.datasets.get(dataset_id, principal.sees_tenant)
    users = job_summaries(context, _users(_specs(context, principal), dataset))
    facts = {"dataset": dataset, "users": users, "shown_faults": SHOWN_FAULTS, "looked_at": LOOKED_AT}
    return show(request, "datasets/dataset.html", **facts)


@catalogue_router.get("/models")
def show_models(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """Folders that jobs start from, and the weights that jobs have published."""
    specs = _specs(context, principal)
    trained = [
        {"job": job, "version": versions[-1], "count": len(versions)}
        for job in job_summaries(context, list(specs)[:ROWS])
        if (versions := published_versions(context.jobs, job.id))
    ]
    facts = {"models": list(_models(context, principal, specs)), "trained": trained, "looked_at": LOOKED_AT}
    return show(request, "models/page.html", **facts, **_served(context, principal))


@catalogue_router.get("/models/served")
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
        yield {
            "path": path,
            "jobs": len(users),
            "newest": users[:1],
            **_model_folder(context, principal, PathlibPath(path)),
        }


def _model_folder(context: AppContext, principal: Principal, folder: PathlibPath) -> dict[str, object]:
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


@reference_router.get("/api")
def show_api(request: Request) -> Response:
    """Every operation with its parameters and its body; the document itself is at /openapi.json."""
    document = request.app.openapi()
    groups: dict[str, list[dict[str, object]]] = defaultdict(list)
    for path, operations in document["paths"].items():
        for method in METHODS:
            if operation := operations.get(method):
                groups[", ".join(operation.get("tags", ["others"]))].append(_operation(path, method, operation))
    return show(request, "reference/api.html", groups=dict(groups), version=document["info"]["version"])


def _operation(path: str, method: str, operation: dict[str, object]) -> dict[str, object]:
    content = operation.get("requestBody", {}).get("content", {})  # type: ignore[attr-defined]
    bodies = [f"{kind}: {_named(each.get('schema', {}))}" for kind, each in content.items()]
    parameters = [
        {
            "name": each["name"],
            "where": each["in"],
            "required": each.get("required"),
            "about": each.get("description", ""),
        }
        for each in operation.get("parameters", [])  # type: ignore[attr-defined]
    ]
    asked = method == "get" and "{" not in path
    return {
        "method": method.upper(),
        "path": path,
        "id": operation.get("operationId", ""),
        "about": operation.get("description", operation.get("summary", "")),
        "parameters": parameters,
        "bodies": bodies,
        "answer": path if asked and not path.endswith("/metrics") else "",
    }


def _named(schema: dict[str, str]) -> str:
    return schema.get("$ref", schema.get("title", "a file")).rpartition("/")[2]


@reference_router.get("/docs")
def show_documents(request: Request) -> Response:
    """The documents, by their titles."""
    folder = _document_folder()
    pages = sorted(folder.glob("*.md")) + sorted(folder.glob("tutorials/*.md"))
    titles = [(page.relative_to(folder).as_posix(), _title(page)) for page in pages]
    return show(request, "reference/documents.html", titles=titles)


@reference_router.get("/docs/{name:path}")
def show_document(request: Request, name: str) -> Response:
    """One document, or a picture in one; markup in it is shown and not obeyed.

    Raises NotFound, for an address that none can have too.
    """
    file = _document_folder() / name
    if _PICTURE.fullmatch(name) and file.is_file():
        return FileResponse(file, media_type="image/png")
    if not _DOCUMENT.fullmatch(name) or not file.is_file():
        raise NotFound("there is no such document here", code="not_found")
    # Written by markdown-it, which escapes every other markup.
    return show(request, "reference/document.html", title=_title(file), body=Markup(document_body(file)))


def document_body(file: PathlibPath) -> str:
    """A document as HTML: links that lead out of the documents are plain text, of other pictures is what they show."""
    parser = MarkdownIt("js-default", {"linkify": False})
    tokens = parser.parse(file.read_text())
    for token in tokens:
        token.children = [_harmless(child, file) for child in token.children or []]
    return str(parser.renderer.render(tokens, parser.options, {}))


def _harmless(token: Token, file: PathlibPath) -> Token:
    """The token, pointing nowhere but at other documents and their pictures here."""
    if token.type == "image":
        name = _name_below(file, str(token.attrGet("src") or ""), _PICTURE)
        if not name:
            # The page's policy lets no picture in that is not its own.
            return Token("text", "", 0, content=f"(picture: {token.content})")
        # Read when it is scrolled to: the pages of results have many.
        token.attrs = {"src": f"/docs/{name}", "alt": token.content, "loading": "lazy"}
    if token.type == "link_open":
        target, _, place = str(token.attrGet("href") or "").partition("#")
        name = _name_below(file, target, _DOCUMENT)
        # From /docs/tutorials too: whole addresses.
        token.attrs = {"href": f"/docs/{name}{'#' if place else ''}{place}"} if name else {}
    return token


def _name_below(file: PathlibPath, target: str, kind: re.Pattern[str]) -> str:
    """The name below /docs of what a document points at (nothing: itself); "" where that is not served."""
    folder = _document_folder().resolve()
    aimed = (file.parent / target).resolve() if target else file.resolve()
    name = aimed.relative_to(folder).as_posix() if aimed.is_relative_to(folder) else ""
    return name if kind.fullmatch(name) and aimed.is_file() else ""


def _document_folder() -> PathlibPath:
    return next((folder for folder in DOCUMENT_FOLDERS if folder.is_dir()), DOCUMENT_FOLDERS[0])


def _title(file: PathlibPath) -> str:
    first = file.read_text().partition("\n")[0]
    return first.lstrip("# ") or file.stem


@errors_router.get("")
def show_codes(request: Request) -> Response:
    """All codes."""
    return show(request, "errors/codes.html", title="Error codes", entries=catalogue())


@errors_router.get("/{code}")
def show_code(request: Request, code: str) -> Response:
    """One code."""
    if code not in catalogue():
        raise NotFound("there is no such error code")
    return show(request, "errors/codes.html", title=code, entries={code: catalogue()[code]})
