"""The cross-run experience store: what there is, imports and exports, new verdicts, pruning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from ulid import ULID

from services.orchestrator import schemas_experience as schemas
from services.orchestrator import stored, stored_upkeep
from services.orchestrator.access.callers import Caller
from services.orchestrator.api.answers import CallerOf, DeskOf, Limit
from services.orchestrator.desk import Desk
from services.orchestrator.exports import exported
from services.orchestrator.imports import ImportWish, import_rows
from services.orchestrator.intake import parse_json
from services.orchestrator.rejudge import Rejudging
from spo.errors import Conflict, FieldViolation, InvalidInput, NotFound
from spo.experience.import_row import ImportTerms
from spo.experience.uploads import UploadFormat
from spo.job_spec import SourceName, TasksSpec
from spo.model_folder import inspect_model_folder
from spo.spec_violations import violations_of

router = APIRouter(prefix="/v1/experience", tags=["experience store"])

RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$"
UPLOAD_FORMATS: dict[str, UploadFormat] = {
    "application/x-ndjson": "jsonl",
    "application/vnd.apache.parquet": "parquet",
}
_FILES: dict[str, Any] = {
    "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in UPLOAD_FORMATS}
}
RunName = Annotated[str | None, Query(pattern=RUN_PATTERN, description="A job's id or a name.")]
TaskSet = Annotated[str | None, Query(max_length=200)]


@router.get("")
def list_runs(desk: DeskOf, caller: CallerOf, run: RunName = None, task_set: TaskSet = None) -> schemas.StoredRuns:
    """Stored runs and imports with their lineage, newest first."""
    part = stored.Part(caller.sees_tenant, run, task_set)
    return schemas.StoredRuns(items=stored.runs(desk.redis, desk.experience, part))


@router.get("/stats")
def statistics(
    desk: DeskOf, caller: CallerOf, run: RunName = None, task_set: TaskSet = None
) -> schemas.ExperienceStatistics:
    """Counts by run, source, outcome, judge and licence."""
    return stored.statistics(desk.experience, stored.Part(caller.sees_tenant, run, task_set))


@router.get("/rows")
def list_rows(
    desk: DeskOf,
    caller: CallerOf,
    run: RunName = None,
    task_set: TaskSet = None,
    prompt_id: Annotated[str, Query(pattern=r"^[A-Za-z0-9_.-]{0,200}$")] = "",
    source: SourceName | None = None,
    right: bool | None = None,
    limit: Limit = 50,
    cursor: Annotated[str, Query(max_length=4000)] = "",
) -> schemas.StoredRowPage:
    """Stored trajectories, by run, prompt, source or outcome."""
    part = stored.Part(caller.sees_tenant, run, task_set)
    return stored.rows(desk.experience, part, stored.RowFilter(prompt_id, source or "", right), limit, cursor)


@router.get("/rows/{trajectory_id}")
def get_row(
    desk: DeskOf, caller: CallerOf, trajectory_id: Annotated[str, Path(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
) -> schemas.StoredRowDetail:
    """One stored trajectory with every column of the file format."""
    return stored.row(desk.experience, stored.Part(caller.sees_tenant), trajectory_id)


class Chosen(BaseModel):
    """Part of the store in a request's body."""

    model_config = ConfigDict(extra="forbid")

    run: str | None = Field(default=None, pattern=RUN_PATTERN)
    task_set: str | None = Field(default=None, max_length=200)


class Export(Chosen):
    right: bool | None = Field(default=None, description="Only successes, or only failures.")
    format: Literal["jsonl", "parquet"] = "jsonl"


class Rejudge(Chosen):
    job: str | None = Field(default=None, pattern=r"^job_[0-9A-Z]{26}$", description="Judge by this job's tasks ...")
    tasks: TasksSpec | None = Field(default=None, description="... or by these.")
    name: str | None = Field(default=None, pattern=RUN_PATTERN, description="Of the new lineage; default: a new one.")
    dry_run: bool = False


class Compact(Chosen):
    dry_run: bool = False


class Prune(Chosen):
    older_than_days: float | None = Field(default=None, ge=0, le=36500)
    dry_run: bool = False


@router.post("/import", status_code=201, openapi_extra={"requestBody": {"required": True, **_FILES}})
async def import_experience(
    request: Request,
    desk: DeskOf,
    caller: CallerOf,
    name: Annotated[str, Query(pattern=RUN_PATTERN, description="Of the import; jobs name it as their source.")],
    job: Annotated[str | None, Query(pattern=r"^job_[0-9A-Z]{26}$")] = None,
    tasks: Annotated[str | None, Query(max_length=10_000, description="TasksSpec as JSON, instead of a job.")] = None,
    licence: Annotated[str, Query(max_length=200)] = "",
    reward_scale: Annotated[float, Query(allow_inf_nan=False)] = 1.0,
    reward_shift: Annotated[float, Query(allow_inf_nan=False)] = 0.0,
    judging: Literal["missing", "all", "never"] = "missing",
    keep_good: bool = False,
) -> schemas.ImportReport:
    """Rows of prompts, responses and perhaps rewards; all or none are stored, unless the good ones are to be kept."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind not in UPLOAD_FORMATS:
        raise InvalidInput(f"send the rows as one of {', '.join(UPLOAD_FORMATS)}", code="unsupported_media_type")
    asked = _parse_tasks(tasks) if tasks else None
    body = await request.body()

    def carry_out() -> schemas.ImportReport:
        spec, model_hash = _tasks_of(desk, caller, job, asked)
        _check_name(desk, caller, name, "import")
        terms = ImportTerms(
            run=name,
            task_set=spec.kind,
            reward_scale=reward_scale,
            reward_shift=reward_shift,
            needs_reward=judging == "never",
            ignores_rewards=judging == "all",
            model_hash=model_hash,
            licence=licence,
        )
        wish = ImportWish(terms, UPLOAD_FORMATS[kind], judging, keep_good, caller.tenant)
        return import_rows(desk.experience, desk.judge, desk.library.load(spec).train, body, wish)

    return await run_in_threadpool(carry_out)


@router.post("/export", response_class=StreamingResponse, responses={200: _FILES})
def export_experience(desk: DeskOf, caller: CallerOf, wish: Export) -> StreamingResponse:
    """The chosen trajectories as JSONL, a column per field, or as one Parquet file of the store's own format."""
    part = stored.Part(caller.sees_tenant, wish.run, wish.task_set)
    part.files(desk.experience)
    rows = stored.every_row(desk.experience, part, stored.RowFilter(right=wish.right))
    kind = next(name for name, upload_format in UPLOAD_FORMATS.items() if upload_format == wish.format)
    return StreamingResponse(exported(rows, wish.format), media_type=kind)


@router.post("/rejudge")
def rejudge(desk: DeskOf, caller: CallerOf, wish: Rejudge) -> schemas.RejudgeReport:
    """Judge stored trajectories by the tests that a task set has now; the answers are stored as a new lineage."""
    spec, _ = _tasks_of(desk, caller, wish.job, wish.tasks)
    name = wish.name or f"rejudge-{ULID()}"
    _check_name(desk, caller, name, "rejudge")
    tasks = desk.library.load(spec)
    pass_over = Rejudging(
        desk.experience, desk.judge, tasks.train, spec.kind, name, caller.tenant, writes=not wish.dry_run
    )
    return pass_over.run(stored.Part(caller.sees_tenant, wish.run, wish.task_set))


@router.post("/compact")
def compact(desk: DeskOf, caller: CallerOf, wish: Compact) -> schemas.CompactReport:
    """Merge many small files into few; jobs under way are left alone, and what is read does not change."""
    part = stored.Part(caller.sees_tenant, wish.run, wish.task_set)
    return stored_upkeep.compact(desk.redis, desk.experience, part, wish.dry_run)


@router.post("/prune")
def prune(desk: DeskOf, caller: CallerOf, wish: Prune) -> schemas.PruneReport:
    """Remove stored experience for good: of one run, of a task set, or what is older than so many days."""
    part = stored.Part(caller.sees_tenant, wish.run, wish.task_set)
    return stored_upkeep.prune(desk.redis, desk.experience, part, wish.older_than_days, wish.dry_run)


def _tasks_of(desk: Desk, caller: Caller, job: str | None, tasks: TasksSpec | None) -> tuple[TasksSpec, str]:
    """The tasks that are meant, and the hash of the model where a job says so. Raises InvalidInput, NotFound."""
    if (job is None) == (tasks is None):
        violation = FieldViolation("/job", "name either a job or tasks")
        raise InvalidInput("which problems are meant?", violations=(violation,))
    if tasks is not None:
        desk.require_usable(tasks, caller.sees_tenant)
        return tasks, ""
    if not caller.is_admin and desk.jobs.tenant(str(job)) != caller.tenant:
        raise NotFound(f"there is no job {job}", code="job_not_found")
    spec = desk.jobs.spec(str(job))
    return spec.tasks, inspect_model_folder(spec.model.path).model_hash


def _parse_tasks(text: str) -> TasksSpec:
    try:
        return TasksSpec.model_validate(parse_json(text.encode()))
    except ValidationError as error:
        raise InvalidInput("the tasks are not valid", code="invalid_tasks", violations=violations_of(error)) from None


def _check_name(desk: Desk, caller: Caller, name: str, kind: str) -> None:
    """A name belongs to one tenant and one kind; jobs' ids are the jobs'. Raises Conflict."""
    theirs = [file.origin for file in desk.experience.files(name)]
    if name.startswith("job_") or any((each.kind, each.tenant) != (kind, caller.tenant) for each in theirs):
        raise Conflict(f"the name {name} is taken; choose another", code="name_taken")
