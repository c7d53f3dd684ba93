"""Experience over REST: the cross-run store, and task sets uploaded in parts."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path as File
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from ulid import ULID

from services.orchestrator import stored_experience
from services.orchestrator.auth import Principal
from services.orchestrator.checks import parse_json
from services.orchestrator.container import (
    AppContext,
    ContextDep,
    Limit,
    PrincipalDep,
    lasting,
    lasting_calls,
    require_own_job,
)
from services.orchestrator.datasets import Dataset
from services.orchestrator.scoring import RequestedImport, import_rows
from services.orchestrator.stored_experience import Rejudging, exported
from spo import api
from spo.api.experience import KNOWN_LOGS, KnownLog
from spo.errors import Conflict, FieldViolation, InvalidInput, NotFound, NotReady, storage_faults_named
from spo.experience.imports import ImportTerms, UploadFormat
from spo.model.folder import inspect_model_folder
from spo.spec.job_spec import SourceName, TasksSpec
from spo.spec.section import violations_of

router = APIRouter(prefix="/v1/experience", tags=["experience store"])

UPLOAD_FORMATS: dict[str, UploadFormat] = {
    "application/x-ndjson": "jsonl",
    "application/vnd.apache.parquet": "parquet",
}
_FILES: dict[str, object] = {
    "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in UPLOAD_FORMATS}
}

datasets_router = APIRouter(prefix="/v1/datasets", tags=["datasets"])

DatasetId = Annotated[str, Path(pattern=r"^ds_[0-9A-HJKMNP-TV-Z]{26}$")]
PART_TYPE = "application/offset+octet-stream"
BYTES_PER_WRITE = 1 << 20
_PART: dict[str, object] = {
    "requestBody": {
        "required": True,
        "content": {PART_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class StoredRunQuery(BaseModel):
    run: str | None = Field(None, pattern=api.RUN_PATTERN, description="A job's id or a name.")
    task_set: str | None = Field(None, max_length=200)


class StoredRowQuery(StoredRunQuery):
    prompt_id: str = Field("", pattern=r"^[A-Za-z0-9_.-]{0,200}$")
    source: SourceName | None = None
    right: bool | None = None
    limit: int = Field(50, ge=1, le=1000)
    cursor: str = Field("", max_length=4000)


@router.get("")
def list_runs(
    context: ContextDep, principal: PrincipalDep, query: Annotated[StoredRunQuery, Query()]
) -> api.StoredRuns:
    """Stored runs and imports with their lineage, newest first."""
    return api.StoredRuns(items=stored_experience.runs(context.redis, context.experience, _scope(principal, query)))


@router.get("/stats")
def statistics(
    context: ContextDep, principal: PrincipalDep, query: Annotated[StoredRunQuery, Query()]
) -> api.ExperienceStatistics:
    """Counts by run, source, outcome, judge and licence."""
    return stored_experience.statistics(context.experience, _scope(principal, query))


@router.get("/rows")
def list_rows(
    context: ContextDep, principal: PrincipalDep, query: Annotated[StoredRowQuery, Query()]
) -> api.StoredRowPage:
    """Stored trajectories, by run, prompt, source or outcome."""
    wanted = stored_experience.RowFilter(query.prompt_id, query.source or "", query.right)
    return stored_experience.rows(context.experience, _scope(principal, query), wanted, query.limit, query.cursor)


@router.get("/rows/{trajectory_id}")
def get_row(
    context: ContextDep,
    principal: PrincipalDep,
    trajectory_id: Annotated[str, Path(pattern=r"^[A-Za-z0-9_.-]{1,200}$")],
) -> api.StoredRowDetail:
    """One stored trajectory with every column of the file format."""
    return stored_experience.row(context.experience, stored_experience.Scope(principal.sees_tenant), trajectory_id)


class ImportQuery(BaseModel):
    name: str = Field(pattern=api.RUN_PATTERN, description="Of the import; jobs name it as their source.")
    job: str | None = Field(None, pattern=r"^job_[0-9A-Z]{26}$")
    tasks: str | None = Field(None, max_length=10_000, description="TasksSpec as JSON, instead of a job.")
    licence: str = Field("", max_length=200)
    reward_scale: float = Field(1.0, allow_inf_nan=False)
    reward_shift: float = Field(0.0, allow_inf_nan=False)
    reward_best: float | None = Field(
        None, allow_inf_nan=False, description="The best reward in the file, which becomes 0, instead of reward_shift."
    )
    fields: str = Field("", max_length=10_000, description="JSON: our columns to paths into the rows of another log.")
    log: KnownLog | None = Field(None, description="Whose log the rows are of, as a mapping that `fields` completes.")
    judging: Literal["missing", "all", "never"] = "missing"
    keep_good: bool = False


@router.post("/import", status_code=201, openapi_extra={"requestBody": {"required": True, **_FILES}})
async def import_experience(
    request: Request, context: ContextDep, principal: PrincipalDep, query: Annotated[ImportQuery, Query()]
) -> api.ImportReport:
    """Rows of prompts, responses and perhaps rewards; all or none are stored, unless the good ones are to be kept."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind not in UPLOAD_FORMATS:
        raise InvalidInput(f"send the rows as one of {', '.join(UPLOAD_FORMATS)}", code="unsupported_media_type")
    tasks = _parse_tasks(query.tasks) if query.tasks else None
    fields = _parse_fields(query.fields, query.log)
    body = await request.body()

    def store() -> api.ImportReport:
        spec, model_hash = tasks_of(context, principal, query.job, tasks)
        check_import_name(context, principal, query.name, "import")
        terms = ImportTerms(
            run=query.name,
            task_set=spec.kind,
            reward_scale=query.reward_scale,
            reward_shift=query.reward_shift if query.reward_best is None else -query.reward_scale * query.reward_best,
            needs_reward=query.judging == "never",
            ignores_rewards=query.judging == "all",
            model_hash=model_hash,
            licence=query.licence,
        )
        options = RequestedImport(terms, UPLOAD_FORMATS[kind], query.judging, query.keep_good, principal.tenant, fields)
        return import_rows(context.experience, context.judges, context.library.load(spec).train, body, options)

    return await lasting_calls().run(store)


@router.post("/export", response_class=StreamingResponse, responses={200: _FILES})
def export_experience(context: ContextDep, principal: PrincipalDep, body: api.Export) -> StreamingResponse:
    """The chosen trajectories as JSONL, a column per field, or as one Parquet file of the store's own format."""
    scope = _scope(principal, body)
    if body.run and stored_experience.is_on_its_way(context.redis, body.run):
        require_own_job(context, principal, body.run)
        raise NotReady(f"the experience of {body.run} is still being stored", code="experience_on_its_way")
    scope.files(context.experience)
    rows = stored_experience.every_row(context.experience, scope, stored_experience.RowFilter(right=body.right))
    kind = next(name for name, upload_format in UPLOAD_FORMATS.items() if upload_format == body.format)
    return StreamingResponse(exported(rows, body.format), media_type=kind)


@router.post("/rejudge")
@lasting
def rejudge(context: ContextDep, principal: PrincipalDep, body: api.Rejudge) -> api.RejudgeReport:
    """Judge stored trajectories by the tests that a task set has now; they are stored as a lineage of their own."""
    spec, _ = tasks_of(context, principal, body.job, body.tasks)
    name = body.name or f"rejudge-{ULID()}"
    check_import_name(context, principal, name, "rejudge")
    tasks = context.library.load(spec)
    rejudging = Rejudging(
        context.experience, context.judges, tasks.train, spec.kind, name, principal.tenant, writes=not body.dry_run
    )
    return rejudging.run(_scope(principal, body))


@router.post("/compact")
@lasting
def compact(context: ContextDep, principal: PrincipalDep, body: api.Compact) -> api.CompactReport:
    """Merge many small files into few; jobs under way are left alone, and what is read does not change."""
    scope = _scope(principal, body)
    return stored_experience.compact(context.redis, context.experience, scope, dry_run=body.dry_run)


@router.post("/prune")
@lasting
def prune(context: ContextDep, principal: PrincipalDep, body: api.Prune) -> api.PruneReport:
    """Remove stored experience for good: of one run, of a task set, or what is older than so many days."""
    scope = _scope(principal, body)
    return stored_experience.prune(context.redis, context.experience, scope, body.older_than_days, dry_run=body.dry_run)


def _scope(principal: Principal, chosen: StoredRunQuery | api.StorePart) -> stored_experience.Scope:
    return stored_experience.Scope(principal.sees_tenant, chosen.run, chosen.task_set)


def tasks_of(
    context: AppContext, principal: Principal, job: str | None, tasks: TasksSpec | None
) -> tuple[TasksSpec, str]:
    """The tasks that are meant, and the hash of the model where a job says so. Raises InvalidInput, NotFound."""
    if (job is None) == (tasks is None):
        violation = FieldViolation("/job", "name either a job or tasks")
        raise InvalidInput("which problems are meant?", violations=(violation,))
    if tasks is not None:
        tasks = context.served_judges.pinned(tasks, principal.tenant)
        context.require_usable(tasks, principal.sees_tenant)
        return tasks, ""
    require_own_job(context, principal, str(job))
    spec = context.jobs.spec(str(job))
    return spec.tasks, inspect_model_folder(spec.model.path).model_hash


def _parse_fields(text: str, log: KnownLog | None) -> tuple[tuple[str, str], ...]:
    found = parse_json(text.encode()) if text else {}
    if not isinstance(found, dict) or not all(isinstance(path, str) for path in found.values()):
        raise InvalidInput("the fields are an object of paths", code="bad_mapping")
    known = KNOWN_LOGS[log] if log else {}
    return tuple(sorted({**known, **found}.items()))


def _parse_tasks(text: str) -> TasksSpec:
    try:
        return TasksSpec.model_validate(parse_json(text.encode()))
    except ValidationError as error:
        raise InvalidInput("the tasks are not valid", code="invalid_tasks", violations=violations_of(error)) from None


def check_import_name(context: AppContext, principal: Principal, name: str, kind: str) -> None:
    """A name belongs to one tenant and one kind; jobs' ids are the jobs'. Raises Conflict."""
    theirs = [file.origin for file in context.experience.files(name)]
    if name.startswith("job_") or any((origin.kind, origin.tenant) != (kind, principal.tenant) for origin in theirs):
        raise Conflict(f"the name {name} is taken; choose another", code="name_taken")


class PartHeaders(BaseModel):
    upload_offset: int = Field(ge=0, le=1 << 50)
    content_digest: str = Field(pattern=r"^sha-256=:[A-Za-z0-9+/]{43}=:$", description="Of this part (RFC 9530).")


@datasets_router.post("", status_code=201)
def create(
    context: ContextDep, principal: PrincipalDep, body: api.DatasetRequest, response: Response
) -> api.DatasetView:
    """Begin an upload; its parts follow by PATCH."""
    if body.url is not None:
        message = "this platform fetches no addresses; upload the file in parts"
        raise InvalidInput(
            "addresses are not fetched", code="fetch_refused", violations=(FieldViolation("/url", message),)
        )
    made = context.datasets.create(
        body.name,
        body.task_format,
        body.file_format,
        body.size_bytes,
        principal.tenant,
    )
    response.headers["Location"] = f"/v1/datasets/{made.id}"
    return _shown(made)


@datasets_router.get("")
def list_datasets(
    context: ContextDep,
    principal: PrincipalDep,
    limit: Limit = 50,
    cursor: Annotated[str, Query(pattern=r"^(ds_[0-9A-HJKMNP-TV-Z]{26})?$")] = "",
) -> api.DatasetPage:
    """Newest first."""
    found, next_cursor = context.datasets.page(principal.sees_tenant, cursor, limit)
    return api.DatasetPage(items=[_without_faults(_shown(dataset)) for dataset in found], next_cursor=next_cursor)


@datasets_router.get("/{dataset_id}")
def get_dataset(context: ContextDep, principal: PrincipalDep, dataset_id: DatasetId) -> api.DatasetView:
    """One dataset with the report on its rows."""
    return _shown(context.datasets.get(dataset_id, principal.sees_tenant))


@datasets_router.delete("/{dataset_id}", status_code=204)
def delete_dataset(context: ContextDep, principal: PrincipalDep, dataset_id: DatasetId) -> None:
    """Remove a dataset with its file, or an upload with its parts; refused while a job that has not ended uses it."""
    context.datasets.delete(dataset_id, principal.sees_tenant, context.jobs.users_of)


@datasets_router.patch("/{dataset_id}", openapi_extra=_PART)
async def add_part(
    request: Request,
    response: Response,
    context: ContextDep,
    principal: PrincipalDep,
    dataset_id: DatasetId,
    headers: Annotated[PartHeaders, Header()],
) -> api.DatasetView:
    """Append a part. After a cut connection go on at `uploaded_bytes`: nothing counts before its digest was right."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != PART_TYPE:
        raise InvalidInput(f"send parts as {PART_TYPE}", code="unsupported_media_type")
    part = await run_in_threadpool(
        context.datasets.begin_part, dataset_id, principal.sees_tenant, headers.upload_offset
    )
    try:
        digest = await _write(request, part)
        if digest != headers.content_digest:
            message = "the part does not have the digest that came with it; send it again"
            raise InvalidInput(message, code="part_digest_mismatch")
        grown = await run_in_threadpool(context.datasets.add_part, dataset_id, headers.upload_offset, part)
    except FileNotFoundError as error:
        raise NotFound(f"dataset {dataset_id} was deleted meanwhile", code="dataset_not_found") from error
    finally:
        part.unlink(missing_ok=True)
    response.headers["Upload-Offset"] = str(grown.uploaded_bytes)
    return _shown(grown)


async def _write(request: Request, part: File) -> str:
    """Stream the body into a file, little of it in memory at a time; returns its Content-Digest."""
    digest = hashlib.sha256()
    with storage_faults_named(part.parent), part.open("wb") as file:

        def write(chunk: bytes) -> None:
            digest.update(chunk)
            file.write(chunk)

        waiting: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            waiting.append(chunk)
            size += len(chunk)
            if size >= BYTES_PER_WRITE:
                await run_in_threadpool(write, b"".join(waiting))
                waiting.clear()
                size = 0
        await run_in_threadpool(write, b"".join(waiting))
    return f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"


def _shown(found: Dataset) -> api.DatasetView:
    return api.DatasetView.model_validate(found, from_attributes=True)


def _without_faults(shown: api.DatasetView) -> api.DatasetView:
    report = shown.report and shown.report.model_copy(update={"faults": []})
    return shown.model_copy(update={"report": report})
