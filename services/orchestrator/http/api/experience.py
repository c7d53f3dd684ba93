"""The cross-run experience store: what there is, imports and exports, new verdicts, pruning."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError
from ulid import ULID

from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.experience import maintenance, queries
from services.orchestrator.experience.exports import exported
from services.orchestrator.experience.imports import ImportOptions, import_rows
from services.orchestrator.experience.rejudge import Rejudging
from services.orchestrator.http.dependencies import RUN_PATTERN, ContextDep, PrincipalDep, require_own_job
from services.orchestrator.http.threads import lasting, lasting_calls
from services.orchestrator.lifecycle.submission import parse_json
from services.orchestrator.schemas import experience as schemas
from spo.errors import Conflict, FieldViolation, InvalidInput, NotReady
from spo.experience.import_row import ImportTerms
from spo.experience.known_logs import KNOWN_LOGS, KnownLog
from spo.experience.uploads import UploadFormat
from spo.model.folder import inspect_model_folder
from spo.spec.job_spec import SourceName, TasksSpec
from spo.spec.violations import violations_of

router = APIRouter(prefix="/v1/experience", tags=["experience store"])

UPLOAD_FORMATS: dict[str, UploadFormat] = {
    "application/x-ndjson": "jsonl",
    "application/vnd.apache.parquet": "parquet",
}
_FILES: dict[str, object] = {
    "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in UPLOAD_FORMATS}
}


class StoredRunQuery(BaseModel):
    run: str | None = Field(None, pattern=RUN_PATTERN, description="A job's id or a name.")
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
) -> schemas.StoredRuns:
    """Stored runs and imports with their lineage, newest first."""
    return schemas.StoredRuns(items=queries.runs(context.redis, context.experience, _scope(principal, query)))


@router.get("/stats")
def statistics(
    context: ContextDep, principal: PrincipalDep, query: Annotated[StoredRunQuery, Query()]
) -> schemas.ExperienceStatistics:
    """Counts by run, source, outcome, judge and licence."""
    return queries.statistics(context.experience, _scope(principal, query))


@router.get("/rows")
def list_rows(
    context: ContextDep, principal: PrincipalDep, query: Annotated[StoredRowQuery, Query()]
) -> schemas.StoredRowPage:
    """Stored trajectories, by run, prompt, source or outcome."""
    wanted = queries.RowFilter(query.prompt_id, query.source or "", query.right)
    return queries.rows(context.experience, _scope(principal, query), wanted, query.limit, query.cursor)


@router.get("/rows/{trajectory_id}")
def get_row(
    context: ContextDep,
    principal: PrincipalDep,
    trajectory_id: Annotated[str, Path(pattern=r"^[A-Za-z0-9_.-]{1,200}$")],
) -> schemas.StoredRowDetail:
    """One stored trajectory with every column of the file format."""
    return queries.row(context.experience, queries.Scope(principal.sees_tenant), trajectory_id)


class StorePart(BaseModel):
    """Part of the store in a request's body."""

    model_config = ConfigDict(extra="forbid")

    run: str | None = Field(default=None, pattern=RUN_PATTERN)
    task_set: str | None = Field(default=None, max_length=200)


class Export(StorePart):
    right: StrictBool | None = Field(default=None, description="Only successes, or only failures.")
    format: Literal["jsonl", "parquet"] = "jsonl"


class Rejudge(StorePart):
    job: str | None = Field(default=None, pattern=r"^job_[0-9A-Z]{26}$", description="Judge by this job's tasks ...")
    tasks: TasksSpec | None = Field(default=None, description="... or by these.")
    name: str | None = Field(default=None, pattern=RUN_PATTERN, description="Of the new lineage; default: a new one.")
    dry_run: StrictBool = False


class Compact(StorePart):
    dry_run: StrictBool = False


class Prune(StorePart):
    older_than_days: float | None = Field(default=None, ge=0, le=36500)
    dry_run: StrictBool = False


class ImportQuery(BaseModel):
    name: str = Field(pattern=RUN_PATTERN, description="Of the import; jobs name it as their source.")
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
) -> schemas.ImportReport:
    """Rows of prompts, responses and perhaps rewards; all or none are stored, unless the good ones are to be kept."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind not in UPLOAD_FORMATS:
        raise InvalidInput(f"send the rows as one of {', '.join(UPLOAD_FORMATS)}", code="unsupported_media_type")
    tasks = _parse_tasks(query.tasks) if query.tasks else None
    fields = _parse_fields(query.fields, query.log)
    body = await request.body()

    def store() -> schemas.ImportReport:
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
        options = ImportOptions(terms, UPLOAD_FORMATS[kind], query.judging, query.keep_good, principal.tenant, fields)
        return import_rows(context.experience, context.judges, context.library.load(spec).train, body, options)

    return await lasting_calls().run(store)


@router.post("/export", response_class=StreamingResponse, responses={200: _FILES})
def export_experience(context: ContextDep, principal: PrincipalDep, body: Export) -> StreamingResponse:
    """The chosen trajectories as JSONL, a column per field, or as one Parquet file of the store's own format."""
    scope = _scope(principal, body)
    if body.run and queries.is_on_its_way(context.redis, body.run):
        require_own_job(context, principal, body.run)
        raise NotReady(f"the experience of {body.run} is still being stored", code="experience_on_its_way")
    scope.files(context.experience)
    rows = queries.every_row(context.experience, scope, queries.RowFilter(right=body.right))
    kind = next(name for name, upload_format in UPLOAD_FORMATS.items() if upload_format == body.format)
    return StreamingResponse(exported(rows, body.format), media_type=kind)


@router.post("/rejudge")
@lasting
def rejudge(context: ContextDep, principal: PrincipalDep, body: Rejudge) -> schemas.RejudgeReport:
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
def compact(context: ContextDep, principal: PrincipalDep, body: Compact) -> schemas.CompactReport:
    """Merge many small files into few; jobs under way are left alone, and what is read does not change."""
    scope = _scope(principal, body)
    return maintenance.compact(context.redis, context.experience, scope, dry_run=body.dry_run)


@router.post("/prune")
@lasting
def prune(context: ContextDep, principal: PrincipalDep, body: Prune) -> schemas.PruneReport:
    """Remove stored experience for good: of one run, of a task set, or what is older than so many days."""
    scope = _scope(principal, body)
    return maintenance.prune(context.redis, context.experience, scope, body.older_than_days, dry_run=body.dry_run)


def _scope(principal: Principal, chosen: StoredRunQuery | StorePart) -> queries.Scope:
    return queries.Scope(principal.sees_tenant, chosen.run, chosen.task_set)


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
