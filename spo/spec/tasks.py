"""The model, the problems, and the reward."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spo.model.chat import ChatFormat
from spo.spec.environment import EnvironmentSpec
from spo.spec.lora import LoraSpec
from spo.spec.section import LocalPath, Section
from spo.spec.task_sources import PUBLISHED, WITHOUT_FILES, FileKind, GeneratorSpec, HuggingFaceSpec, TaskKind
from spo.spec.verifier import ProgramVerifier, VerifierSpec, verifiers_in
from spo.spec.violations import impossible

MOST_PROBLEMS = 10_000_000
# Of tasks that are made on demand, where a spec does not say how many.
TOY_PROBLEMS = 160
GYM_PROBLEMS = 1000
# They are made while the submission waits.
MOST_GYM_PROBLEMS = 20_000

# They would take the place of what the platform itself tells the template.
RESERVED_ARGUMENTS = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages"),
        *("max_length", "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)

Marker = Annotated[str, Field(min_length=1, max_length=64)]


class ChatSpec(Section):
    """How the statement of a problem becomes the model's prompt."""

    template: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: the statement is one user's turn of the model's chat template, where it has one. none: the "
        "prompt is the text as it is, for base models and prompts with examples in them.",
    )
    system: str | None = Field(
        default=None, min_length=1, max_length=65_536, description="The system prompt that the template is given."
    )
    template_arguments: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")],
        bool
        | Annotated[int, Field(ge=-(2**53), le=2**53)]
        | Annotated[float, Field(ge=-1e9, le=1e9)]
        | Annotated[str, Field(max_length=4096)]
        | None,
    ] = Field(
        default_factory=dict,
        max_length=32,
        description="What else the template is given, such as enable_thinking: false.",
    )
    reasoning: tuple[Marker, Marker] | None = Field(
        default=("<think>", "</think>"),
        description="What reasoning begins and ends with: it is trained on and kept out of the program or answer. "
        "null: a response is all answer.",
    )

    @model_validator(mode="after")
    def a_template_takes_what_is_given(self) -> Self:
        if self.template == "none" and self.system is not None:
            raise impossible(("system", "without a chat template nothing takes a system prompt"))
        if self.template == "none" and self.template_arguments:
            raise impossible(("template_arguments", "without a chat template nothing takes arguments"))
        reserved = sorted(RESERVED_ARGUMENTS & set(self.template_arguments))
        if reserved:
            raise impossible((f"template_arguments/{reserved[0]}", "is set by the platform itself"))
        return self


class ModelSpec(Section):
    """The reference policy pi0: a local folder with safetensors weights and a tokenizer."""

    path: LocalPath = Field(description="Folder of the model; safetensors only, no custom code.")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_prompt_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    max_response_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    lora: LoraSpec | None = Field(default=None, description="Train an adapter; default: all weights.")
    chat: ChatSpec = ChatSpec()
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        default=(),
        max_length=16,
        description="Texts that end a response beside the end tokens, in rollouts, estimates and evaluations alike. "
        "The tokens that complete one are trained on; the judge gets the text before it.",
    )

    @property
    def chat_format(self) -> ChatFormat:
        """How prompts are written and responses end."""
        return ChatFormat(**self.chat.model_dump(), stop=self.stop)


class RewardSpec(Section):
    """What a verdict is worth: reward = scale * score + shift, at most 0 (the paper's rewards are r <= 0).

    The score is the verdict's own where its verifier gives one. Of tests and answers it is 1 when all that decide pass
    and 0 otherwise, or the share of them that passes.
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

    kind: TaskKind = "toy"
    id: str | None = Field(
        default=None, pattern=r"^ds_[0-9A-HJKMNP-TV-Z]{26}$", description="The uploaded dataset of kind `dataset`."
    )
    path: LocalPath | None = Field(
        default=None,
        description="Local JSONL or Parquet file or folder of training problems; gsm8k, mbpp and human_eval have one.",
    )
    evaluation_path: LocalPath | None = Field(default=None, description="Held-out problems; default: split off `path`.")
    evaluation_kind: FileKind | None = Field(
        default=None, description="Format of `evaluation_path`; default: the same as `kind`."
    )
    generators: tuple[GeneratorSpec, ...] = Field(
        default=(), max_length=200, description="Of kind reasoning_gym: its data sets, mixed by weight."
    )
    huggingface: HuggingFaceSpec | None = Field(
        default=None, description="Of kind huggingface: how the rows of a data set on disk become problems."
    )
    difficulties: tuple[Annotated[str, Field(max_length=200)], ...] = Field(
        default=(), max_length=64, description="Published difficulty levels to train on; default: all."
    )
    near_duplicate_similarity: float = Field(
        default=0.8,
        ge=0.3,
        le=1,
        description="Training problems whose statement is this similar to one in `evaluation_path` are left out.",
    )
    train_problems: int | None = Field(
        default=None,
        ge=1,
        le=MOST_PROBLEMS,
        description="At most so many; default: all, 160 of the toy contest, 1000 of reasoning_gym.",
    )
    evaluation_problems: int = Field(default=80, ge=0, le=1_000_000)
    difficulty: Literal["standard", "hard"] = "standard"
    verifier: VerifierSpec = Field(
        default=ProgramVerifier(), description="What decides about responses; default: what the task file says."
    )
    reward: RewardSpec = RewardSpec()
    environment: EnvironmentSpec | None = Field(
        default=None, description="What answers the policy's turns; default: one response, and no conversation."
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1)

    @property
    def most_train_problems(self) -> int:
        """`train_problems`, or what stands in its place where it is not given."""
        return self.train_problems or {"toy": TOY_PROBLEMS, "reasoning_gym": GYM_PROBLEMS}.get(self.kind, MOST_PROBLEMS)

    @model_validator(mode="after")
    def files_are_named(self) -> Self:
        if (self.kind == "dataset") != (self.id is not None):
            raise impossible(("id", "tasks of kind dataset name the id of an uploaded one, and no others do"))
        if self.kind == "dataset" and self.path:
            raise impossible(("path", "a dataset has its own file"))
        if self.kind not in (*WITHOUT_FILES, *PUBLISHED) and not self.path:
            raise impossible(("path", f"tasks of kind {self.kind} need the path of a local file"))
        if self.kind in ("toy", "reasoning_gym") and self.difficulties:
            raise impossible(("difficulties", f"tasks of kind {self.kind} are not filtered by difficulty"))
        if self.evaluation_kind and not self.evaluation_path and self.evaluation_kind not in PUBLISHED:
            raise impossible(("evaluation_kind", "there is no evaluation_path that it would describe"))
        if self.reward.tests == "public" and all(one.kind != "program" for _, one in verifiers_in(self.verifier)):
            raise impossible(("reward/tests", "no verifier of kind program has tests that could be public"))
        return self

    @model_validator(mode="after")
    def sources_are_described(self) -> Self:
        if (self.kind == "reasoning_gym") != bool(self.generators):
            raise impossible(("generators", "tasks of kind reasoning_gym name their generators, and no others do"))
        wanted = self.most_train_problems + self.evaluation_problems
        if self.kind == "reasoning_gym" and wanted > MOST_GYM_PROBLEMS:
            raise impossible(("train_problems", f"with those held out at most {MOST_GYM_PROBLEMS} are made"))
        if self.kind == "reasoning_gym" and (self.path or self.evaluation_path or self.evaluation_kind):
            raise impossible(("path", "problems of reasoning_gym are made, also those held out, and in no file"))
        if ("huggingface" in (self.kind, self.evaluation_kind)) != (self.huggingface is not None):
            raise impossible(("huggingface", "tasks of kind huggingface say how rows are read, and no others do"))
        return self
