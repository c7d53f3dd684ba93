"""What training leaves behind: weight versions with the replicas that serve them, and checkpoints."""

from __future__ import annotations

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.jobs.checkpoints import kept_checkpoints
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
    """Checkpoints that are there, by step. Raises NotFound."""
    context.jobs.state(job_id)
    found = kept_checkpoints(context.redis, context.files, job_id)
    parents = [None, *(record.step for record in found)]
    return [
        schemas.Checkpoint(**record.model_dump(), parent=parent) for record, parent in zip(found, parents, strict=False)
    ]
