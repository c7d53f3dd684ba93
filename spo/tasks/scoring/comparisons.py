"""Comparisons of answers beyond the same text and the same number: labels of choices, expressions, JSON by schema.

Labels take time linear in the text. Expressions and schemas are a person's and meet text of a model's: what they take
has no bound here, so that the judge compares by them in a process that it can end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from spo.v1.verdict_pb2 import AnswerComparison

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

CHOICE = AnswerComparison.ANSWER_COMPARISON_CHOICE
REGULAR_EXPRESSION = AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION
JSON_SCHEMA = AnswerComparison.ANSWER_COMPARISON_JSON_SCHEMA
# Their time depends on more than the length of an answer.
UNBOUNDED = frozenset({REGULAR_EXPRESSION, JSON_SCHEMA})
MOST_EXPRESSION = 1000
_SHOWN_CHARACTERS = 200
# A document with fewer arrays and objects than this exhausts no stack.
_FLAT = 40

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\{([^{}]*)\}")
_LABEL = re.compile(
    r"\(([A-Za-z]|\d{1,2})\)(?=$|[\s.:,-])|\[([A-Za-z]|\d{1,2})\]|([A-Za-z]|\d{1,2})(?:$|[).:](?=$|\s))"
)
# "A or B", "(A), (B)": more than one choice is none.
_AND_ANOTHER = re.compile(
    r"\s*[.,;]?\s*(?:(?:or|and)\b|[,/&;+])\s*[(\[]?(?:[A-Za-z]|\d{1,2})(?![A-Za-z0-9'])", re.ASCII
)


class BrokenSchema(Exception):
    """A schema that cannot decide, whatever the answer."""


def label_of(text: str) -> str:
    """The label of a choice in capitals, such as "B" of "B", "(b)", "**B.** Paris" and "B: Paris"; '' where none is.

    It stands at the beginning. Two labels, as in "A or B", are none.
    """
    bare = _WRAPPED.sub(r"\1", text).replace("*", "").replace("$", "").strip()
    found = _LABEL.match(bare)
    if found is None or _AND_ANOTHER.match(bare, found.end()):
        return ""
    return next(group for group in found.groups() if group).upper()


def is_match(expression: str, answer: str) -> bool:
    """Whether the whole answer matches a regular expression, as Python's `re` reads it."""
    return re.fullmatch(expression, answer) is not None


def schema_fault(schema: str, answer: str) -> str | None:
    """None where the answer is JSON that is valid under a schema, otherwise why it is not.

    Raises BrokenSchema where the schema refers to what is not there.
    """
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        document = json.loads(answer, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"[:_SHOWN_CHARACTERS]
    try:
        fault = best_match(_validator(schema).iter_errors(document))
    except Unresolvable as error:
        raise BrokenSchema(f"the schema refers to what is not there: {error}"[:_SHOWN_CHARACTERS]) from None
    except RecursionError:
        if answer.count("[") + answer.count("{") < _FLAT:
            raise BrokenSchema("the schema refers to itself without end") from None
        return "the JSON is nested too deeply"
    return None if fault is None else f"{fault.json_path}: {fault.message}"[:_SHOWN_CHARACTERS]


def expectation_fault(comparison: int, expected: str) -> str | None:
    """What is wrong with an expected answer of one of these comparisons; None where nothing is."""
    match comparison:
        case AnswerComparison.ANSWER_COMPARISON_CHOICE:
            return None if label_of(expected) else "has no label of a choice, such as B, (b) or 2"
        case AnswerComparison.ANSWER_COMPARISON_REGULAR_EXPRESSION:
            return _expression_fault(expected)
        case AnswerComparison.ANSWER_COMPARISON_JSON_SCHEMA:
            return _fault_of_schema(expected)
    return None


def _expression_fault(expression: str) -> str | None:
    if len(expression) > MOST_EXPRESSION:
        return f"is a regular expression of more than {MOST_EXPRESSION} characters"
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        return f"is no regular expression: {error}"[:_SHOWN_CHARACTERS]
    return None


def _fault_of_schema(schema: str) -> str | None:
    from jsonschema.exceptions import SchemaError

    try:
        document = json.loads(schema, parse_constant=_refuse)
        if not isinstance(document, dict):
            return "is no JSON schema: it is no object"
        validator = _validator(schema)
        validator.check_schema(document)
        outside = [name for name in _references(document) if not name.startswith("#")]
    except SchemaError as error:
        return f"is no JSON schema: {error.json_path}: {error.message}"[:_SHOWN_CHARACTERS]
    except (ValueError, RecursionError) as error:
        return f"is no JSON schema: {error}"[:_SHOWN_CHARACTERS]
    if outside:
        return f"refers to {outside[0]!r}, and nothing is fetched: only #/... is"[:_SHOWN_CHARACTERS]
    return None


@lru_cache(maxsize=256)
def _validator(schema: str) -> Validator:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    document = json.loads(schema)
    kind = validator_for(document, default=Draft202012Validator)
    # An empty registry: a reference to an address is never fetched.
    return kind(document, registry=Registry())


def _references(schema: object) -> Iterator[str]:
    waiting: list[object] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield from (one[name] for name in ("$ref", "$dynamicRef") if isinstance(one.get(name), str))
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
