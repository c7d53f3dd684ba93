"""JobSpec: the science of a job, as a person writes it in YAML or JSON.

Where a process lives (addresses, ports, folders) is not here but in `spo.settings`. Unknown fields are refused, specs
are frozen, and every impossible combination is reported with the JSON pointer of its field by `parse_job_spec`.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spo.errors import InvalidInput
from spo.spec_violations import impossible, violations_of

SourceName = Literal["online", "reference", "human", "other_run", "annotated"]
Objective = Literal[
    "terminal_squared",
    "terminal_cross_entropy",
    "reverse_q_squared",
    "reverse_q_cross_entropy",
    "advantage_sigmoid",
    "monte_carlo_squared",
    "monte_carlo_cross_entropy",
    "group_centred_squared",
]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(gt=0, le=5)]

PAPER_BETA = 1 / math.log(100_000)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=False)


class ModelSpec(Section):
    """The reference policy pi0: a local folder with safetensors weights and a tokenizer."""

    path: str = Field(min_length=1, description="Folder of the model; safetensors only, no custom code.")
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_prompt_tokens: int = Field(default=64, ge=1, le=1_000_000)
    max_response_tokens: int = Field(default=44, ge=1, le=1_000_000)


class TasksSpec(Section):
    """Which problems are trained on and which are held out."""

    kind: Literal["toy", "code_contests", "taco", "jsonl"] = "toy"
    path: str | None = Field(default=None, description="Local JSONL or Parquet file or folder of training problems.")
    evaluation_path: str | None = Field(default=None, description="Held-out problems; default: split off `path`.")
    evaluation_kind: Literal["code_contests", "taco", "jsonl"] | None = Field(
        default=None, description="Format of `evaluation_path`; default: the same as `kind`."
    )
    difficulties: tuple[str, ...] = Field(
        default=(), max_length=64, description="Published difficulty levels to train on; default: all."
    )
    near_duplicate_similarity: float = Field(
        default=0.8,
        ge=0.3,
        le=1,
        description="Training problems whose statement is this similar to one in `evaluation_path` are left out.",
    )
    train_problems: int = Field(default=160, ge=1, le=10_000_000)
    evaluation_problems: int = Field(default=80, ge=0, le=1_000_000)
    difficulty: Literal["standard", "hard"] = "standard"
    seed: int = Field(default=0, ge=0, le=2**63 - 1)

    @model_validator(mode="after")
    def files_are_named(self) -> Self:
        if self.kind != "toy" and not self.path:
            raise impossible(("path", f"tasks of kind {self.kind} need the path of a local file"))
        if self.kind == "toy" and self.difficulties:
            raise impossible(("difficulties", "the toy contest is not filtered by difficulty"))
        if self.evaluation_kind and not self.evaluation_path:
            raise impossible(("evaluation_kind", "there is no evaluation_path that it would describe"))
        return self


class LossTerm(Section):
    """One objective on some sources; the loss is the coefficient-weighted sum of the terms."""

    objective: Objective = "terminal_squared"
    coefficient: float = Field(default=1.0, gt=0, le=1e6)
    sources: tuple[SourceName, ...] | None = Field(default=None, description="Sources it applies to; default: all.")
    epsilon: float = Field(default=1e-3, gt=0, lt=10, description="Clip of the cross-entropy forms, log-prob units.")
    sigmoid_scale: float = Field(default=1.0, gt=0, le=1e6, description="Scale inside the sigmoid, log-prob units.")


class AlgorithmSpec(Section):
    """The objective: temperature beta in reward units, and the loss terms."""

    beta: float = Field(default=PAPER_BETA, gt=0, le=100, description="KL temperature, reward units.")
    losses: tuple[LossTerm, ...] = Field(default=(LossTerm(),), min_length=1, max_length=16)


class ValueSpec(Section):
    """How Qhat_0 is found for each training prompt (paper 3.1.3: 800 samples of pi0)."""

    samples: int = Field(default=128, ge=1, le=100_000, description="Samples of pi0 per prompt that count.")
    temperature: Temperature = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    extra_samples: int = Field(default=0, ge=0, le=100_000, description="Further samples, offline data only.")
    extra_temperature: tuple[Temperature, Temperature] = (0.1, 0.8)
    extra_top_p: float = Field(default=0.95, gt=0, le=1)
    unsolved: Literal["keep", "floor", "drop"] = Field(
        default="keep", description="Prompts with no success: keep at the estimate, floor at -1, or drop from training."
    )


class RolloutSpec(Section):
    """How online trajectories are sampled; temperatures are drawn per sample from U(a, b)."""

    samples_per_prompt: int = Field(default=4, ge=1, le=4096)
    temperature: Temperature | tuple[Temperature, Temperature] = (0.1, 0.8)
    top_p: float = Field(default=0.95, gt=0, le=1)

    @property
    def temperature_range(self) -> tuple[float, float]:
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature, self.temperature)

    @model_validator(mode="after")
    def range_is_ordered(self) -> Self:
        if self.temperature_range[0] > self.temperature_range[1]:
            raise impossible(("temperature", "the range must be [low, high]"))
        return self


class SourceMix(Section):
    """One source's share of each batch."""

    source: SourceName
    share: Share
    correct_only: bool = Field(default=False, description="Serve only trajectories with the best reward.")


class ReplaySpec(Section):
    """What the buffer keeps and serves; the limiter is in Reverb's terms."""

    mix: tuple[SourceMix, ...] = (
        SourceMix(source="online", share=0.5),
        SourceMix(source="reference", share=0.25, correct_only=True),
        SourceMix(source="human", share=0.25),
    )
    online_capacity: int = Field(default=2048, ge=1, description="Newest online trajectories kept for sampling.")
    offline_per_prompt: int = Field(default=12, ge=1, description="Kept per prompt and offline source.")
    min_online: int = Field(default=64, ge=0, description="Online trajectories needed before the first batch.")
    samples_per_insert: float = Field(default=2.0, gt=0, le=1e6, description="Times an online trajectory is served.")
    error_buffer: int = Field(default=256, ge=1, description="Slack of the limiter, online samples.")
    max_staleness: int = Field(default=50, ge=0, description="Oldest policy version served, in versions behind.")

    @property
    def online_share(self) -> float:
        return sum(part.share for part in self.mix if part.source == "online")

    @model_validator(mode="after")
    def shares_sum_to_one(self) -> Self:
        if not self.mix:
            raise impossible(("mix", "the mix must name at least one source"))
        if abs(sum(part.share for part in self.mix) - 1) > 1e-6:
            raise impossible(("mix", "the shares must sum to 1"))
        if len({part.source for part in self.mix}) < len(self.mix):
            raise impossible(("mix", "each source may appear once"))
        return self


class OfflineSpec(Section):
    """Experience from before the run."""

    human_solutions: bool = Field(default=True, description="Import the tasks' human solutions as trajectories.")
    human_solutions_per_problem: int = Field(default=3, ge=1, le=1000)
    keep_reference_samples: bool = Field(default=True, description="Samples that estimated Qhat_0 become offline data.")


class TrainerSpec(Section):
    """Optimiser, batch and schedule of the trainer."""

    steps: int = Field(default=100, ge=1, le=100_000_000)
    batch_size: int = Field(default=64, ge=1, le=1_000_000, description="Trajectories per step, all ranks together.")
    micro_batch_size: int = Field(default=64, ge=1, le=1_000_000, description="Trajectories per forward, one rank.")
    learning_rate: float = Field(default=4e-4, gt=0, le=1)
    adam_betas: tuple[Share, Share] = (0.9, 0.98)
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    warmup_steps: int = Field(default=10, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    zero_stage: Literal[0, 1, 2, 3] = 1
    update_interval: int = Field(default=10, ge=1, description="Steps between weight pushes to inference.")
    checkpoint_interval: int = Field(default=50, ge=1, description="Steps between checkpoints.")
    reference: Literal["cached", "in_trainer"] = "cached"


class EvaluationSpec(Section):
    """pass@k on held-out problems (the paper: 20 samples, temperature 0.4, top-p 0.95)."""

    interval_steps: int = Field(default=20, ge=1)
    samples: int = Field(default=20, ge=1, le=10_000)
    temperature: Temperature = 0.4
    top_p: float = Field(default=0.95, gt=0, le=1)
    ks: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 10), min_length=1)

    @model_validator(mode="after")
    def enough_samples(self) -> Self:
        if max(self.ks) > self.samples:
            raise impossible(("ks", f"pass@{max(self.ks)} needs at least {max(self.ks)} samples, not {self.samples}"))
        return self


class JobSpec(Section):
    """Everything that defines a run; equal specs and seeds ask for the same experiment."""

    name: str = Field(default="job", min_length=1, max_length=200)
    labels: dict[str, Annotated[str, Field(max_length=500)]] = Field(default_factory=dict, max_length=64)
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

    @model_validator(mode="after")
    def combination_is_possible(self) -> Self:
        violations = [*self._value_violations(), *self._source_violations()]
        if self.trainer.checkpoint_interval % self.trainer.update_interval:
            violations.append(("trainer/checkpoint_interval", "must be a multiple of update_interval"))
        if violations:
            raise impossible(*violations)
        return self

    def _value_violations(self) -> list[tuple[str, str]]:
        objectives = {term.objective for term in self.algorithm.losses}
        violations = []
        if self.value is None:
            violations.append(("value", "the objectives need Qhat_0, which `value` estimates"))
        if "group_centred_squared" in objectives:
            # Served by trajectory, a prompt's samples rarely meet in a batch, and a sample alone teaches nothing.
            violations.append(
                (
                    "algorithm/losses",
                    "group_centred_squared needs whole groups in a batch, which replay cannot serve yet",
                )
            )
        return violations

    def _source_violations(self) -> list[tuple[str, str]]:
        shares = {part.source: part.share for part in self.replay.mix}
        violations = []
        if shares.get("reference", 0) > 0 and not (self.value and self.offline.keep_reference_samples):
            violations.append(("replay/mix", "a share of reference samples needs `value` and keep_reference_samples"))
        if shares.get("human", 0) > 0 and not self.offline.human_solutions:
            violations.append(("replay/mix", "a share of human solutions needs offline.human_solutions"))
        annotated = any(term.objective.startswith("monte_carlo") for term in self.algorithm.losses)
        if annotated and not shares.get("annotated", 0) > 0:
            violations.append(("algorithm/losses", "Monte-Carlo objectives need a share of annotated trajectories"))
        for source in ("other_run", "annotated"):
            if shares.get(source, 0) > 0:
                violations.append(("replay/mix", f"no offline data of source {source} can be had yet"))
        return violations


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
    """The inverse of spec_to_json. Raises InvalidInput."""
    return parse_job_spec(json.loads(text))
