"""The job of a round: a fork of what is served, whose weights become its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.orchestrator.experience.availability import require_stored
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.forks.fork import ForkOptions, Forks, merge_patch
from services.orchestrator.lifecycle.shared_rollout_rules import require_followable
from services.orchestrator.lifecycle.submission import SpecCheck
from services.orchestrator.serving.continual.definition import ContinualSpec
from services.orchestrator.serving.continual.rounds import ContinualJob, Round
from spo.errors import FieldViolation, InvalidInput, NotReady
from spo.experience.store import ExperienceStore
from spo.spec.job_spec import JobSpec, TasksSpec, parse_job_spec

STORED_SOURCES = ("other_run", "annotated")


@dataclass(frozen=True)
class RoundJobs:
    """Submits it for who made the continual job, within their quota; `require_usable` refuses what is not theirs."""

    jobs: JobStore
    forks: Forks
    spec_check: SpecCheck
    experience: ExperienceStore
    require_usable: Callable[[TasksSpec | None, str | None, Mapping[str, str] | None], None]

    def start(self, job: ContinualJob, begun: Round) -> str:
        """Submit it and return its id; asked for again it returns the same. Raises SpoError."""
        # One that is made anew under the same name has rounds of its own.
        key = f"continual:{job.name}:{job.created_at}:{begun.number}"
        if job.max_active_jobs is not None and self.jobs.active_of(job.tenant) >= job.max_active_jobs:
            raise NotReady(f"the round waits: {job.max_active_jobs} jobs have not ended", code="quota_exceeded")
        if begun.parent_version:
            options = ForkOptions(begun.parent_version, None, as_reference=True, overrides=begun.overrides)
            return self.forks.fork(
                begun.parent_job, options, lambda spec: self._require(spec, job), key, job.actor, job.tenant
            )
        # Version 0 is the model that the parent itself started from.
        spec = self._spec(begun.parent_job, begun.overrides)
        self._require(spec, job)
        self.spec_check.require_possible(spec)
        return self.jobs.submit(spec, key, job.actor, job.tenant)

    def check_overrides(self, parent: str, spec: ContinualSpec) -> None:
        """Raises InvalidInput, with a pointer to each fault, where no round could be made with them."""
        try:
            made = self._spec(parent, spec.round_overrides("name", 1))
        except InvalidInput as error:
            found = tuple(FieldViolation(f"/overrides{fault.pointer}", fault.message) for fault in error.violations)
            raise InvalidInput(error.message, code="invalid_continual_job", violations=found) from None
        if all(part.source not in STORED_SOURCES for part in made.replay.mix):
            message = "no share of a batch is of stored experience (other_run or annotated)"
            fault = FieldViolation("/overrides/replay/mix", message)
            raise InvalidInput("nothing would be learned", code="invalid_continual_job", violations=(fault,))

    def _require(self, spec: JobSpec, job: ContinualJob) -> None:
        self.require_usable(spec.tasks, None if job.admin else job.tenant, spec.algorithm.model_paths)
        require_stored(self.jobs.client, self.experience, spec, job.tenant)
        require_followable(self.jobs, spec, job.tenant)

    def _spec(self, parent: str, overrides: Mapping[str, object]) -> JobSpec:
        document = self.jobs.spec(parent).model_dump(mode="json")
        return parse_job_spec(merge_patch(document, dict(overrides)))
