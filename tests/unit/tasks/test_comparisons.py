"""Comparisons by label, expression and schema: what is the same, and which rules cannot be."""

from __future__ import annotations

import pytest

from spo.tasks.answer import (
    JSON_SCHEMA,
    REGULAR_EXPRESSION,
    BrokenSchema,
    expectation_fault,
    fault_of,
    label_of,
    schema_fault,
)
from spo.tasks.records import AnswerRow


@pytest.mark.parametrize(
    "text",
    [
        *("B", "b", " (b) ", "B.", "B)", "B:", "[B]", "**B**", "**(B)** Paris", "$B$", r"\text{B}", r"\textbf{(B)}"),
        *(
            r"\boxed{\textbf{(B)}}",
            r"\textbf{(B)}\ 12",
            r"$\boxed{\mathrm{B}}$",
            "{B}",
            r"\mathbf{B.}~Paris",
            r"(B)\ Paris",
        ),
        *("B. Paris", "B: Paris", "(B) Paris", "B. Washington, D.C.", "B.\nbecause of A", "(B), since A is wrong"),
        *(
            "`B`",
            "B,",
            '"B"',
            "'B'",
            "Option B",
            "choice (B)",
            "Answer: B",
            "B - Paris",
            "B \u2013 Paris",
            r"\textit{B}",
        ),
        *("_B_", "**Option B**: Paris", "Option (B). Paris"),
        *(
            "The answer is B",
            "the correct answer is (B).",
            "answer: **B)**",
            "**Final Answer: B**",
            "So the answer is: B",
        ),
        *(
            "My answer is option B.",
            "The best choice is B: Paris",
            "Therefore, the correct option is (B)",
            "answer = B",
        ),
        *(
            "(B) because A is wrong",
            "B, because A is wrong",
            "B is correct.",
            "Option B is the right answer",
            "B!",
            "B;",
        ),
        *("<B>", "((B))", "[[B]]", r"\left(B\right)", "\uff22", "\uff08B\uff09", "B\u3002", "- B", "\u2022 B", "# B"),
        *("B\n\nExplanation: A is wrong.", "B.\nA. is wrong, and so is C.", "B\nThe answer is B", "Ans: B"),
    ],
)
def test_a_choice_is_its_label(text: str) -> None:
    assert label_of(text) == "B"


@pytest.mark.parametrize(
    "text",
    [
        *("", "Bonn", "B cat", "A or B", "A, B", "(A) or (B)", "A/B", "A & B", "A and B", "A. or B.", "(A), (B)"),
        *("I think B", "I would pick B", "123", "(AB)", "1.5", "B?", r"\textbf{A or B}", "{A, B}", "\u0391"),
        *("Options B and C", "Option B or C", "Option B, C", "B - C", "answer Bonn", "Option", "not B", "B\u2013C"),
        *("The answer is not B", "The answer isn't B", "The answer is A or B", "The answer is B and C", "B is wrong"),
        *("A. Paris\nB. London", "A) Paris B) London", "(A) Paris\n(B) London\n(C) Rome", "A\nB", "B is not correct"),
        *(
            "B. No, the answer is A",
            "B\nWait, the correct option is (C)",
            "The wrong answer is B",
            "B (or C)",
            "-1",
            "B?",
        ),
        *("The answer is a dog", "Answer: a dog", "The answer could be B", "Neither A nor B", "B is correct, or C"),
    ],
)
def test_no_label_and_more_than_one_are_no_choice(text: str) -> None:
    assert label_of(text) == ""


def test_schemas_decide_with_a_reason() -> None:
    schema = '{"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "maximum": 5}}}'
    assert schema_fault(schema, '{"a": 5}') is None
    assert schema_fault(schema, '{"a": 7}') == "$.a: 7 is greater than the maximum of 5"
    assert schema_fault(schema, "{}") == "$: 'a' is a required property"
    for no_json in ("", "{", "NaN", "{'a': 5}", "[" * 100_000, '{"a": 5} and more'):
        assert str(schema_fault("{}", no_json)).startswith("no JSON")


@pytest.mark.parametrize("schema", ['{"$ref": "#/$defs/a"}', '{"$ref": "#"}'])
def test_a_schema_that_cannot_decide_is_broken_and_no_answer_wrong(schema: str) -> None:
    with pytest.raises(BrokenSchema):
        schema_fault(schema, "1")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ('{"type": "objec"}', "is no JSON schema"),
        ("[]", "is no JSON schema"),
        ("x", "is no JSON schema"),
        ('{"const": NaN}', "NaN is no JSON"),
        ('{"not":' * 1000 + "{}" + "}" * 1000, "is no JSON schema"),
        ('{"properties": {"a": {"$ref": "http://169.254.169.254/x"}}}', "nothing is fetched"),
        ('{"$ref": "file:///etc/passwd"}', "nothing is fetched"),
    ],
)
def test_what_is_no_schema_is_refused(schema: str, said: str) -> None:
    assert said in str(expectation_fault(JSON_SCHEMA, schema))
    with pytest.raises(ValueError, match=r"is no |refers to|is a regular"):
        AnswerRow(expected=(schema,), comparison="json_schema")


@pytest.mark.parametrize("expression", ["a(", "(?P<a>.)(?P<a>.)", "a{99999999999}", "x" * 1001])
def test_what_is_no_expression_is_refused(expression: str) -> None:
    assert expectation_fault(REGULAR_EXPRESSION, expression)
    with pytest.raises(ValueError, match=r"is no |refers to|is a regular"):
        AnswerRow(expected=(expression,), comparison="regular_expression")


def test_an_expression_matches_the_whole_answer() -> None:
    rule = AnswerRow(expected=(r"\d{4}-\d\d-\d\d", "(?i)today"), comparison="regular_expression").rule()
    right = [fault_of(rule, text) is None for text in ("2024-02-29", " TODAY\n", "on 2024-02-29", "2024-02-291", "")]
    assert right == [True, True, False, False, False]


def test_a_choice_without_a_label_is_refused() -> None:
    with pytest.raises(ValueError, match="has no label"):
        AnswerRow(expected=("Paris",), comparison="choice")
