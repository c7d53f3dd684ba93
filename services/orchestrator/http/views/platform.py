"""The platform as people read it: replicas, and how many each pool has and should have."""

from __future__ import annotations

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.jobs.leases import now_ms
from services.orchestrator.replicas.scaling import SCALABLE
from spo import redis_keys
from spo.errors import NotFound

UNKNOWN_RUN: dict[str, object] = {"run_id": "", "policy_version": 0, "problem": ""}


def replicas(context: AppContext, tenant: str | None) -> list[schemas.Replica]:
    """Every live registered replica; of those that serve another tenant's run, not which run and how it fares."""
    now = now_ms()
    live = context.replicas.live()
    runs = {replica.run_id for replica in live} - {""}
    hidden = {run for run in runs if tenant is not None and not _owns(context, tenant, run)}
    return [
        schemas.Replica.model_validate(
            {name: value for name, value in vars(replica).items() if name != "last_seen_unix_ms"}
            | (UNKNOWN_RUN if replica.run_id in hidden else {})
            | {"last_seen_seconds_ago": max(0, now - replica.last_seen_unix_ms) / 1000}
        )
        for replica in live
    ]


def platform(context: AppContext, tenant: str | None) -> schemas.PlatformView:
    """What the platform is and what it lost; the lost jobs of the tenant, None: of all."""
    identity = context.redis.hgetall(redis_keys.platform())
    return schemas.PlatformView(
        epoch=identity.get(b"epoch", b"").decode(),
        schema_version=identity.get(b"schema_version", b"").decode(),
        notice=context.watch.notice(),
        losses=[schemas.PlatformLoss(**vars(loss)) for loss in context.watch.identity.losses()],
        lost_jobs=[
            schemas.LostJob(
                id=manifest.id,
                name=manifest.name,
                tenant=manifest.tenant,
                state=manifest.state,
                saved_at=manifest.saved_at,
                checkpoints=sorted(map(int, manifest.checkpoints)),
                weight_versions=sorted(map(int, manifest.weights)),
            )
            for manifest in context.watch.lost(tenant)
        ],
    )


def _owns(context: AppContext, tenant: str, run_id: str) -> bool:
    try:
        return context.jobs.tenant(run_id) == tenant
    except NotFound:
        return False


def scale(context: AppContext) -> schemas.ScaleView:
    """How many replicas each pool that scales has, should have and may have."""
    desired = context.scale.desired()
    live = context.replicas.live()
    pools = {}
    for pool in SCALABLE:
        low, high = context.scale.bounds[pool]
        members = [replica for replica in live if replica.pool == pool]
        draining = sum(replica.draining for replica in members)
        pools[pool] = schemas.PoolView(
            desired=desired[pool], live=len(members) - draining, draining=draining, minimum=low, maximum=high
        )
    return schemas.ScaleView(scaler=context.scale.kind, pools=pools)
