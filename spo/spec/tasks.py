"""The model, the problems, and the reward."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from spo.spec.section import Section
from spo.spec.violations import impossible


class ModelSpec(Section):
    """The reference policy pi0: a local folder with safetensors weights and a tokenizer."""

    path: str = Field(min_length=1, description="Folder of the model; safetensors only, no custom code.")
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_prompt_tokens: int = Field(default=64, ge=1, le=1_000_000)
    max_response_tokens: int = Field(default=44, ge=1, le=1_000_000)


class RewardSpec(Section):
    """What a verdict is worth: reward = scale * score + shift, at most 0 (the paper's rewards are r <= 0).

    The score is 1 when the deciding tests pass and 0 otherwise, or the share of them that passes.
    """

    score: Literal["all_tests", "share_of_tests"] = "all_tests"
    tests: Literal["all", "public"] = Field(
        default="all", description="Tests that decide the training reward; evaluation always uses all of them."
    )
    scale: float = Field(default=1.0, gt=0, le=1000)
    shift: float = Field(default=-1.0, le=0, ge=-1000)

    @property
    def best(self) -> float:
        """The reward of a right program; never above 0."""
        return min(0.0, self.scale + self.shift)

    @model_validator(mode="after")
    def rewards_are_at_most_zero(self) -> Self:
        if self.scale + self.shift > 1e-9:
            raise impossible(("shift", f"the best reward, scale + shift = {self.scale + self.shift:g}, must be <= 0"))
        return self


class TasksSpec(Section):
    """Which problems are trained on and which are held out."""

    kind: Literal["toy", "code_contests", "taco", "jsonl", "dataset"] = "toy"
    id: str | None = Field(
        default=None, pattern=r"^ds_[0-9A-HJKMNP-TV-Z]{26}$", description="The uploaded dataset of kind `dataset`."
    )
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
    reward: RewardSpec = RewardSpec()
    seed: int = Field(default=0, ge=0, le=2**63 - 1)

    @model_validator(mode="after")
    def files_are_named(self) -> Self:
        if (self.kind == "dataset") != (self.id is not None):
            raise impossible(("id", "tasks of kind dataset name the id of an uploaded one, and no others do"))
        if self.kind == "dataset" and self.path:
            raise impossible(("path", "a dataset has its own file"))
        if self.kind not in ("toy", "dataset") and not self.path:
            raise impossible(("path", f"tasks of kind {self.kind} need the path of a local file"))
        if self.kind == "toy" and self.difficulties:
            raise impossible(("difficulties", "the toy contest is not filtered by difficulty"))
        if self.evaluation_kind and not self.evaluation_path:
            raise impossible(("evaluation_kind", "there is no evaluation_path that it would describe"))
        return self
