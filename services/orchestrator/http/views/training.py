"""What training leaves behind: weight versions with the replicas that serve them, and checkpoints."""

from __future__ import annotations

import json

from services.orchestrator import redis_keys as own_keys
from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.replicas.weights import applied_by


def weight_versions(context: AppContext, job_id: str) -> list[schemas.WeightVersion]:
    """Published versions with the replicas that serve them. Raises NotFound."""
    context.jobs.state(job_id)
    announced = context.weights.announced(job_id)
    live = context.replicas.live()
    return [
        schemas.WeightVersion.model_validate(
            version
            | {"announced": announced is not None and announced.version == version["version"]}
            | applied_by(live, job_id, version["version"])
        )
        for version in context.weights.versions(job_id)
    ]


def checkpoints(context: AppContext, job_id: str) -> list[schemas.Checkpoint]:
    """Checkpoints by step. Raises NotFound."""
    context.jobs.state(job_id)
    found = context.redis.hgetall(own_keys.job_checkpoints(job_id))
    heads = sorted((json.loads(raw) for raw in found.values()), key=lambda head: int(head["step"]))
    parents = [None, *(int(head["step"]) for head in heads)]
    return [schemas.Checkpoint(**head, parent=parent) for head, parent in zip(heads, parents, strict=False)]
