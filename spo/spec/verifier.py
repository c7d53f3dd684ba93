"""What decides about responses: `tasks.verifier`, one of several kinds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, ValidationInfo, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from spo.spec.section import LocalPath, Section
from spo.spec.stored import STORED
from spo.spec.violations import impossible

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
