"""The cross-run experience store: what there is, imports and exports, new verdicts, pruning."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from services.orchestrator import schemas_experience as schemas
from services.orchestrator import stored
from services.orchestrator.api.answers import CallerOf, DeskOf, Limit
from spo.job_spec import SourceName

router = APIRouter(prefix="/v1/experience", tags=["experience store"])

RunName = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9][\w.-]{0,199}$", description="A job's id or a name.")]
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
    prompt_id: Annotated[str, Query(pattern=r"^[\w.-]{0,200}$")] = "",
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
    desk: DeskOf, caller: CallerOf, trajectory_id: Annotated[str, Path(pattern=r"^[\w.-]{1,200}$")]
) -> schemas.StoredRowDetail:
    """One stored trajectory with every column of the file format."""
    return stored.row(desk.experience, stored.Part(caller.sees_tenant), trajectory_id)
