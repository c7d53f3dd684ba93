"""Try a trained policy: its versions, and completions by any of them while its run is served."""

from __future__ import annotations

import secrets
import time

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from ulid import ULID

from services.orchestrator import schemas
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, JobId
from services.orchestrator.http.threads import lasting
from spo.errors import NotReady, PreconditionFailed
from spo.rpc.long_calls import generate
from spo.spec.job_state import TERMINAL
from spo.spec.section import Temperature, TopP
from spo.spec.wire_enums import wire_name
from spo.v1.prompt_pb2 import Prompt, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import FinishReason

router = APIRouter(prefix="/v1/policies", tags=["policies"])

MAX_TOKENS_IN_ALL = 262_144


class CompletionRequest(BaseModel):
    """What to ask the policy; `version` 0 is the reference, null the newest announced."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: str = Field(min_length=1, max_length=200_000)
    version: int | None = Field(default=None, ge=0, le=2**53)
    samples: int = Field(default=1, ge=1, le=64)
    temperature: Temperature = 0.4
    top_p: TopP = 0.95
    max_tokens: int | None = Field(default=None, ge=1, le=131_072, description="Default: the job's response length.")
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)


class Completion(BaseModel):
    text: str
    tokens: int
    finish_reason: str
    version: int
    mean_logprob: float


class Completions(BaseModel):
    items: list[Completion]
    seed: int


@router.get("/{job_id}/versions")
def list_versions(context: ContextDep, job_id: JobId) -> schemas.WeightVersions:
    """Published versions of a job's policy; version 0 is its reference."""
    return schemas.WeightVersions(items=views.weight_versions(context, job_id))


@router.post("/{job_id}/completions")
@lasting
def complete(context: ContextDep, job_id: JobId, body: CompletionRequest) -> Completions:
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
    return Completions(
        items=[
            Completion(
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
