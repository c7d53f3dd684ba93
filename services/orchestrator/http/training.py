"""What training leaves behind, over REST: curves, weight versions, checkpoints, evaluations, and completions of any
version.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Path as FastapiPath, Query, Response
from fastapi.responses import StreamingResponse
from ulid import ULID

from services.orchestrator.auth import Principal
from services.orchestrator.container import AppContext, ContextDep, JobId, PrincipalDep, lasting, require_own_job
from services.orchestrator.evaluation import RequestedEvaluation
from services.orchestrator.leases import (
    evaluation_results,
    kept_checkpoints,
    platform_series,
    recorded_checkpoints,
    training_series,
)
from services.orchestrator.replicas import announced_version, applied_by, published_versions
from spo import api
from spo.api import CompletionRequest, EvaluationRequest
from spo.errors import (
    FieldViolation,
    IntegrityError,
    InvalidInput,
    NotFound,
    NotReady,
    PreconditionFailed,
    storage_faults_named,
)
from spo.rpc.client import generate
from spo.spec.job_spec import EvaluationSpec
from spo.spec.section import TERMINAL, wire_name
from spo.v1.prompt_pb2 import Prompt, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import FinishReason
from spo.weights.model_folders import TarMember, open_members, tar_bytes, tar_pieces, write_export

ABANDONED_SECONDS = 86_400.0

router = APIRouter(prefix="/v1/jobs", tags=["training"])

evaluations_router = APIRouter(prefix="/v1/evaluations", tags=["evaluations"])

EvaluationId = Annotated[str, FastapiPath(pattern=r"^eval_[0-9A-HJKMNP-TV-Z]{26}$")]

policies_router = APIRouter(prefix="/v1/policies", tags=["policies"])

MAX_TOKENS_IN_ALL = 262_144


def weights_as_members(context: AppContext, job_id: str, version: int, *, merge: bool) -> list[TarMember]:
    """The files of a published version as `spo export` makes them; they take no space once they are closed.

    Raises NotFound, IntegrityError when it is damaged or not what was published, InvalidInput, ResourceExhausted.
    """
    published = {int(found["version"]): found["manifest_digest"] for found in published_versions(context.jobs, job_id)}
    if version not in published:
        raise NotFound(f"job {job_id} has no weight version {version}", code="weight_version_not_found")
    stored = context.weight_store.open(job_id, version)
    if stored.manifest_digest != published[version]:
        raise IntegrityError(f"{stored.uri} is not the version that was published")
    # Beside the weights where they are a folder, so that links take the place of copies.
    place = context.settings.state_path.absolute() / "downloads"
    place.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(place)
    with storage_faults_named(place, stored.size_bytes), tempfile.TemporaryDirectory(dir=place) as writing:
        model = context.files.models.expected(context.jobs.spec(job_id).model.path)
        write_export(model, stored, Path(writing) / "model", merge=merge)
        return open_members(Path(writing) / "model")


def _remove_abandoned(place: Path) -> None:
    """What an orchestrator left that was killed while it merged an adapter."""
    for folder in place.iterdir():
        if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def version_documents(context: AppContext, job_id: str) -> list[api.WeightVersion]:
    """Published versions with the replicas that serve them. Raises NotFound."""
    context.jobs.state(job_id)
    announced = announced_version(context.jobs, job_id)
    live = context.replicas.live()
    return [
        api.WeightVersion.model_validate(
            version
            | {"announced": announced is not None and announced.version == version["version"]}
            | applied_by(live, job_id, version["version"])
        )
        for version in published_versions(context.jobs, job_id)
    ]


def checkpoint_documents(context: AppContext, job_id: str) -> list[api.Checkpoint]:
    """Checkpoints that are there, by step. Raises NotFound."""
    context.jobs.state(job_id)
    found = kept_checkpoints(context.redis, context.files, job_id)
    parents = [None, *(record.step for record in found)]
    return [
        api.Checkpoint(**record.model_dump(), parent=parent) for record, parent in zip(found, parents, strict=False)
    ]


@router.get("/{job_id}/metrics")
def metrics(
    context: ContextDep,
    job_id: JobId,
    kind: Literal["training", "platform"] = "training",
    from_step: Annotated[int, Query(ge=0, le=2**53)] = 0,
    to_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    max_points: Annotated[int, Query(ge=1, le=100_000)] = 1000,
) -> api.MetricSeries:
    """Named scalars as columns: `training` over steps, `platform` (queue depths, replicas) over unix milliseconds."""
    context.jobs.state(job_id)
    if kind == "platform":
        found = platform_series(context.redis, job_id, max_points)
        return api.MetricSeries(axis="unix_ms", steps=found.steps, series=found.columns)
    found = training_series(context.redis, job_id, from_step, to_step, max_points)
    return api.MetricSeries(axis="step", steps=found.steps, series=found.columns)


@router.get("/{job_id}/evaluations")
def evaluations(context: ContextDep, job_id: JobId) -> api.Evaluations:
    """pass@k with intervals, diversity and each problem's counts, in order of steps."""
    context.jobs.state(job_id)
    return api.Evaluations.model_validate({"items": evaluation_results(context.redis, job_id)})


@router.get("/{job_id}/weights")
def weights(context: ContextDep, job_id: JobId) -> api.WeightVersions:
    """Published versions and which replicas serve them, do not yet, or could not."""
    return api.WeightVersions(items=version_documents(context, job_id))


# A number, so that the verbs beside it stay verbs.
@router.get("/{job_id}/weights/{version:int}")
def weight_version(
    context: ContextDep, job_id: JobId, version: Annotated[int, FastapiPath(ge=1, le=2**53)]
) -> api.WeightVersion:
    """One published version and which replicas serve it."""
    for found in version_documents(context, job_id):
        if found.version == version:
            return found
    raise NotFound(f"job {job_id} has no weight version {version}", code="weight_version_not_found")


@router.get(
    "/{job_id}/weights/{version:int}/download",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}},
)
@lasting
def download_weights(
    context: ContextDep,
    job_id: JobId,
    version: Annotated[int, FastapiPath(ge=1, le=2**53)],
    *,
    merge: Annotated[bool, Query(description="An adapter: a whole model, the adapter in its weights.")] = False,
) -> StreamingResponse:
    """A published version as a model folder in a tar archive, or as peft's folder where the job trains an adapter."""
    members = weights_as_members(context, job_id, version, merge=merge)
    headers = {
        "Content-Length": str(tar_bytes(members)),
        "Content-Disposition": f'attachment; filename="{job_id}-{version}.tar"',
    }
    return StreamingResponse(tar_pieces(members), media_type="application/x-tar", headers=headers)


@router.get("/{job_id}/checkpoints")
def checkpoints(context: ContextDep, job_id: JobId) -> api.Checkpoints:
    """Checkpoints by step."""
    return api.Checkpoints(items=checkpoint_documents(context, job_id))


@evaluations_router.post("", status_code=202)
def request_evaluation(
    context: ContextDep, principal: PrincipalDep, body: EvaluationRequest, response: Response
) -> api.Evaluation:
    """Queue an evaluation; it is carried out once its job has replicas, or no job wants any."""
    context.jobs.state(body.job_id)
    require_own_job(context, principal, body.job_id)
    tasks = context.served_judges.pinned(body.tasks, principal.tenant) if body.tasks else None
    context.require_usable(tasks, principal.sees_tenant)
    if body.samples < max(body.ks):
        message = f"pass@{max(body.ks)} needs at least {max(body.ks)} samples"
        raise InvalidInput(message, code="invalid_request", violations=(FieldViolation("/ks", message),))
    protocol = EvaluationSpec(
        samples=body.samples,
        temperature=body.temperature,
        top_p=body.top_p,
        ks=body.ks,
    )
    requested = context.evaluations.request(body.job_id, _version(context, body), tasks, protocol)
    response.headers["Location"] = f"/v1/evaluations/{requested.id}"
    return _shown(requested)


@evaluations_router.get("")
def list_evaluations(context: ContextDep, principal: PrincipalDep) -> api.EvaluationList:
    """Newest first."""
    found = [requested for requested in context.evaluations.requests.all() if _may_see(principal, requested)]
    for requested in found:
        if requested.result:
            requested.result.pop("per_problem", None)
    return api.EvaluationList(items=[_shown(requested) for requested in found])


@evaluations_router.get("/{evaluation_id}")
def get_evaluation(context: ContextDep, principal: PrincipalDep, evaluation_id: EvaluationId) -> api.Evaluation:
    """One evaluation with its table of problems."""
    return _shown(_visible(context, principal, evaluation_id))


@evaluations_router.post("/{evaluation_id}/cancel")
def cancel_evaluation(context: ContextDep, principal: PrincipalDep, evaluation_id: EvaluationId) -> api.Evaluation:
    """End an evaluation without a result; one that has ended otherwise is a conflict."""
    _visible(context, principal, evaluation_id)
    return _shown(context.evaluations.requests.cancel(evaluation_id, f"{principal.name} cancelled it"))


def _visible(context: AppContext, principal: Principal, evaluation_id: str) -> RequestedEvaluation:
    found = context.evaluations.requests.get(evaluation_id)
    if not _may_see(principal, found):
        raise NotFound(f"there is no evaluation {evaluation_id}", code="evaluation_not_found")
    return found


def _version(context: AppContext, body: EvaluationRequest) -> int:
    if body.version is not None:
        return body.version
    if body.checkpoint_step is None:
        return max(
            (int(published["version"]) for published in published_versions(context.jobs, body.job_id)), default=0
        )
    heads = {head.step: head for head in recorded_checkpoints(context.redis, body.job_id)}
    if body.checkpoint_step not in heads:
        message = f"job {body.job_id} has checkpoints at {sorted(heads) or 'no step'}"
        raise InvalidInput(
            message, code="invalid_evaluation", violations=(FieldViolation("/checkpoint_step", message),)
        )
    return heads[body.checkpoint_step].weight_version


def _shown(requested: RequestedEvaluation) -> api.Evaluation:
    return api.Evaluation.model_validate(asdict(requested))


def _may_see(principal: Principal, requested: RequestedEvaluation) -> bool:
    return principal.sees_tenant in (None, requested.tenant)


@policies_router.get("/{job_id}/versions")
def list_versions(context: ContextDep, job_id: JobId) -> api.WeightVersions:
    """Published versions of a job's policy; version 0 is its reference."""
    return api.WeightVersions(items=version_documents(context, job_id))


@policies_router.post("/{job_id}/completions")
@lasting
def complete(context: ContextDep, job_id: JobId, body: CompletionRequest) -> api.Completions:
    """Sample the policy. Answers 503 while no replica serves the job, 412 when they serve another or it has ended."""
    spec = context.jobs.spec(job_id)
    seed = secrets.randbits(62) if body.seed is None else body.seed
    longest = min(spec.model.max_response_tokens, MAX_TOKENS_IN_ALL // body.samples)
    group = PromptGroup(
        group_id=f"completion-{ULID()}",
        run_id=job_id,
        prompt=Prompt(prompt_id="completion", text=body.prompt),
        sampling=Sampling(
            samples=body.samples,
            temperature_min=body.temperature,
            temperature_max=body.temperature,
            top_p=body.top_p,
            max_tokens=min(body.max_tokens or longest, longest),
            seed=seed,
        ),
        policy_version=body.version,
        dispatched_unix_ms=int(time.time() * 1000),
    )
    try:
        trajectories = generate(context.inference, group, kept={})
    except (NotReady, PreconditionFailed):
        if context.jobs.state(job_id) not in TERMINAL:
            raise
        message = f"job {job_id} has ended, and no replica serves it any more"
        raise PreconditionFailed(message, code="policy_not_served") from None
    return api.Completions(
        items=[
            api.Completion(
                text=trajectory.response_text,
                tokens=len(trajectory.response_token_ids),
                finish_reason=wire_name(FinishReason, trajectory.finish_reason),
                version=trajectory.policy_version_first,
                mean_logprob=sum(trajectory.sampling_logprobs) / max(1, len(trajectory.sampling_logprobs)),
            )
            for trajectory in trajectories
        ],
        seed=seed,
    )
