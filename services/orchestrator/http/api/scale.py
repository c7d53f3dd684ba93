"""How many replicas each pool has and should have."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from services.orchestrator.http.dependencies import ContextOf
from services.orchestrator.replicas.scaling import SCALABLE

router = APIRouter(prefix="/v1/scale", tags=["platform"])

Count = Annotated[int, Field(ge=0, le=100_000)]


class PoolView(BaseModel):
    """desired is null where nobody scales; live counts registered replicas that do not drain."""

    desired: int | None
    live: int
    draining: int
    minimum: int
    maximum: int


class ScaleView(BaseModel):
    scaler: str
    pools: dict[str, PoolView]


class ScaleRequest(BaseModel):
    """Replicas by pool; a pool that is not named stays as it is."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    inference: Count | None = None
    sandbox_judge: Count | None = Field(default=None, alias="sandbox-judge")


@router.get("")
def get_scale(context: ContextOf) -> ScaleView:
    """Wished and live replicas of the pools that scale."""
    desired = context.scale.desired()
    live = context.replicas.live()
    pools = {}
    for pool in SCALABLE:
        low, high = context.scale.bounds[pool]
        members = [replica for replica in live if replica.pool == pool]
        draining = sum(replica.draining for replica in members)
        pools[pool] = PoolView(
            desired=desired[pool], live=len(members) - draining, draining=draining, minimum=low, maximum=high
        )
    return ScaleView(scaler=context.scale.kind, pools=pools)


@router.put("", status_code=202)
def put_scale(context: ContextOf, requested: ScaleRequest) -> ScaleView:
    """Wish for other numbers of replicas; they join and drain while jobs run."""
    given = {"inference": requested.inference, "sandbox-judge": requested.sandbox_judge}
    context.scale.requested({pool: count for pool, count in given.items() if count is not None})
    return get_scale(context)
