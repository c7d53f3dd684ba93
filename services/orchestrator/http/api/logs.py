"""The latest log lines of a job, from every service that worked on it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from services.orchestrator import schemas
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, JobId
from services.orchestrator.replicas.registry import POOLS

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class LogQuery(BaseModel):
    service: str = Field("", pattern=f"^({'|'.join(POOLS)})?$")
    level: views.LogLevel = "info"
    limit: int = Field(200, ge=1, le=1000)
    cursor: str = Field("", pattern=r"^([0-9]{1,16}-[0-9]{1,16})?$")


@router.get("/{job_id}/logs")
def logs(context: ContextDep, job_id: JobId, query: Annotated[LogQuery, Query()]) -> schemas.LogPage:
    """Lines of at least this level, newest first; the latest 20,000 of a job are kept."""
    return views.logs(context, job_id, views.LogFilter(query.service, query.level), query.limit, query.cursor)
