"""New jobs from the weights or the checkpoint of another: everything they need is theirs before they are submitted. And
which job may follow another, to train on its rollouts.

From a version: training starts at step 0 with its weights; pi0 stays the parent's, or with as_reference the weights
become pi0 and are estimated anew. From a checkpoint: training goes on at its step, with the optimiser's state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.checks import SpecCheck
from services.orchestrator.commit import NotLeading, Write, now_ms, timestamp
from services.orchestrator.job_records import ForkLineage, NewJob, new_job_id, submitted_before, write_fields
from services.orchestrator.jobs import JobStore
from services.orchestrator.leases import CheckpointRecord, JobFiles, kept_checkpoints, record_writes
from services.orchestrator.values import reference_in_force
from services.orchestrator.versions import published_versions
from spo import errors, redis_keys
from spo.messaging.streams.entries import append_words
from spo.model.folder import inspect_model_folder
from spo.observability import get_logger
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.section import TERMINAL
from spo.spec.tasks import TasksSpec
from spo.v1.weights_pb2 import WeightAnnouncement
from spo.weights.model_folders import link_model, model_of_version
from spo.weights.store import StoredVersion, digest_of

log = get_logger("forks")

FIRST_VERSION = 1
OLD_MARK = re.compile(r"(?<=.) fork [0-9a-z]{4}$")
MAX_NAME = 200


@dataclass(frozen=True)
class ForkOptions:
    """Where to start, and what of the parent's spec to change (RFC 7386: null removes)."""

    version: int | None
    checkpoint_step: int | None
    as_reference: bool
    overrides: dict[str, Any]


class Forks:
    """Makes forks. A crash on the way leaves an id in a set that the next process cleans up after."""

    def __init__(
        self,
        jobs: JobStore,
        spec_check: SpecCheck,
        files: JobFiles,
    ) -> None:
        self.jobs = jobs
        self.spec_check = spec_check
        self.files = files

    def fork(
        self,
        parent: str,
        requested: ForkOptions,
        check: Callable[[JobSpec], None],
        idempotency_key: str | None,
        actor: str,
        tenant: str,
    ) -> str:
        """Submit the new job and return its id. check: further demands on its spec.

        Raises NotFound, InvalidInput by field, PreconditionFailed when what it would start from is damaged,
        ResourceExhausted where there is no room for it.
        """
        made = self.made_before(parent, requested, idempotency_key, tenant)
        if made:
            return made
        lineage = self._lineage(parent, requested)
        job_id = new_job_id()
        self.jobs.write(("SADD", own_keys.forks_under_way(), job_id))
        done = ""
        try:
            spec = self._spec(job_id, lineage, requested.overrides)
            check(spec)
            self.spec_check.require_possible(spec)
            with errors.storage_faults_named(self.files.state_path):
                writes = [*self._start(job_id, lineage), ("SREM", own_keys.forks_under_way(), job_id)]
            writes.append(write_fields(job_id, lineage=lineage))
            new_job = NewJob(job_id, _request_digest(parent, requested), writes)
            done = self.jobs.submit(spec, idempotency_key, actor, tenant, new_job)
        except (errors.IntegrityError, errors.NotFound) as error:
            if lineage.checkpoint_step is not None:
                # A running trainer may have removed it meanwhile.
                self._check_kept(parent, lineage.checkpoint_step)
            message = f"what the fork would start from is damaged or no longer kept: {error.message}"
            raise errors.PreconditionFailed(message, code="fork_start_lost") from None
        except NotLeading:
            # Refused for certain; the next leader may have removed the folders before the last of them was made.
            self._remove_folders(job_id)
            raise
        finally:
            if done != job_id:
                self._discard(job_id)
        self.jobs.append(parent, "forked", {"job": done} | asdict(lineage))
        log.info("job forked", job=done, parent=parent)
        return done

    def made_before(self, parent: str, requested: ForkOptions, idempotency_key: str | None, tenant: str) -> str | None:
        """The fork that this request has made already. Raises InvalidInput (code "idempotency_mismatch")."""
        return submitted_before(self.jobs.client, idempotency_key, _request_digest(parent, requested), tenant)

    def _lineage(self, parent: str, requested: ForkOptions) -> ForkLineage:
        versions = {int(published["version"]): published for published in published_versions(self.jobs, parent)}
        version, step = requested.version, requested.checkpoint_step
        if requested.as_reference and not (self.files.shared or self.files.models.in_bucket):
            # The model would lie in the state folder, which trainers and replicas do not see.
            message = "this platform's services share neither a folder nor a bucket (SPO_STATE_STORE_URL) for its model"
            raise _refusal("/as_reference", message)
        if version is not None and step is not None:
            raise _refusal("/checkpoint_step", "name a version or a checkpoint, not both")
        if step is not None:
            self._check_kept(parent, step)
        if step is None:
            version = max(versions, default=0) if version is None else version
            if version not in versions:
                known = ", ".join(map(str, versions)) or "none"
                raise _refusal("/version", f"{parent} has published these versions: {known}")
        elif requested.as_reference:
            # Only published weights can become a model folder.
            version, step = next((v for v, published in versions.items() if int(published["step"]) == step), None), None
            if version is None:
                raise _refusal("/checkpoint_step", "no weights were published at this step, which the reference needs")
        if not requested.as_reference and reference_in_force(self.jobs, parent):
            message = f"the reference of {parent} is a later one, version {reference_in_force(self.jobs, parent)}"
            raise _refusal("/as_reference", f"{message}; a fork with as_reference has its own")
        return ForkLineage(parent, version, step, requested.as_reference, timestamp())

    def _spec(self, job_id: str, lineage: ForkLineage, overrides: dict[str, Any]) -> JobSpec:
        parent = self.jobs.spec(lineage.parent)
        document = parent.model_dump(mode="json") | {"name": _name_of_fork(parent.name, job_id)}
        merged = merge_patch(document, overrides)
        if not isinstance(merged.get("model"), dict) or merged["model"].get("path") != parent.model.path:
            raise _refusal("/overrides/model/path", "a fork keeps its parent's model; as_reference changes what it is")
        try:
            spec = parse_job_spec(merged)
        except errors.InvalidInput as error:
            found = tuple(
                errors.FieldViolation(f"/overrides{fault.pointer}", fault.message) for fault in error.violations
            )
            raise errors.InvalidInput(error.message, code="invalid_job_spec", violations=found) from None
        if spec.model.lora != parent.model.lora and not lineage.as_reference:
            # What it would start from holds the tensors of the parent's adapter, or whole weights.
            raise _refusal("/overrides/model/lora", "a fork trains what its parent trains; one as_reference may change")
        with errors.storage_faults_named(self.files.state_path):
            path = self._model(job_id, Path(parent.model.path), lineage)
        return spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(path)})})

    def _model(self, job_id: str, model: Path, lineage: ForkLineage) -> Path:
        """The folder of the new job's pi0; one that a fork made is copied, since it goes with that fork."""
        models = self.files.models
        model = models.expected(model)
        if not lineage.as_reference and not model.is_relative_to(models.root):
            return model
        folder = models.root / job_id
        if lineage.as_reference:
            assert lineage.version is not None
            model_of_version(model, self._published(lineage.parent, lineage.version), folder)
        else:
            link_model(model, folder)
        models.store(job_id)
        return folder

    def _start(self, job_id: str, lineage: ForkLineage) -> list[Write]:
        """Give the job what it starts from; returns what there is to write of it."""
        if lineage.as_reference:
            return []
        if lineage.checkpoint_step is None:
            assert lineage.version is not None
            writes = self._adopt_version(job_id, lineage.parent, lineage.version, step=0)
            return [*writes, write_fields(job_id, start_version=FIRST_VERSION)]
        return self._adopt_checkpoint(job_id, lineage.parent, lineage.checkpoint_step)

    def _adopt_checkpoint(self, job_id: str, parent: str, step: int) -> list[Write]:
        reported = self._check_kept(parent, step)
        source = self.files.checkpoints.manifest(parent, step)
        if digest_of(source) != reported.manifest_digest:
            raise errors.IntegrityError(f"the checkpoint of step {step} is not the one that its trainer reported")
        version = int(source.get("weight_version", 0))
        head = {name: value for name, value in source.items() if name != "files"}
        head |= {"epoch": 0, "weight_version": FIRST_VERSION if version else 0}
        sealed = self.files.checkpoints.copy(parent, step, job_id, head)
        record = CheckpointRecord(
            step=step,
            path=self.files.checkpoints.uri(job_id, step),
            manifest_digest=sealed.manifest_digest,
            weight_version=head["weight_version"],
        )
        writes = record_writes(job_id, [], [record], record)
        return writes + (self._adopt_version(job_id, parent, version, int(head["weight_step"])) if version else [])

    def _check_kept(self, parent: str, step: int) -> CheckpointRecord:
        """The record of a checkpoint. Raises InvalidInput (code "checkpoint_not_kept")."""
        kept = {record.step: record for record in kept_checkpoints(self.jobs.client, self.files, parent)}
        if step not in kept:
            there = ", ".join(map(str, sorted(kept))) or "none"
            message = f"{parent} keeps no checkpoint of step {step}; those that it keeps: {there}"
            fault = errors.FieldViolation("/checkpoint_step", message)
            raise errors.InvalidInput("this fork cannot be made", code="checkpoint_not_kept", violations=(fault,))
        return kept[step]

    def _published(self, parent: str, version: int) -> StoredVersion:
        """The stored version that was published. Raises NotFound, IntegrityError when it is damaged or another's."""
        digests = {int(found["version"]): found["manifest_digest"] for found in published_versions(self.jobs, parent)}
        stored = self.files.weights.open(parent, version)
        if digests.get(version, stored.manifest_digest) != stored.manifest_digest:
            raise errors.IntegrityError(f"version {version} of {parent} is not the one that was published")
        return stored

    def _adopt_version(self, job_id: str, parent: str, version: int, step: int) -> list[Write]:
        """The parent's version becomes the job's first, announced as if the job had published it."""
        stored = self.files.weights.adopt(job_id, FIRST_VERSION, self._published(parent, version), parent=0, step=step)
        told: dict[str, Any] = {
            "version": FIRST_VERSION,
            "step": step,
            "uri": stored.uri,
            "manifest_digest": stored.manifest_digest,
        }
        announcement = WeightAnnouncement(run_id=job_id, announced_unix_ms=now_ms(), **told)
        published = told | {"size_bytes": stored.size_bytes, "published_at": timestamp()}
        return [
            ("HSET", own_keys.job_weights(job_id), FIRST_VERSION, json.dumps(published)),
            append_words(redis_keys.weights(job_id), announcement.SerializeToString()),
        ]

    def _discard(self, job_id: str) -> None:
        """Remove what a fork that came to nothing had made; without an answer of Redis the next process does it."""
        # The commit that makes the job takes its id out: it may have happened although its answer was lost.
        if not self.jobs.client.sismember(own_keys.forks_under_way(), job_id):
            return
        try:
            self._remove_folders(job_id)
        except (OSError, errors.SpoError):
            # Then it is removed as deleted jobs are: again and again, and loudly.
            self.jobs.write(("SMOVE", own_keys.forks_under_way(), own_keys.deleted_jobs(), job_id))
        else:
            self.jobs.write(("SREM", own_keys.forks_under_way(), job_id))

    def _remove_folders(self, job_id: str) -> None:
        self.files.weights.remove_run(job_id)
        self.files.checkpoints.remove_run(job_id)
        self.files.models.remove(job_id)


def _request_digest(parent: str, requested: ForkOptions) -> str:
    return redis_keys.digest(parent, json.dumps(asdict(requested), sort_keys=True))


def _name_of_fork(parent: str, job_id: str) -> str:
    """The parent's name with the end of the fork's id, so that lists tell them apart; a fork's fork replaces it."""
    mark = f" fork {job_id[-4:].lower()}"
    return OLD_MARK.sub("", parent)[: MAX_NAME - len(mark)] + mark


def merge_patch(document: Any, patch: Any) -> Any:
    """RFC 7386: members of the patch replace the document's, objects are merged, null removes.

    One rule beyond it: an object of another `kind` replaces the one before, whose members it does not have.
    """
    if not isinstance(patch, dict):
        return patch
    merged = dict(document) if isinstance(document, dict) else {}
    if "kind" in patch and merged.get("kind", patch["kind"]) != patch["kind"]:
        merged = {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def _refusal(pointer: str, message: str) -> errors.InvalidInput:
    return errors.InvalidInput(
        "this fork cannot be made", code="invalid_fork", violations=(errors.FieldViolation(pointer, message),)
    )


def require_followable(jobs: JobStore, spec: JobSpec, tenant: str) -> None:
    """Refuse a spec that follows a job it cannot share rollouts with.

    Raises InvalidInput (code "cannot_follow") with the pointer of each reason.
    """
    followed = spec.rollout.follow
    if followed is None:
        return
    found = tuple(
        errors.FieldViolation(pointer, message) for pointer, message in _reasons(jobs, spec, followed, tenant)
    )
    if found:
        raise errors.InvalidInput(f"the job cannot follow {followed}", code="cannot_follow", violations=found)


def _reasons(jobs: JobStore, spec: JobSpec, followed: str, tenant: str) -> Iterator[tuple[str, str]]:
    at = "/rollout/follow"
    try:
        state, theirs, owner = jobs.state(followed), jobs.spec(followed), jobs.tenant(followed)
    except errors.NotFound:
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
