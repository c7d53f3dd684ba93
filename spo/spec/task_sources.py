"""Where problems come from beside own files: generators of reasoning-gym, and the columns of data sets on disk."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spo.spec.section import MOST_COUNT, Section
from spo.spec.violations import impossible

TaskKind = Literal[
    "toy",
    "code_contests",
    "taco",
    "jsonl",
    "dataset",
    "reasoning_gym",
    "human_eval",
    "mbpp",
    "gsm8k",
    "huggingface",
]
# Whose files may hold the held-out problems of another kind.
FileKind = Literal["code_contests", "taco", "jsonl", "human_eval", "mbpp", "gsm8k", "huggingface"]
# These come with the platform or with a package.
PUBLISHED = ("human_eval", "mbpp", "gsm8k")
# These are neither in a file nor shipped.
WITHOUT_FILES = ("toy", "dataset", "reasoning_gym")

Column = Annotated[str, Field(min_length=1, max_length=200)]
ComparisonName = Literal["exact", "numeric", "choice", "regular_expression", "json_schema", "math"]
ExtractionName = Literal["whole", "first_line", "last_number", "after_marker", "boxed", "xml_tag"]
StyleName = Literal["module", "completion", "pytest"]
Setting = (
    bool
    | Annotated[int, Field(ge=-(2**53), le=2**53)]
    | Annotated[float, Field(ge=-1e9, le=1e9)]
    | Annotated[str, Field(max_length=4096)]
    | None
)

Settings = Annotated[tuple[Setting, ...], Field(max_length=100)]


class GeneratorSpec(Section):
    """A data set of reasoning-gym with its own settings."""

    name: str = Field(pattern=r"^[a-z0-9_]{1,64}$", description="Such as chain_sum; `spo tasks generators` lists them.")
    settings: dict[Annotated[str, Field(pattern=r"^[a-z][A-Za-z0-9_]{0,63}$")], Setting | Settings] = Field(
        default_factory=dict, max_length=64, description="Fields of its configuration, such as max_terms: 4."
    )
    weight: float = Field(default=1.0, gt=0, le=1e6, description="Its share of the problems beside the others.")


class ColumnsSpec(Section):
    """Which column of a data set holds which part of a problem; a dot goes into nested columns."""

    statement: Column = Field(description="Text, or a conversation of one user's message.")
    answer: Column | None = Field(default=None, description="The expected answer, or a list of right ones.")
    code: Column | None = Field(default=None, description="Code that tests the response, or a list of statements.")
    before: Column | None = Field(default=None, description="Code that stands before the response.")
    entry_point: Column | None = Field(default=None, description="Name of the function that the tests call.")
    inputs: Column | None = Field(default=None, description="Standard inputs of the tests of a program.")
    outputs: Column | None = Field(default=None, description="What the program must print for each of them.")
    solutions: Column | None = Field(default=None, description="A right response, or a list of them.")
    difficulty: Column | None = None

    @model_validator(mode="after")
    def one_thing_decides(self) -> Self:
        given = [name for name in ("answer", "code", "outputs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise impossible(("answer", "exactly one of answer, code, and inputs with outputs decides"))
        if (self.inputs is None) != (self.outputs is None):
            raise impossible(("inputs", "inputs and outputs go together"))
        if self.code is None and (self.before or self.entry_point):
            raise impossible(("code", "before and entry_point belong to code"))
        return self


class AnswerSettings(Section):
    """How the answers of a data set with columns are compared, as in a row of JSONL."""

    comparison: ComparisonName = "exact"
    extraction: ExtractionName = "whole"
    marker: str = Field(default="", max_length=200)
    absolute_tolerance: float = Field(default=0.0, ge=0, le=1e300)
    relative_tolerance: float = Field(default=0.0, ge=0, le=1e300)
    expected_after: str = Field(
        default="", max_length=200, description="The expected answer stands after the last of this in its column."
    )


class HuggingFaceSpec(Section):
    """How the files of a data set on disk are read: its split, its columns, what is added to them."""

    columns: ColumnsSpec
    split: str | None = Field(default=None, pattern=r"^[\w.-]{1,100}$", description="Default: the only one, or train.")
    evaluation_split: str | None = Field(
        default=None, pattern=r"^[\w.-]{1,100}$", description="Held-out problems, where evaluation_path names none."
    )
    answer: AnswerSettings = AnswerSettings()
    code_style: StyleName = "module"
    instruction: str = Field(default="", max_length=65_536, description="Text after each statement.")
    limit: int | None = Field(default=None, ge=1, le=MOST_COUNT, description="Read only so many rows of a split.")
