"""What training leaves behind, over REST: curves, weight versions, checkpoints, evaluations, completions of any
version; and what it learned from: trajectories, prompts and the values of tokens, asked of the replay buffer and of
value-estimation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Path as FastapiPath, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from ulid import ULID

from services.orchestrator.auth import Principal
from services.orchestrator.container import (
    AppContext,
    ContextDep,
    JobId,
    Limit,
    PolicyVersion,
    PrincipalDep,
    PromptId,
    TrajectoryId,
    lasting,
    require_own_job,
)
from services.orchestrator.datasets import prompt_of
from services.orchestrator.evaluation import RequestedEvaluation
from services.orchestrator.job_records import evaluation_results, platform_series, training_series
from services.orchestrator.leases import kept_checkpoints, recorded_checkpoints
from services.orchestrator.replicas import applied_by
from services.orchestrator.versions import announced_version, published_versions
from spo import api, errors, redis_keys
from spo.api import CompletionRequest, EvaluationRequest
from spo.model.chat import turns
from spo.rpc.client import generate
from spo.spec.job_spec import EvaluationSpec, SourceName
from spo.spec.reward import qhat_0
from spo.spec.section import TERMINAL, wire_name
from spo.spec.tasks import RewardSpec
from spo.tasks.problem import Problem
from spo.v1 import value_service_pb2 as value
from spo.v1.inference_service_pb2 import ServedPart, ServeRequest
from spo.v1.prompt_pb2 import Prompt, PromptGroup, Sampling, Source
from spo.v1.replay_service_pb2 import (
    GetBatchRequest,
    GetBatchResponse,
    GetTrajectoryRequest,
    GetTrajectoryResponse,
    ListTrajectoriesRequest,
    ListTrajectoriesResponse,
)
from spo.v1.trajectory_pb2 import FinishReason, SegmentKind, Trajectory
from spo.v1.value_pb2 import PromptValue
from spo.v1.verdict_pb2 import Outcome
from spo.weights.model_folders import TarMember, open_members, tar_bytes, tar_pieces, write_export

ABANDONED_SECONDS = 86_400.0

router = APIRouter(prefix="/v1/jobs", tags=["training"])

evaluations_router = APIRouter(prefix="/v1/evaluations", tags=["evaluations"])

EvaluationId = Annotated[str, FastapiPath(pattern=r"^eval_[0-9A-HJKMNP-TV-Z]{26}$")]

policies_router = APIRouter(prefix="/v1/policies", tags=["policies"])

MAX_TOKENS_IN_ALL = 262_144


def weights_as_members(context: AppContext, job_id: str, version: int, *, merge: bool) -> list[TarMember]:
    """The files of a published version as `spo weights export` makes them; they take no space once they are closed.

    Raises NotFound, IntegrityError when it is damaged or not what was published, InvalidInput, ResourceExhausted.
    """
    published = {int(found["version"]): found["manifest_digest"] for found in published_versions(context.jobs, job_id)}
    if version not in published:
        raise errors.NotFound(f"job {job_id} has no weight version {version}", code="weight_version_not_found")
    stored = context.weight_store.open(job_id, version)
    if stored.manifest_digest != published[version]:
        raise errors.IntegrityError(f"{stored.uri} is not the version that was published")
    # Beside the weights where they are a folder, so that links take the place of copies.
    place = context.settings.state_path.absolute() / "downloads"
    place.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(place)
    with errors.storage_faults_named(place, stored.size_bytes), tempfile.TemporaryDirectory(dir=place) as writing:
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
    raise errors.NotFound(f"job {job_id} has no weight version {version}", code="weight_version_not_found")


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
        raise errors.InvalidInput(message, code="invalid_request", violations=(errors.FieldViolation("/ks", message),))
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
        raise errors.NotFound(f"there is no evaluation {evaluation_id}", code="evaluation_not_found")
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
        raise errors.InvalidInput(
            message, code="invalid_evaluation", violations=(errors.FieldViolation("/checkpoint_step", message),)
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
    """Sample the policy. Answers 503 while no replica serves the job, 412 when they serve another.

    An ended job's policy is asked as OpenAI's clients ask it: a replica that no job needs loads it first.
    """
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
    except (errors.NotReady, errors.PreconditionFailed):
        if context.jobs.state(job_id) not in TERMINAL:
            raise
        return asyncio.run(_of_ended_job(context, group))
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


async def _of_ended_job(context: AppContext, group: PromptGroup) -> api.Completions:
    """Ask the pool that serves OpenAI's API, which brings a replica to the job. Raises NotServed where none came."""
    sampling, announced = group.sampling, announced_version(context.jobs, group.run_id)
    newest = announced.version if announced else 0
    wanted = ServeRequest(
        request_id=group.group_id,
        run_id=group.run_id,
        policy_version=group.policy_version if group.HasField("policy_version") else newest,
        messages_json=json.dumps([{"role": "user", "content": group.prompt.text}]),
        samples=sampling.samples,
        temperature=sampling.temperature_min,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        logprobs=True,
    )
    found: dict[int, list[ServedPart]] = defaultdict(list)
    async with contextlib.aclosing(context.serving_pool.serve(wanted)) as answer:
        async for response in answer:
            for part in response.parts:
                found[part.index].append(part)
    return api.Completions(items=[_completion(parts) for _, parts in sorted(found.items())], seed=sampling.seed)


def _completion(parts: Sequence[ServedPart]) -> api.Completion:
    """One sample of its parts, the last of which ends it."""
    nats = [token.logprob for part in parts for token in part.tokens]
    return api.Completion(
        text="".join(part.text for part in parts),
        tokens=sum(len(part.token_ids) for part in parts),
        finish_reason=parts[-1].finish_reason,
        version=parts[-1].version_first,
        mean_logprob=sum(nats) / max(1, len(nats)),
    )


REPLAY_SECONDS = 10.0
# A version may have to be loaded first.
VALUES_SECONDS = 120.0

SHOWN_CHARACTERS = 200

trajectories_router = APIRouter(prefix="/v1/jobs", tags=["experience"])

values_router = APIRouter(prefix="/v1/jobs", tags=["values"])

# Continuations have to be generated and judged.
CALIBRATION_SECONDS = 600.0


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which trajectories of a job are wanted; empty fields ask nothing. Outcomes and sources in lower case."""

    prompt_id: str = ""
    source: str = ""
    verdict: str = ""
    policy_version: int | None = None

    def takes(self, trajectory: api.Trajectory) -> bool:
        """Whether verdict and weights fit; the replay buffer looks at prompt and source."""
        outcome = trajectory.verdict.outcome if trajectory.verdict else None
        first, last = trajectory.policy_version_first, trajectory.policy_version_last
        return self.verdict in ("", outcome) and (self.policy_version is None or first <= self.policy_version <= last)


ALL = TrajectoryFilter()


def trajectory_page(
    context: AppContext, job_id: str, wanted: TrajectoryFilter = ALL, *, limit: int = 50, cursor: str = ""
) -> api.TrajectoryPage:
    """A page of a job's trajectories, newest first; the filter may leave fewer than `limit`.

    Raises NotFound, Unreachable.
    """
    context.jobs.state(job_id)
    request = ListTrajectoriesRequest(run_id=job_id, prompt_id=wanted.prompt_id, limit=limit, cursor=cursor)
    if wanted.source:
        request.source = Source.Value(f"SOURCE_{wanted.source.upper()}")
    reply: ListTrajectoriesResponse = context.replay.call("ListTrajectories", request, REPLAY_SECONDS)
    found = (api.Trajectory.model_validate(_trajectory_fields(listed)) for listed in reply.trajectories)
    return api.TrajectoryPage(
        items=[trajectory for trajectory in found if wanted.takes(trajectory)], next_cursor=reply.next_cursor or None
    )


def stored_trajectory(
    context: AppContext, job_id: str, trajectory_id: str, *, steps_from: int = 0, steps_limit: int = 0
) -> GetTrajectoryResponse:
    """One trajectory as the replay buffer has it. Raises NotFound, Unreachable."""
    request = GetTrajectoryRequest(
        run_id=job_id, trajectory_id=trajectory_id, steps_from=steps_from, steps_limit=steps_limit
    )
    reply: GetTrajectoryResponse = context.replay.call("GetTrajectory", request, REPLAY_SECONDS)
    return reply


def trajectory_detail(reply: GetTrajectoryResponse) -> api.TrajectoryDetail:
    """One trajectory with tokens, log-probs and the steps that used it."""
    found = reply.trajectory
    tokens = {
        "prompt_token_ids": list(found.prompt_token_ids),
        "response_token_ids": list(found.response_token_ids),
        "segments": _segments(found),
        "sampling_logprobs": list(found.sampling_logprobs),
        "reference_logprobs": list(found.reference_logprobs),
        "reference_hash": found.reference_hash,
        "anchor_version": found.anchor.policy_version if found.HasField("anchor") else None,
        "steps": list(reply.steps),
        "times_sampled": reply.times_sampled,
        "copies": reply.copies,
    }
    return api.TrajectoryDetail.model_validate({**_trajectory_fields(found), **tokens})


def valued_tokens(context: AppContext, job_id: str, trajectory_id: str, policy_version: int | None) -> api.TokenValues:
    """Q_t and advantage of each token under a weight version of the job (None: the newest). Raises NotFound."""
    context.jobs.state(job_id)
    request = value.GetTokenValuesRequest(run_id=job_id, trajectory_ids=[trajectory_id], policy_version=policy_version)
    reply: value.GetTokenValuesResponse = context.values.call("GetTokenValues", request, VALUES_SECONDS)
    found = reply.trajectories[0]
    return api.TokenValues(
        trajectory_id=found.trajectory_id,
        policy_version=reply.policy_version,
        qhat_0=found.qhat_0,
        tokens=list(found.tokens),
        q=list(found.q),
        advantages=list(found.advantages),
    )


def _trajectory_fields(found: Trajectory) -> dict[str, object]:
    judged = found.HasField("verdict")
    return {
        "trajectory_id": found.trajectory_id,
        "group_id": found.group_id,
        "prompt_id": found.prompt_id,
        "source": wire_name(Source, found.source),
        "response_text": found.response_text,
        "response_tokens": len(found.response_token_ids),
        "policy_version_first": found.policy_version_first,
        "policy_version_last": found.policy_version_last,
        "temperature": round(found.temperature, 4),
        "top_p": round(found.top_p, 4),
        "finish_reason": wire_name(FinishReason, found.finish_reason),
        "created_unix_ms": found.created_unix_ms,
        "reward": found.reward if found.HasField("reward") else None,
        "verdict": _verdict(found) if judged else None,
        "hops": [api.Hop(service=hop.service, at_unix_ms=hop.at_unix_ms) for hop in found.hops],
    }


def _segments(found: Trajectory) -> list[api.ResponseSegment]:
    return [
        api.ResponseSegment(
            kind=wire_name(SegmentKind, turn.segment.kind),
            label=turn.segment.label,
            text=turn.text,
            tokens=turn.segment.tokens,
            score=turn.segment.score if turn.segment.HasField("score") else None,
        )
        for turn in turns(found)
    ]


def _verdict(found: Trajectory) -> api.Verdict:
    verdict = found.verdict
    return api.Verdict(
        outcome=wire_name(Outcome, verdict.outcome),
        tests_passed=verdict.tests_passed,
        tests_total=verdict.tests_total,
        cpu_seconds=verdict.cpu_seconds,
        detail=verdict.detail,
        cached=verdict.cached,
        isolation=verdict.isolation,
        judge_version=verdict.judge_version,
    )


def prompt_document(context: AppContext, job_id: str, prompt_id: str) -> api.PromptView:
    """A prompt's value and its latest trajectories. Raises NotFound (code "prompt_not_found")."""
    spec = context.jobs.spec(job_id)
    tasks = context.library.load(spec.tasks)
    problem = next((known for known in (*tasks.train, *tasks.evaluation) if known.problem_id == prompt_id), None)
    if problem is None:
        raise errors.NotFound(f"job {job_id} has no prompt {prompt_id}", code="prompt_not_found")
    raw = context.redis.hget(redis_keys.run_values(job_id), prompt_id)
    value = PromptValue.FromString(raw) if raw else None
    estimate = qhat_0(value, spec) if value else None
    return api.PromptView(
        prompt_id=prompt_id,
        text=problem.statement,
        samples=value.samples if value else None,
        successes=value.successes if value else None,
        qhat_0=estimate.q if estimate else None,
        qhat_0_low=estimate.low if estimate else None,
        qhat_0_high=estimate.high if estimate else None,
        trajectories=trajectory_page(context, job_id, TrajectoryFilter(prompt_id)).items,
    )


def prompt_page(context: AppContext, job_id: str, start: int, limit: int) -> api.PromptPage:
    """Training prompts from place `start` on, in their order, with how pi0 did."""
    spec = context.jobs.spec(job_id)
    train = context.library.load(spec.tasks).train
    shown = train[start : start + limit]
    ids = [problem.problem_id for problem in shown]
    stored = context.redis.hmget(redis_keys.run_values(job_id), ids) if ids else []
    items = [_success(problem, raw, spec.tasks.reward) for problem, raw in zip(shown, stored, strict=True)]
    return api.PromptPage(items=items, next_cursor=str(start + limit) if start + limit < len(train) else None)


def _success(problem: Problem, raw: bytes | None, reward: RewardSpec) -> api.PromptSuccess:
    value = PromptValue.FromString(raw) if raw else None
    # Where there are only right and wrong, they are not stored one by one.
    known = [reward.best] * (value.successes > 0) + [reward.shift] * (value.successes < value.samples) if value else []
    rewards = list(value.rewards) if value and value.rewards else known
    return api.PromptSuccess(
        prompt_id=problem.problem_id,
        text=problem.statement[:SHOWN_CHARACTERS],
        difficulty=problem.difficulty,
        samples=value.samples if value else None,
        successes=value.successes if value else None,
        lowest_reward=min(rewards, default=None),
        highest_reward=max(rewards, default=None),
        with_solutions=bool(problem.human_solutions),
    )


class TrajectoryQuery(BaseModel):
    prompt_id: str = Field("", pattern=r"^[0-9a-f]{0,128}$")
    source: SourceName | None = None
    verdict: str = Field("", pattern=r"^[a-z_]{0,40}$")
    policy_version: int | None = Field(None, ge=0, le=2**53)
    limit: int = Field(50, ge=1, le=1000)
    cursor: str = Field("", max_length=200)


@trajectories_router.get("/{job_id}/trajectories")
def list_trajectories(
    context: ContextDep, job_id: JobId, query: Annotated[TrajectoryQuery, Query()]
) -> api.TrajectoryPage:
    """Trajectories of a job, by prompt, source, verdict or weights; a page may hold fewer than asked for."""
    wanted = TrajectoryFilter(query.prompt_id, query.source or "", query.verdict, query.policy_version)
    return trajectory_page(context, job_id, wanted, limit=query.limit, cursor=query.cursor)


@trajectories_router.get("/{job_id}/trajectories/{trajectory_id}")
def get_trajectory(
    context: ContextDep,
    job_id: JobId,
    trajectory_id: TrajectoryId,
    steps_from: Annotated[int, Query(ge=0, le=2**32)] = 0,
    steps_limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> api.TrajectoryDetail:
    """One trajectory with its tokens, log-probs, every hop, and the training steps that used it (a page of them)."""
    context.jobs.state(job_id)
    return trajectory_detail(
        stored_trajectory(context, job_id, trajectory_id, steps_from=steps_from, steps_limit=steps_limit)
    )


@trajectories_router.get("/{job_id}/batches/{step}")
def get_batch(context: ContextDep, job_id: JobId, step: Annotated[int, FastapiPath(ge=0, lt=2**32)]) -> api.BatchView:
    """The trajectories that a training step got."""
    context.jobs.state(job_id)
    request = GetBatchRequest(run_id=job_id, step=step)
    reply: GetBatchResponse = context.replay.call("GetBatch", request, REPLAY_SECONDS)
    return api.BatchView(step=step, trajectory_ids=list(reply.trajectory_ids))


@trajectories_router.get("/{job_id}/prompts")
def list_prompts(
    context: ContextDep,
    job_id: JobId,
    limit: Limit = 100,
    cursor: Annotated[str, Query(pattern=r"^[0-9]{0,9}$")] = "",
) -> api.PromptPage:
    """The training prompts of a job in their order, with how pi0 did on each."""
    return prompt_page(context, job_id, int(cursor or 0), limit)


@trajectories_router.get("/{job_id}/prompts/{prompt_id}")
def get_prompt(context: ContextDep, job_id: JobId, prompt_id: PromptId) -> api.PromptView:
    """A prompt, its Qhat_0 and its latest trajectories side by side."""
    return prompt_document(context, job_id, prompt_id)


class CalibrationQuery(BaseModel):
    policy_version: int | None = Field(None, ge=0, le=2**53, description="Weight version; default: the newest, 0: pi0.")
    trajectories: int = Field(256, ge=1, le=2000)
    positions: int = Field(4, ge=1, le=64)
    continuations: int = Field(
        0, ge=0, le=64, description="Fresh continuations of pi0 per prefix; 0: its stored samples."
    )
    bins: int = Field(10, ge=1, le=100)


@values_router.get("/{job_id}/trajectories/{trajectory_id}/values")
@lasting
def token_values(
    context: ContextDep, job_id: JobId, trajectory_id: TrajectoryId, policy_version: PolicyVersion = None
) -> api.TokenValues:
    """Q_t and advantage of each token of one trajectory, under a weight version of its job."""
    return valued_tokens(context, job_id, trajectory_id, policy_version)


@values_router.get("/{job_id}/calibration")
@lasting
def calibration(context: ContextDep, job_id: JobId, query: Annotated[CalibrationQuery, Query()]) -> api.Calibration:
    """Q_t's predicted success of pi0 against what pi0 did, by bin."""
    spec = context.jobs.spec(job_id)
    train = context.library.load(spec.tasks).train if query.continuations else ()
    stride = max(1, len(train) // query.trajectories)
    request = value.GetCalibrationRequest(
        run_id=job_id,
        policy_version=query.policy_version,
        trajectories=query.trajectories,
        positions=query.positions,
        continuations=query.continuations,
        bins=query.bins,
        prompts=[prompt_of(problem, spec) for problem in train[::stride][: query.trajectories]],
    )
    reply: value.GetCalibrationResponse = context.values.call("GetCalibration", request, CALIBRATION_SECONDS)
    return api.Calibration(
        policy_version=reply.policy_version,
        bins=[
            api.CalibrationBin(
                predicted=bucket.predicted,
                observed=bucket.observed,
                outcomes=bucket.outcomes,
                low=bucket.low,
                high=bucket.high,
            )
            for bucket in reply.bins
        ],
        expected_calibration_error=reply.expected_calibration_error,
        brier_score=reply.brier_score,
        brier_score_of_qhat_0=reply.brier_score_of_qhat_0,
        prefixes=reply.prefixes,
    )
