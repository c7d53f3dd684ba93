"""Which job another may follow, to read its rollouts: one under way with the same model and the same tasks."""

from __future__ import annotations

from collections.abc import Iterator

from services.orchestrator.jobs.store import JobStore
from spo.errors import FieldViolation, InvalidInput, NotFound
from spo.model.folder import inspect_model_folder
from spo.spec.job_spec import JobSpec, TasksSpec
from spo.spec.job_state import TERMINAL


def require_followable(jobs: JobStore, spec: JobSpec, tenant: str) -> None:
    """Refuse a spec that follows a job it cannot share rollouts with.

    Raises InvalidInput (code "cannot_follow") with the pointer of each reason.
    """
    followed = spec.rollout.follow
    if followed is None:
        return
    found = tuple(FieldViolation(pointer, message) for pointer, message in _reasons(jobs, spec, followed, tenant))
    if found:
        raise InvalidInput(f"the job cannot follow {followed}", code="cannot_follow", violations=found)


def state_in_words(jobs: JobStore, job_id: str) -> str:
    """The state of a job that others may follow, "deleted" for one that is no more."""
    try:
        return jobs.state(job_id).value
    except NotFound:
        return "deleted"


def _reasons(jobs: JobStore, spec: JobSpec, followed: str, tenant: str) -> Iterator[tuple[str, str]]:
    at = "/rollout/follow"
    try:
        state, theirs, owner = jobs.state(followed), jobs.spec(followed), jobs.tenant(followed)
    except NotFound:
        owner = None
    if owner != tenant:
        # Another tenant's job is not there.
        yield at, f"there is no job {followed}"
        return
    if state in TERMINAL:
        yield at, f"{followed} is {state}: only jobs that have not ended are followed; see offline.experience"
    if theirs.replay.online_share == 0:
        yield at, f"{followed} samples no rollouts of its own"
    yield from _differences(spec, theirs, followed)
    yield from _ratios(spec, theirs, followed)


def _differences(spec: JobSpec, theirs: JobSpec, followed: str) -> Iterator[tuple[str, str]]:
    if _model_hash(spec) != _model_hash(theirs):
        yield "/model/path", f"is another model than that of {followed}"
    if spec.model.dtype != theirs.model.dtype:
        yield "/model/dtype", f"is {theirs.model.dtype} in {followed}: its log-probs of pi0 would not hold"
    for name in ("chat", "stop"):
        if getattr(spec.model, name) != getattr(theirs.model, name):
            yield (
                f"/model/{name}",
                f"differs from that of {followed}: its rollouts answer other prompts or end otherwise",
            )
    for name in ("max_prompt_tokens", "max_response_tokens"):
        if getattr(spec.model, name) < getattr(theirs.model, name):
            yield f"/model/{name}", f"is less than in {followed}: its longer rollouts would be left out"
    for name in TasksSpec.model_fields:
        if getattr(spec.tasks, name) != getattr(theirs.tasks, name):
            yield f"/tasks/{name}", f"differs from that of {followed}"


def _ratios(spec: JobSpec, theirs: JobSpec, followed: str) -> Iterator[tuple[str, str]]:
    """As `ratios_begin_at_one` asks of a job's own rollouts."""
    if theirs.rollout.temperature_range == (1.0, 1.0) and theirs.rollout.top_p == 1:
        return
    for index, term in enumerate(spec.algorithm.losses):
        if term.needs("behaviour") and (term.sources is None or "shared" in term.sources):
            yield (
                f"/algorithm/losses/{index}/objective",
                f"{term.objective} weighs by the sampler's log-probs, and {followed} samples at another temperature "
                "than 1 or another top_p",
            )


def _model_hash(spec: JobSpec) -> str:
    return inspect_model_folder(spec.model.path).model_hash
