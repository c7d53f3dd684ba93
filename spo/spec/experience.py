"""Where trajectories come from and how they are served."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from spo.algorithm.sources import SourceName
from spo.spec.section import MOST_COUNT, Section, Share, Temperature, TopP
from spo.spec.violations import impossible


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
