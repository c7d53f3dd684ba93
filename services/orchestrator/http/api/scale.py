"""How many replicas each pool has and should have."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from services.orchestrator import schemas
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep

router = APIRouter(prefix="/v1/scale", tags=["platform"])

Count = Annotated[int, Field(ge=0, le=100_000)]


class ScaleRequest(BaseModel):
    """Replicas by pool; a pool that is not named stays as it is."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    inference: Count | None = None
    sandbox_judge: Count | None = Field(default=None, alias="sandbox-judge")
    verifier: Count | None = None


@router.get("")
def get_scale(context: ContextDep) -> schemas.ScaleView:
    """Desired and live replicas of the pools that scale."""
    return views.scale(context)


@router.put("", status_code=202)
def put_scale(context: ContextDep, body: ScaleRequest) -> schemas.ScaleView:
    """Ask for other numbers of replicas; they join and drain while jobs run."""
    given = {"inference": body.inference, "sandbox-judge": body.sandbox_judge, "verifier": body.verifier}
    context.scale.request({pool: count for pool, count in given.items() if count is not None})
    return views.scale(context)
