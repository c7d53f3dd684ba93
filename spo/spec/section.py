"""What all documents share: sections, violations by JSON pointer, enums as they are spelled, the state of a job, and
documents read from files or storage.

Documents read back from Redis or disk, which a neighbouring release of the platform may have written.
While a platform is upgraded or rolled back, services of two releases share Redis. What a document is checked for when
somebody submits it is not asked again when it is read: fields that this release does not know are left out, and numbers
beyond its bounds stay what they are. What this release cannot carry out, such as an objective that it does not have, is
never guessed: it raises NotReady, so that entries wait for a service that can, and nothing is given up.

Sections of a JobSpec on learning: the algorithm, its values, experience, the trainer, its learning rate, the
guard and evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeVar, cast

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from spo.algorithm.registry import LOSSES, LossTerm, OverlongSpec, SourceName
from spo.errors import FieldViolation, InvalidInput, NotReady

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

    Number = TypeVar("Number", bound=int)


_IMPOSSIBLE = "impossible_combination"

_UNKNOWN = "unknown_"

STORED: Final = "stored"

Model = TypeVar("Model", bound=BaseModel)
Record = TypeVar("Record", bound="DataclassInstance")

# Sampled while the job trains, with the sampler's log-probs: the newest count, and they age in the versions of the run
# that samples them.
LIVE_SOURCES: frozenset[SourceName] = frozenset({"online", "shared"})
# What exists only once a job samples: its rollouts, and what it remembers of them.
SAMPLED_SOURCES: frozenset[SourceName] = LIVE_SOURCES | {"memory"}
Share = Annotated[float, Field(ge=0, le=1)]
# What the sampling engine takes (vLLM's SamplingParams): it refuses what is hotter, and samples at its lowest
# temperature, without saying so, what is cooler.
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0
Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)]
# On the wire it is a single-precision number, and must not become 0 there.
TopP = Annotated[float, Field(ge=1e-6, le=1)]
# Counts and intervals travel as signed 32-bit integers.
MOST_COUNT = 2**31 - 1
# The longest path that Linux takes, and no NUL byte in it.
LocalPath = Annotated[str, Field(min_length=1, max_length=4095, pattern=r"^[^\x00]+$")]

_BOUNDS = frozenset(
    {
        *("less_than", "less_than_equal", "greater_than", "greater_than_equal"),
        *("string_too_short", "string_too_long", "string_pattern_mismatch"),
    }
)
# A number or a range: what is wrong with a range as a number is none of its faults.
_OTHER_BRANCH = frozenset({"float_type", "tuple_type"})


def impossible(*violations: tuple[str, str]) -> PydanticCustomError:
    """The error a model validator raises: pairs (pointer below the validated section without its slash, message)."""
    return PydanticCustomError(_IMPOSSIBLE, "{violations}", {"violations": violations})


def violations_of(error: ValidationError) -> tuple[FieldViolation, ...]:
    """Translate pydantic's findings to JSON pointers; messages never repeat the input."""
    found: list[FieldViolation] = []
    for entry in error.errors(include_url=False, include_input=False):
        at = "".join(f"/{_escape(part)}" for part in entry["loc"])
        if entry["type"] == _IMPOSSIBLE:
            found += [FieldViolation(f"{at}/{field}", message) for field, message in entry["ctx"]["violations"]]
        else:
            found.append(FieldViolation(at or "/", entry["msg"]))
    return tuple(found)


def _escape(part: object) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def wire_name(kind: _EnumTypeWrapper[Number], number: Number) -> str:
    """`accepted` for OUTCOME_ACCEPTED; `unknown_17` for a number that this release does not know."""
    known = kind.DESCRIPTOR.values_by_number.get(number)
    if known is None:
        return f"{_UNKNOWN}{number}"
    return known.name.removeprefix(_prefix(kind)).lower()


def wire_number(kind: _EnumTypeWrapper[Number], name: str) -> Number:
    """The inverse of wire_name; 0, which specifies nothing, for a name of a later release."""
    known = kind.DESCRIPTOR.values_by_name.get(f"{_prefix(kind)}{name.upper()}")
    number = name.removeprefix(_UNKNOWN) if known is None else known.number
    return cast("Number", int(number) if str(number).isdecimal() else 0)


def _prefix(kind: _EnumTypeWrapper[Number]) -> str:
    return str(kind.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED"))


"""The validation context of stored documents: checks of those who submit are left out under it."""


def read_stored(model: type[Model], document: object, what: str) -> Model:
    """A stored document as this release understands it; `what` it is, for people.

    Raises NotReady (code "unreadable_document") where it asks for something that this release does not have.
    """
    try:
        return model.model_validate(document, extra="ignore", context=STORED)
    except ValidationError as error:
        faults = "; ".join(f"{fault.pointer}: {fault.message}" for fault in violations_of(error)[:3])
        raise unreadable(f"{what} ({faults[:500]})") from None


def record_of(kind: type[Record], fields: Mapping[str, object]) -> Record:
    """A dataclass of those stored fields that it knows."""
    return kind(**{known.name: fields[known.name] for known in dataclasses.fields(kind) if known.name in fields})


def record_from_json(kind: type[Record], text: str | bytes) -> Record:
    """A dataclass of those fields of a stored JSON object that it knows."""
    return record_of(kind, json.loads(text))


def unreadable(what: str) -> NotReady:
    """The error of a stored document that this release cannot carry out."""
    return NotReady(
        f"this release of the platform cannot read what another one stored, and waits for one that can: {what}",
        code="unreadable_document",
    )


class JobState(StrEnum):
    QUEUED = "queued"
    VALIDATING = "validating"
    ESTIMATING = "estimating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
# Begun and not ended.
ACTIVE = frozenset(JobState) - TERMINAL - {JobState.QUEUED}
# A paused job gives back its slot, its trainer and its replicas; to resume, it waits for a slot again.
HOLDS_SLOT = ACTIVE - {JobState.PAUSED}
# What is computed for such a job may still be used.
WANTED = ACTIVE - {JobState.CANCELLING}
# Training has begun: every training prompt has its value and its offline trajectories, unless the job's record says
# that estimates are pending.
ESTIMATED = frozenset({JobState.RUNNING, JobState.PAUSING, JobState.PAUSED})


def decode_state(stored: bytes | None) -> JobState | None:
    """A state as Redis holds it; None for a job that was never submitted, or is deleted.

    Raises NotReady (code "unreadable_document") for a state of a later release.
    """
    if stored is None:
        return None
    try:
        return JobState(stored.decode())
    except ValueError:
        raise unreadable(f"a job's state {stored.decode()}") from None


class Section(BaseModel):
    """Unknown fields are refused, sections are frozen, numbers are finite; of a stored document see `read_stored`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def stored_values_stay(cls, value: object, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        """A bound that was moved after a document was stored ends no job that runs."""
        try:
            return check(value)
        except ValidationError as error:
            faults = {fault["type"] for fault in error.errors()}
            if info.context != STORED or not faults & _BOUNDS or faults - _BOUNDS - _OTHER_BRANCH:
                raise
            return tuple(value) if isinstance(value, list) else value


def read_spec(path: Path) -> dict[str, Any]:
    """The document of a YAML or JSON file, not validated.

    Raises InvalidInput (code "unreadable_spec") naming the file.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", code="unreadable_spec") from None
    except yaml.YAMLError as error:
        raise InvalidInput(f"{path} is neither YAML nor JSON: {error}", code="unreadable_spec") from None
    if not isinstance(document, dict):
        raise InvalidInput(f"{path} must hold a mapping", code="unreadable_spec")
    return document


PAPER_BETA = 1 / math.log(100_000)
# A prompt that pi0 solves once in 100 samples lies halfway between the rewards. At the paper's beta the squared loss
# collapsed in every seed of decision 0003, at this one in none.
DEFAULT_BETA = 1 / math.log(100)
# Nats of log-ratio that a token is asked for in runs that live, ours and published ones; docs/values.md.
LIVING_NATS_PER_TOKEN = (0.01, 0.14)
# It has the gradient of the squared regression.
SOFT_POLICY_GRADIENT = "policy_gradient.soft_policy_gradient"

# An adapter learns at about ten times the rate of all weights, for which 1e-6 is usual (docs/defaults.md).
LEAST_OF_ADAPTERS = 1e-5


class CriticSpec(Section):
    """The value model of PPO (3.1.4): pi0's body with a scalar head, its own optimiser and engine."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    trace: Share = Field(default=0.95, description="Lambda of generalised advantage estimation.")
    discount: Share = 1.0
    normalise: Literal["deviation", "none"] = Field(
        default="deviation",
        description="Advantages less their mean over the batch, divided by their standard deviation; or as they are.",
    )


class ReferenceRefreshSpec(Section):
    """Move the anchor: a later policy takes pi0's place from time to time (section 6), with Qhat_0 of its own.

    samples: one reference at a time, for every trajectory; each prompt's value is estimated anew, and the trainer
    computes the log-probs. rollouts: each published version is the anchor of the rollouts that it makes (OAPL, arXiv
    2602.19362): the sampler's log-probs are the anchor's, a group's rewards give its Qhat_0, and an old trajectory
    keeps the numbers of its own anchor. Nothing more is sampled or computed.
    """

    interval_steps: int = Field(ge=1, le=MOST_COUNT)
    values: Literal["samples", "rollouts"] = Field(
        default="samples", description="Where Qhat_0 under the new anchor comes from: new samples, or each group's own."
    )
    samples: int = Field(default=16, ge=1, le=100_000, description="values samples: how many per prompt.")


class TeacherSpec(Section):
    """Who teaches terms of distillation: a second model, frozen in the trainer beside what is trained."""

    path: LocalPath = Field(
        description="Folder of the model, safetensors only; its tokenizer must know the tokens of model.path's by the "
        "same ids."
    )


class AlgorithmSpec(Section):
    """The objective: temperature beta in reward units, and the loss terms."""

    beta: float = Field(default=DEFAULT_BETA, gt=0, le=100, description="KL temperature, reward units.")
    beta_per: Literal["sequence", "token"] = Field(
        default="sequence",
        description="token: a response of |y| tokens has the temperature beta / |y|, so that a residual of 0 is a mean "
        "log-ratio of (r - Qhat_0) / beta nats per token whatever the length (QRPO in Apertus, arXiv 2509.14233). "
        "Values have one temperature all the same: value_beta.",
    )
    value_beta: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Temperature of the values alone, Qhat_0 and Qhat_t; default: beta. OAPL and A*-PO take a high one "
        "here, so that values stay near the mean reward, and a low `beta` for the regression (arXiv 2602.19362).",
    )
    value_noise: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Residuals count by n^2 / (n^2 + e^2), where e is the standard error of the prompt's Qhat_0 and n "
        "is this, reward units: beta says that an error of one nat in a response's log-ratio halves the weight. "
        "Default: all count alike.",
    )
    losses: tuple[LossTerm, ...] = Field(default=(LossTerm(),), min_length=1, max_length=16)
    critic: CriticSpec | None = Field(default=None, description="PPO needs one; nothing else has one.")
    teacher: TeacherSpec | None = Field(
        default=None, description="Of terms of distillation; default: the job's reference teaches them."
    )
    reference_refresh: ReferenceRefreshSpec | None = None
    overlong: OverlongSpec | None = Field(default=None, description="What losses make of responses that are too long.")

    @property
    def temperature_of_values(self) -> float:
        """The beta under which success rates become values, reward units."""
        return self.beta if self.value_beta is None else self.value_beta

    @property
    def refreshes_by_samples(self) -> bool:
        """Whether a version takes the place of pi0 for all trajectories once it has values of its own."""
        return self.reference_refresh is not None and self.reference_refresh.values == "samples"

    @property
    def anchors_by_rollouts(self) -> bool:
        """Whether each published version is the anchor of the rollouts that it makes."""
        return self.reference_refresh is not None and self.reference_refresh.values == "rollouts"

    @property
    def regresses_log_ratios(self) -> bool:
        """Whether beta is the temperature of a log-ratio that some term regresses, and no coefficient of a KL."""
        functions = [LOSSES[term.objective].function for term in self.losses]
        return any(name.startswith("objectives.") or name == SOFT_POLICY_GRADIENT for name in functions)

    def nats_per_token(self, tokens: float, span: float) -> float:
        """What a residual of `span` reward units asks each of a response's tokens for, nats of log-ratio."""
        return span / self.beta / (1 if self.beta_per == "token" else tokens)

    @property
    def needs_groups(self) -> bool:
        """Whether a term compares the trajectories of a prompt with each other."""
        return any(term.needs("groups") for term in self.losses)

    @property
    def model_paths(self) -> dict[str, str]:
        """Folders of models beside the one that is trained, by their pointers in a job spec."""
        return {"/algorithm/teacher/path": self.teacher.path} if self.teacher else {}

    @property
    def needs_teacher(self) -> bool:
        """Whether a term imitates a teacher."""
        return any(term.needs("teacher") for term in self.losses)

    @property
    def needs_behaviour(self) -> bool:
        """Whether a term weighs by the sampler's log-probs."""
        return any(term.needs("behaviour") for term in self.losses)


class SequentialSpec(Section):
    """Sample in rounds and stop where the 95 % interval of Qhat_0 is narrow enough; `samples` stays the most.

    Qhat_0 is then a posterior mean: where the data decides when to stop, no frequency is unbiased.
    """

    interval_width: float = Field(default=0.3, gt=0, le=100, description="Target width of the interval, reward units.")
    prior: Literal["prompts", "jeffreys"] = Field(
        default="prompts",
        description="What is expected of a prompt before its samples: what the other prompts and pi0's likelihood of "
        "human solutions tell (empirical Bayes), or nothing.",
    )
    first_samples: int = Field(default=8, ge=1, le=100_000, description="Samples every prompt gets.")
    round_samples: int = Field(default=8, ge=1, le=100_000, description="Samples of each further round.")


class PivotalSpec(Section):
    """Pivotal Token Search (3.1.3): bisect correct trajectories by rollouts of pi0 from their prefixes."""

    rollouts: int = Field(default=8, ge=2, le=10_000, description="Rollouts of pi0 from each visited prefix.")
    threshold: float = Field(default=0.2, gt=0, le=1, description="Change of the success rate that is bisected.")
    trajectories_per_prompt: int = Field(default=2, ge=1, le=10_000)
    positions_per_trajectory: int = Field(default=8, ge=2, le=10_000, description="Most prefixes per trajectory.")
    budget_rollouts: int = Field(default=100_000, ge=1, le=MOST_COUNT, description="Most rollouts of the whole job.")
    when: Literal["before_training", "idle"] = "before_training"
    sources: tuple[Literal["reference", "human"], ...] = Field(
        default=("reference", "human"), min_length=1, max_length=2
    )
    keep_rollouts: bool = Field(
        default=False, description="Keep the rollouts too, as trajectories of source `reference`; rolls all out anew."
    )


class ValueSpec(Section):
    """How Qhat_0 is found for each training prompt (paper 3.1.3: 800 samples of pi0)."""

    samples: int = Field(default=32, ge=1, le=100_000, description="Samples of pi0 per prompt that count.")
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    extra_samples: int = Field(default=0, ge=0, le=100_000, description="Further samples, offline data only.")
    extra_temperature: tuple[Temperature, Temperature] = (0.1, 0.8)
    extra_top_p: TopP = 0.95
    sequential: SequentialSpec | None = Field(default=None, description="Stop early where enough is known.")
    unsolved: Literal["keep", "floor", "drop", "retry_hotter"] = Field(
        default="floor",
        description="Prompts with no success: floor at the paper's formula (-1), keep at the posterior mean, drop from "
        "training, or sample again hotter (offline data only; the value stays that of pi0).",
    )
    retry_temperature: Temperature = Field(default=1.4, description="Temperature of retry_hotter.")
    retry_samples: int = Field(default=64, ge=1, le=100_000)
    pivotal: PivotalSpec | None = Field(default=None, description="Search pivotal tokens in correct trajectories.")
    start: Literal["first_batch", "all"] | None = Field(
        default=None,
        description="Train once as many prompts have a value as a batch holds groups, while the others are estimated "
        "beside it and values are refined; or when all have their final value, so that a repeated job reads the same. "
        "Default: first_batch with `sequential` and a live source, where all prompts soon have a value, else all.",
    )
    start_share: Share = Field(
        default=0.0,
        description="Where training starts early: at least this share of the prompts has a value before training.",
    )

    @model_validator(mode="after")
    def range_is_ordered(self) -> Self:
        if self.extra_temperature[0] > self.extra_temperature[1]:
            raise impossible(("extra_temperature", "the range must be [low, high]"))
        return self


class RolloutSpec(Section):
    """How online trajectories are sampled; temperatures are drawn per sample from U(a, b)."""

    samples_per_prompt: int = Field(default=4, ge=1, le=4096)
    temperature: Temperature | tuple[Temperature, Temperature] = 1.0
    top_p: TopP = 1.0
    unsolved_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of prompts that are chosen among those without a right answer so far; the rest take turns.",
    )
    unsolved: Literal["never", "lately"] = Field(
        default="never",
        description="never: prompts that were tried and never solved. lately: also those whose latest group was wrong.",
    )
    follow: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,200}$",
        description="Id of a job with the same model and tasks: its online rollouts come in too, as source `shared`.",
    )

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
    sampler: Literal["uniform_fifo", "uniform", "prioritised", "per_prompt", "outcome_balanced", "pairs"] = Field(
        default="uniform_fifo",
        description="uniform_fifo: uniform in the window (online_capacity, offline_per_prompt). uniform: over all "
        "there is, nothing leaves. The others draw in the window: by priority, every prompt as often, right as often "
        "as wrong (as far as each lasts), a right and a wrong one of the same prompt (offline). Of memory, prompts "
        "take turns.",
    )
    priority: Literal["advantage", "value_spread"] = Field(
        default="advantage", description="Of prioritised: |reward - Qhat_0|, or sqrt(p(1-p)) of the prompt."
    )
    priority_half_life: float = Field(
        default=5.0, gt=0, le=1e6, description="Versions of age that halve the priority of an online trajectory."
    )
    age_half_life: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Versions of age that halve the chance of a live trajectory, of uniform_fifo and uniform.",
    )
    contrast_only: bool = Field(
        default=False,
        description="Serve only groups whose rewards differ (DAPO's dynamic sampling): online, with unit group.",
    )
    min_value_spread: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Serve only prompts with sqrt(p(1-p)) >= this, p their success rate under pi0.",
    )
    max_age_versions: int | None = Field(
        default=None, ge=0, le=MOST_COUNT, description="Oldest served, in weight versions."
    )


class MemorySpec(Section):
    """What the source `memory` holds: answers of the run to its prompts, found once, to be learned again and again."""

    per_prompt: int = Field(
        default=8, ge=1, le=10_000, description="Distinct answers kept of each prompt, those that were found last."
    )
    min_reward: float | None = Field(
        default=None,
        le=0,
        ge=-1e6,
        description="Instead of right answers alone: the best so far of each prompt, from this reward on.",
    )
    also: tuple[Literal["reference", "human", "other_run"], ...] = Field(
        default=(), max_length=3, description="Offline sources of the job whose answers count as found, too."
    )
    contrast: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Most answers that join each fresh group without a right one, as members of it and in the places "
        "of memory's share, at most half of them: what failed now is compared with what succeeded before.",
    )


class ReplaySpec(Section):
    """What the buffer keeps and serves; live sources are online and shared, the limiter is in Reverb's terms."""

    mix: tuple[SourceMix, ...] = Field(
        default=(
            SourceMix(source="online", share=0.5),
            SourceMix(source="reference", share=0.5, correct_only=True),
        ),
        max_length=16,
    )
    online_capacity: int = Field(
        default=2048, ge=1, le=MOST_COUNT, description="Newest trajectories of a live source kept for sampling."
    )
    offline_per_prompt: int = Field(default=12, ge=1, le=MOST_COUNT, description="Kept per prompt and offline source.")
    min_online: int = Field(
        default=64, ge=0, le=MOST_COUNT, description="Live trajectories needed before the first batch."
    )
    samples_per_insert: float = Field(default=2.0, gt=0, le=1e6, description="Times a live trajectory is served.")
    error_buffer: int = Field(default=256, ge=1, le=MOST_COUNT, description="Slack of the limiter, live samples.")
    unit: Literal["trajectory", "group"] = Field(
        default="trajectory", description="`group`: online trajectories are drawn with all samples of their group."
    )
    max_times_sampled: int | None = Field(
        default=None, ge=1, le=MOST_COUNT, description="A live trajectory is served at most so often."
    )
    memory: MemorySpec = MemorySpec()
    max_staleness: int = Field(
        default=50, ge=0, le=MOST_COUNT, description="Oldest policy version served, in versions behind its run."
    )

    @property
    def remembers(self) -> bool:
        """Whether batches hold answers that the run found earlier."""
        return any(part.source == "memory" and part.share > 0 for part in self.mix)

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


class StoredExperience(Section):
    """Trajectories of the experience store, served as source `other_run`, or `annotated` where they carry labels."""

    run: str | None = Field(default=None, max_length=200, description="A run's id or an import's name; default: all.")
    correct_only: bool = False
    per_prompt: int = Field(default=12, ge=1, le=100_000, description="Most trajectories taken per prompt.")


class OfflineSpec(Section):
    """Experience from before the run."""

    human_solutions: bool = Field(default=True, description="Import the tasks' human solutions as trajectories.")
    human_solutions_per_problem: int = Field(default=3, ge=1, le=1000)
    judge_human_solutions: bool = Field(
        default=True, description="Import only human solutions that the judge accepts; false takes them as published."
    )
    keep_reference_samples: bool = Field(default=True, description="Samples that estimated Qhat_0 become offline data.")
    wrong_human_solutions: bool = Field(default=False, description="Import published wrong solutions too.")
    experience: tuple[StoredExperience, ...] = Field(default=(), max_length=64)
    decontaminate: bool = Field(default=True, description="Leave out stored experience on held-out problems.")


class TrainerSpec(Section):
    """Optimiser, batch and schedule of the trainer."""

    steps: int = Field(
        default=500,
        ge=0,
        le=100_000_000,
        description="0: nothing is trained; the job ends when its prompts have values, as `spo tasks probe` does.",
    )
    batch_size: int = Field(default=128, ge=1, le=1_000_000, description="Trajectories per step, all ranks together.")
    epochs: int = Field(default=1, ge=1, le=100, description="Passes over each batch.")
    minibatches: int = Field(default=1, ge=1, le=1000, description="Optimiser steps per pass over a batch.")
    max_tokens_per_micro_batch: int = Field(
        default=16_384,
        ge=1,
        le=MOST_COUNT,
        description="Tokens of one forward on one rank, padding included; a longer trajectory is a forward of its own.",
    )
    micro_batch_size: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Most trajectories of one forward; by default only tokens count."
    )
    skip_rows: Literal["none", "without_gradient", "without_contrast"] = Field(
        default="none",
        description="Rows left out of the forward. without_gradient: those that no term learns from, as of groups with "
        "equal rewards under a relative of GRPO without KL. without_contrast: of each term that compares a group all "
        "with equal rewards, though its KL or residuals would pull. The loss divides by the whole batch; curves of the "
        "policy speak of the other rows.",
    )
    packing: bool = Field(
        default=True, description="No padding in a forward, where that is right for the model; value-estimation alike."
    )
    sequence_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Ranks that compute each forward together, a stretch of its tokens each: so many times the tokens "
        "fit. Divides the ranks and the model's attention heads; of models that are packed, without a critic.",
    )
    activation_checkpointing: bool | None = Field(
        default=None,
        description="Layers run twice instead of keeping what they computed; by default from 50 million parameters on.",
    )
    learning_rate: float = Field(
        default=1e-6, gt=0, le=1, description="Of all weights; an adapter wants ten times as much."
    )
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the rate falls after the warm-up, until the last step."
    )
    learning_rate_floor: Share = Field(default=0.0, description="Share of the rate that a falling one ends at.")
    scale_rate_by_effective_samples: bool = Field(
        default=False,
        description="Times the root of the effective sample share of the importance weights ln pi / pi_sampler.",
    )
    adam_betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="Of matrices; norms and biases have none.")
    warmup_steps: int = Field(default=10, ge=0, le=MOST_COUNT)
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e6)
    gradient_dtype: Literal["model", "float32"] = Field(
        default="model",
        description="In which the gradients of micro-batches and ranks are added up. In bfloat16 64 of them lose about "
        "one part in a hundred; float32 takes twice the memory and is cut over the ranks, as at stage 2.",
    )
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = Field(
        default="none",
        description="What the CPU's memory holds in place of the device's: master weights and moments (stage 1 to 3), "
        "or parameters too (stage 3).",
    )
    update_interval: int = Field(
        default=10, ge=1, le=MOST_COUNT, description="Steps between weight pushes to inference."
    )
    checkpoint_interval: int = Field(default=50, ge=1, le=MOST_COUNT, description="Steps between checkpoints.")
    reference: Literal["cached", "sampler", "in_trainer"] = Field(
        default="cached",
        description="Where pi0's log-probs come from. cached: value-estimation, kept with each trajectory. sampler: as "
        "cached, but what pi0 itself sampled, at temperature 1 and top_p 1, keeps those that it was sampled with: they "
        "cost nothing, and have the rounding of another engine. in_trainer: a second model there, each time.",
    )


class CollapseGuardSpec(Section):
    """Alarms that precede a collapse, compared over windows of steps; what to do when one sounds."""

    policy: Literal["off", "warn", "pause"] = "warn"
    window: int = Field(default=10, ge=2, le=10_000, description="Steps that are averaged.")
    log_ratio_nats: float = Field(default=4.0, gt=0, le=1e6)
    grad_norm: float = Field(default=20.0, gt=0, le=1e9)
    response_length_factor: float = Field(default=2.0, gt=1, le=1e6)
    truncated_share_rise: Share = 0.1
    reward_fall: float = Field(default=0.1, gt=0, le=1e6)


class EvaluationSpec(Section):
    """pass@k on held-out problems (the paper: 20 samples, temperature 0.4, top-p 0.95)."""

    interval_steps: int = Field(default=20, ge=1, le=MOST_COUNT)
    samples: int = Field(default=20, ge=1, le=10_000)
    temperature: Temperature = 0.4
    top_p: TopP = 0.95
    ks: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(default=(1, 10), min_length=1, max_length=64)

    @model_validator(mode="after")
    def enough_samples(self) -> Self:
        if max(self.ks) > self.samples:
            raise impossible(("ks", f"pass@{max(self.ks)} needs at least {max(self.ks)} samples, not {self.samples}"))
        return self


def learning_rate_at(step: int, trainer: TrainerSpec) -> float:
    """The rate of a step, counted from 1; the paper warms up for 200 steps and stays constant."""
    if step <= trainer.warmup_steps:
        return trainer.learning_rate * step / trainer.warmup_steps
    # The first step after the warm-up has the whole rate, and the one after the last step would have the floor.
    fallen = min(1.0, (step - 1 - trainer.warmup_steps) / max(1, trainer.steps - trainer.warmup_steps))
    match trainer.learning_rate_schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - fallen
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * fallen))
    floor = trainer.learning_rate_floor
    return trainer.learning_rate * (floor + (1.0 - floor) * left)
