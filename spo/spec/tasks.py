"""Sections of a JobSpec on what is learned: the model and its adapter, the problems, what decides about responses,
and the reward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationInfo, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from spo.errors import InvalidInput
from spo.model.chat import ChatFormat
from spo.model.folder import ALL_LINEAR
from spo.spec.section import MOST_COUNT, STORED, LocalPath, Section, impossible

# The largest that the sampling engine has room for (vLLM's MaxLoRARanks).
HIGHEST_RANK = 512

ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length=200)]

MOST_PARTS = 16
# The model as judge that needs no address: the one that the job starts from.
OWN_MODEL = "pi0"
# Before the name of a policy that the platform serves; pinned, the version that it meant follows: =job_...@3.
SERVED = "served:"
_SERVED = re.compile(
    SERVED + r"([A-Za-z0-9][A-Za-z0-9._:-]{0,99})(?:=(job_[0-9A-HJKMNP-TV-Z]{26})@(0|[1-9][0-9]{0,15}))?"
)
MOST_RUBRIC = 32_768
MOST_EXPRESSION = 1000
# Of those that rows name, the one for rows that name none.
DEFAULT = "default"
PART_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"
FUNCTION_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"

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

# The environment that shows the outcome of a problem's public tests.
RETRY_WITH_ERRORS = "retry_with_errors"
MOST_TURNS = 1000
MOST_OBSERVATION_TOKENS = 1_000_000

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
_Value = (
    bool
    | Annotated[int, Field(ge=-(2**53), le=2**53)]
    | Annotated[float, Field(ge=-1e9, le=1e9)]
    | Annotated[str, Field(max_length=4096)]
    | None
)

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


class LoraSpec(Section):
    """A LoRA adapter (W + alpha / rank * B A, as peft has it); the model's own weights stay pi0's. No dropout."""

    rank: int = Field(default=16, ge=1, le=HIGHEST_RANK)
    alpha: int = Field(default=32, ge=1, le=65_536, description="The adapter counts alpha / rank times.")
    targets: Literal["all-linear"] | Annotated[tuple[ModuleName, ...], Field(min_length=1, max_length=1024)] = Field(
        default=ALL_LINEAR, description="Names, or ends of names, of linear layers; default: all but the last."
    )

    def peft_options(self) -> dict[str, Any]:
        """The fields of peft's LoraConfig."""
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return {"r": self.rank, "lora_alpha": self.alpha, "target_modules": targets}


@dataclass(frozen=True)
class PinnedJudge:
    """A served name as judge, and the weight version that it meant when a job was submitted; no job_id: not yet."""

    name: str
    job_id: str = ""
    version: int = 0

    @property
    def model(self) -> str:
        """As `model` of a verifier says it."""
        return f"{SERVED}{self.name}" + (f"={self.job_id}@{self.version}" if self.job_id else "")


def served_judge(model: str) -> PinnedJudge | None:
    """The served policy that `model` names; None where it names none."""
    found = _SERVED.fullmatch(model)
    return PinnedJudge(found[1], found[2] or "", int(found[3] or 0)) if found else None


Script = Literal["arabic", "cjk", "cyrillic", "devanagari", "greek", "hangul", "hebrew", "kana", "latin", "thai"]
PassScore = Annotated[float, Field(gt=0, le=1)]
_PASS = "Score from which a response counts as right; the reward follows the score itself."


class ProgramVerifier(Section):
    """What the task file says: tests of programs or functions, or the rule for an answer."""

    kind: Literal["program"] = "program"
    isolation: Literal["", "separate"] = Field(
        default="", description="`separate`: rows whose tests of functions need the very objects are refused."
    )

    @property
    def pass_score(self) -> float:
        """Right is what passes."""
        return 1.0


class PythonVerifier(Section):
    """A person's function in Python, run in the judge's sandbox: f(response, **arguments) -> a number, or numbers by
    name, between 0 and 1."""

    kind: Literal["python"]
    path: LocalPath = Field(description="Local file with the function; it is read when the job's problems are.")
    function: str = Field(default="score", pattern=FUNCTION_NAME, description="Its name in the file.")
    pass_score: PassScore = Field(default=1.0, description=_PASS)


class HttpVerifier(Section):
    """A reward service of the user's own."""

    kind: Literal["http"]
    url: str = Field(
        max_length=2048,
        pattern=r"^https?://[^\s/?#@\\]+([/?][^\s#]*)?$",
        description="Where batches of responses are posted; without a user or a fragment.",
    )
    timeout_seconds: float = Field(default=30.0, ge=0.1, le=600, description="For one request, retries apart.")
    pass_score: PassScore = Field(default=1.0, description=_PASS)


class ModelVerifier(Section):
    """A language model as judge; the mean of its votes is the score."""

    kind: Literal["model"]
    rubric: str = Field(
        min_length=1,
        max_length=MOST_RUBRIC,
        description="What the judge is told; {statement}, {response} and {reference} are replaced.",
    )
    votes: int = Field(default=1, ge=1, le=15, description="Times that it is asked about each response.")
    address: str | None = Field(
        default=None,
        max_length=2048,
        pattern=r"^https?://[^\s/?#@\\]+(/[^\s?#]*)?$",
        description="Base address of an OpenAI-compatible service; default: the platform's inference, by pi0.",
    )
    model: str = Field(
        default="",
        max_length=200,
        description="Its name at that address; without one, pi0, or served:NAME for a policy that the platform serves.",
    )
    pass_score: PassScore = Field(default=0.5, description=_PASS)

    @model_validator(mode="after")
    def an_address_serves_a_named_model(self) -> Self:
        if self.address is not None and not self.model:
            raise impossible(("model", "an address is asked for a model by name"))
        if self.address is not None or self.model in ("", OWN_MODEL):
            return self
        if self.model.startswith(SERVED):
            if served_judge(self.model) is None:
                raise impossible(("model", f"must be {SERVED}NAME, or pinned {SERVED}NAME=job_...@VERSION"))
            return self
        own = f"the platform's own are {OWN_MODEL} and {SERVED}NAME"
        raise impossible(("address", f"{self.model} is asked for at an address; {own}"))

    @property
    def is_served(self) -> bool:
        """Whether the judge is a policy that the platform serves under a name."""
        return self.address is None and self.model.startswith(SERVED)


class FormatVerifier(Section):
    """1 where the whole response, without its reasoning, matches a regular expression of Python's."""

    kind: Literal["format"]
    expression: str = Field(min_length=1, max_length=MOST_EXPRESSION)

    @property
    def pass_score(self) -> float:
        """It matches or does not."""
        return 1.0


def _by_kind(value: object, info: ValidationInfo, among: tuple[type[Section], ...]) -> Section:
    """The section that `kind` names; its faults are told without those of the other kinds, at their own place."""
    if isinstance(value, among):
        return value
    kinds = {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in among}
    named = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(named, str) or named not in kinds:
        raise PydanticCustomError("kind", "must be an object whose kind is one of {kinds}", {"kinds": ", ".join(kinds)})
    return kinds[named].model_validate(
        value, context=info.context, extra="ignore" if info.context == STORED else "forbid"
    )


_SINGLE = (ProgramVerifier, PythonVerifier, HttpVerifier, ModelVerifier)


def _of_a_part(value: object, _check: object, info: ValidationInfo) -> Section:
    return _by_kind(value, info, (*_SINGLE, FormatVerifier))


PartVerifier = Annotated[
    ProgramVerifier | PythonVerifier | HttpVerifier | ModelVerifier | FormatVerifier, WrapValidator(_of_a_part)
]


class LengthPenaltySpec(Section):
    """0 up to `free_characters` of a response without its reasoning, 1 from `most_characters` on, linear between."""

    free_characters: int = Field(ge=0, le=10_000_000)
    most_characters: int = Field(ge=1, le=10_000_000)

    @model_validator(mode="after")
    def it_grows(self) -> Self:
        if self.most_characters <= self.free_characters:
            raise impossible(("most_characters", "must be more than free_characters"))
        return self


class LanguagePenaltySpec(Section):
    """The share of a response's letters that are of another script."""

    script: Script


class PartSpec(Section):
    """One part of a composition: a verifier, or a penalty."""

    name: str = Field(pattern=PART_NAME, description="Its column, curve and place on the page.")
    weight: float = Field(
        default=1.0,
        ge=0,
        le=1000,
        description="Of a verifier, its share of the weighted mean; of a penalty, at most 1, what the whole of it "
        "takes off.",
    )
    gate: bool = Field(default=False, description="A response that is not right by this part scores 0 as a whole.")
    verifier: PartVerifier | None = None
    length: LengthPenaltySpec | None = None
    language: LanguagePenaltySpec | None = None

    @model_validator(mode="after")
    def it_is_one_thing(self) -> Self:
        if sum(kind is not None for kind in (self.verifier, self.length, self.language)) != 1:
            raise impossible(("verifier", "a part is exactly one of verifier, length and language"))
        if self.verifier is None and self.gate:
            raise impossible(("gate", "a penalty takes off its weight and is no gate"))
        if self.verifier is None and self.weight > 1:
            raise impossible(("weight", "a penalty takes off at most 1"))
        return self


class CompositionVerifier(Section):
    """The weighted mean of its verifiers, less its penalties, or 0 where a gate fails; between 0 and 1."""

    kind: Literal["composition"]
    parts: tuple[PartSpec, ...] = Field(min_length=1, max_length=MOST_PARTS)
    pass_score: PassScore = Field(default=1.0, description=_PASS)

    @model_validator(mode="after")
    def parts_make_a_score(self) -> Self:
        names = [part.name for part in self.parts]
        doubled = [index for index, name in enumerate(names) if name in names[:index]]
        if doubled:
            raise impossible(*((f"parts/{index}/name", "another part has this name") for index in doubled))
        if not any(part.weight > 0 for part in self.parts if part.verifier):
            raise impossible(("parts", "the weights of the verifiers must not all be 0"))
        return self


def _of_a_problem(value: object, _check: object, info: ValidationInfo) -> Section:
    return _by_kind(value, info, (*_SINGLE, CompositionVerifier))


ProblemVerifier = Annotated[
    ProgramVerifier | PythonVerifier | HttpVerifier | ModelVerifier | CompositionVerifier, WrapValidator(_of_a_problem)
]


class PerProblemVerifier(Section):
    """Each row of the task file names one of these by its field `verifier`."""

    kind: Literal["per_problem"]
    verifiers: dict[Annotated[str, Field(pattern=PART_NAME)], ProblemVerifier] = Field(
        min_length=1, max_length=MOST_PARTS, description=f"By name; `{DEFAULT}` is for rows that name none."
    )


def _of_tasks(value: object, _check: object, info: ValidationInfo) -> Section:
    return _by_kind(value, info, (*_SINGLE, CompositionVerifier, PerProblemVerifier))


VerifierSpec = Annotated[
    ProgramVerifier | PythonVerifier | HttpVerifier | ModelVerifier | CompositionVerifier | PerProblemVerifier,
    WrapValidator(_of_tasks),
]


def verifiers_in(verifier: VerifierSpec, at: str = "verifier") -> tuple[tuple[str, PartVerifier], ...]:
    """The verifier, those of a composition's parts or all that rows may name, each with its JSON pointer below `tasks`
    (no slash)."""
    match verifier:
        case CompositionVerifier():
            return tuple(
                (f"{at}/parts/{index}/verifier", part.verifier)
                for index, part in enumerate(verifier.parts)
                if part.verifier is not None
            )
        case PerProblemVerifier():
            named = verifier.verifiers.items()
            return tuple(found for name, one in named for found in verifiers_in(one, f"{at}/verifiers/{name}"))
    return ((at, verifier),)


def with_models(
    verifier: VerifierSpec, renamed: Callable[[str, ModelVerifier], str], at: str = "verifier"
) -> VerifierSpec:
    """The verifier with other names of its models; renamed: told the pointer as `verifiers_in` gives it."""
    match verifier:
        case ModelVerifier():
            return verifier.model_copy(update={"model": renamed(at, verifier)})
        case CompositionVerifier():
            parts = tuple(
                part.model_copy(
                    update={"verifier": with_models(part.verifier, renamed, f"{at}/parts/{index}/verifier")}
                )
                if isinstance(part.verifier, ModelVerifier)
                else part
                for index, part in enumerate(verifier.parts)
            )
            return verifier.model_copy(update={"parts": parts})
        case PerProblemVerifier():
            named = {
                name: with_models(one, renamed, f"{at}/verifiers/{name}") for name, one in verifier.verifiers.items()
            }
            return verifier.model_copy(update={"verifiers": named})
    return verifier


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


class EnvironmentSpec(Section):
    """The environment of a job's problems, and where its conversations end."""

    name: Name = Field(description="Such as retry_with_errors, python, calculator, text_game; or one of your own.")
    max_turns: int = Field(default=8, ge=1, le=MOST_TURNS, description="Turns of the policy; a longer episode is cut.")
    max_observation_tokens: int = Field(
        default=512, ge=1, le=MOST_OBSERVATION_TOKENS, description="Longer observations are cut in the middle."
    )
    arguments: dict[Name, _Value] = Field(
        default_factory=dict,
        max_length=32,
        description="What the environment is told; in texts, {statement} is the problem's statement.",
    )


class HarnessSpec(Section):
    """The program of somebody's that plays a job's problems, an agent, and what an episode of it may use."""

    name: Name = Field(description="What runners know it by, such as the name of a command or an image.")
    runner_pool: Name = Field(default="default", description="Which runners lease the episodes.")
    max_calls: int = Field(default=200, ge=1, le=10_000, description="Calls of the policy in an episode.")
    max_seconds: int = Field(default=7200, ge=1, le=604_800, description="Longest episode.")
    branches: Literal["all", "main"] = Field(
        default="all",
        description="What of an episode is trained on: all its branches, as one, or the path of its last call alone.",
    )
    max_episode_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Tokens read and sampled after the first prompt in all branches together, each with all that it "
        "reads; default: model.max_response_tokens. Beyond it a call is a context_length_exceeded.",
    )
    reward: Literal["runner", "verifier"] = Field(
        default="runner",
        description="runner: what it posts, from 0 to 1. verifier: that of the problem decides about the answer.",
    )
    reasoning: Literal["keep", "as_template"] = Field(
        default="keep",
        description="Of earlier answers once more is asked. keep: as it was sampled, whatever the template does. "
        "as_template: where that leaves it out, the next question begins a branch without it.",
    )
    arguments: dict[Name, _Value] = Field(default_factory=dict, max_length=32, description="Passed on to the runner.")


@dataclass(frozen=True)
class ConversationSetup:
    """One conversation: at most so many turns of the policy, observations cut to so many tokens.

    arguments: what the job tells the environment; problem: what the environment is told of the problem.
    """

    max_turns: int = 8
    max_observation_tokens: int = 512
    arguments: Mapping[str, object] = field(default_factory=dict)
    problem: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        """Canonical JSON: the prompt's `environment_json`."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def setup_from_json(text: str) -> ConversationSetup:
    """The inverse of `to_json`; what is not there has its default. Raises InvalidInput (code "bad_environment")."""
    try:
        document = json.loads(text or "{}")
        names = ConversationSetup.__dataclass_fields__
        setup = ConversationSetup(**{name: value for name, value in document.items() if name in names})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"environment_json is no JSON object: {error}", code="bad_environment") from None
    numbers = {
        "max_turns": (setup.max_turns, MOST_TURNS),
        "max_observation_tokens": (setup.max_observation_tokens, MOST_OBSERVATION_TOKENS),
    }
    for name, (value, most) in numbers.items():
        if type(value) is not int or not 1 <= value <= most:
            raise InvalidInput(f"{name} of environment_json must be from 1 to {most}", code="bad_environment")
    if not isinstance(setup.arguments, Mapping) or not isinstance(setup.problem, Mapping):
        raise InvalidInput("arguments and problem of environment_json are objects", code="bad_environment")
    return setup


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
    tool_parser: str = Field(
        default="auto",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="Which of vLLM's tool parsers reads the calls of a policy that is served with tools. auto: the "
        "first that reads what the model's chat template writes.",
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
    harness: HarnessSpec | None = Field(
        default=None, description="An agent in its own program that plays the problems; default: none does."
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
    def one_plays(self) -> Self:
        if self.environment is not None and self.harness is not None:
            raise impossible(("harness", "either an environment answers the policy's turns, or an agent plays"))
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
