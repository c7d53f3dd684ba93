"""JobSpec: the science of a job, as a person writes it in YAML or JSON.

Where a process lives (addresses, ports, folders) is not here but in `spo.service.settings`. A spec that is
submitted is checked by `parse_job_spec`: unknown fields are refused, and every impossible combination is reported with
the JSON pointer of its field. A spec that is stored is read by `spec_from_json`, which only reads.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from spo.algorithm.sources import SourceName
from spo.errors import InvalidInput
from spo.spec.algorithm import PAPER_BETA, AlgorithmSpec, CriticSpec
from spo.spec.experience import OfflineSpec, ReplaySpec, RolloutSpec, SourceMix, StoredExperience
from spo.spec.lora import LoraSpec
from spo.spec.rules import violations
from spo.spec.section import Section
from spo.spec.stored import STORED, read_stored
from spo.spec.tasks import ModelSpec, RewardSpec, TasksSpec
from spo.spec.training import CollapseGuardSpec, EvaluationSpec, TrainerSpec
from spo.spec.value import PivotalSpec, SequentialSpec, ValueSpec
from spo.spec.violations import impossible, violations_of

__all__ = [
    "PAPER_BETA",
    "AlgorithmSpec",
    "CollapseGuardSpec",
    "CriticSpec",
    "EvaluationSpec",
    "JobSpec",
    "LoraSpec",
    "ModelSpec",
    "OfflineSpec",
    "PivotalSpec",
    "ReplaySpec",
    "RewardSpec",
    "RolloutSpec",
    "SequentialSpec",
    "SourceMix",
    "SourceName",
    "StoredExperience",
    "TasksSpec",
    "TrainerSpec",
    "ValueSpec",
    "parse_job_spec",
    "spec_from_json",
    "spec_to_json",
]


class JobSpec(Section):
    """Everything that defines a run; equal specs and seeds ask for the same experiment."""

    name: str = Field(default="job", min_length=1, max_length=200)
    labels: dict[Annotated[str, Field(min_length=1, max_length=200)], Annotated[str, Field(max_length=500)]] = Field(
        default_factory=dict, max_length=64
    )
    priority: int = Field(
        default=1,
        ge=1,
        le=100,
        description="Place in the queue, and share of the inference replicas beside other jobs.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    model: ModelSpec
    tasks: TasksSpec = TasksSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    value: ValueSpec | None = ValueSpec()
    rollout: RolloutSpec = RolloutSpec()
    offline: OfflineSpec = OfflineSpec()
    replay: ReplaySpec = ReplaySpec()
    trainer: TrainerSpec = TrainerSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    collapse_guard: CollapseGuardSpec = CollapseGuardSpec()

    @property
    def model_paths(self) -> dict[str, str]:
        """Folders of models that the job reads, by the pointers that name them."""
        return {"/model/path": self.model.path} | self.algorithm.model_paths

    @property
    def reads_values(self) -> bool:
        """Whether training reads Qhat_0 or the success rates of pi0: as targets, priorities, or to leave prompts out.

        Of a job that reads none, such as one of group_centred_squared alone, estimates are offline data only.
        """
        return self._values_choose or any(self.reads_values_of(part.source) for part in self.replay.mix)

    @property
    def counts_outcomes(self) -> bool:
        """Whether it is counted, prompt by prompt, how often rollouts were right: for memory, and prompts by need."""
        return self.replay.remembers or self.rollout.unsolved_share > 0

    def reads_values_of(self, source: SourceName) -> bool:
        """Whether a source's trajectories are only of use once their prompt has a value.

        What is merely imitated is not: it may be learned from while the values are still estimated.
        """
        if self.value is None:
            return False
        terms = (term for term in self.algorithm.losses if term.sources is None or source in term.sources)
        return self._values_choose or any(term.needs("value") for term in terms)

    @property
    def _values_choose(self) -> bool:
        """Whether values decide which trajectories are drawn."""
        if self.value is None:
            return False
        weighs = any(part.sampler == "prioritised" or part.min_value_spread for part in self.replay.mix)
        return weighs or self.value.unsolved == "drop"

    @model_validator(mode="after")
    def combination_is_possible(self, info: ValidationInfo) -> Self:
        found = [] if info.context == STORED else violations(self)
        if found:
            raise impossible(*found)
        return self


def parse_job_spec(document: Any) -> JobSpec:
    """Check a decoded JSON/YAML document and return the spec with every default filled in.

    Raises InvalidInput (code "invalid_job_spec") with one JSON pointer per fault.
    """
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise InvalidInput(
            "the job spec is not valid", code="invalid_job_spec", violations=violations_of(error)
        ) from None


def spec_to_json(spec: JobSpec) -> str:
    """Canonical JSON of a spec: sorted keys, no spaces; what is stored in Redis and leased to the trainer."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def spec_from_json(text: str | bytes) -> JobSpec:
    """The inverse of spec_to_json, lenient with what another release stored.

    Raises NotReady (code "unreadable_document").
    """
    return read_stored(JobSpec, json.loads(text), "a job's spec")
