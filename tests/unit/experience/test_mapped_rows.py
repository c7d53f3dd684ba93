"""Rows of other programs' logs: which of their fields is which of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spo.api.experience import KNOWN_LOGS, KnownLog
from spo.errors import InvalidInput
from spo.experience.imports import UploadedRow, check_mapping, mapped

CHAT = {
    "request": {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]},
    "response": {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]},
    "attributes.score": 0.5,
}
PATHS = {
    "statement": "request.messages.-1.content",
    "response_text": "response.choices.0.message.content",
    "reward": "attributes.score",
}


def test_paths_go_into_objects_and_lists_and_names_may_have_dots() -> None:
    check_mapping(PATHS)
    assert mapped(UploadedRow(1, CHAT), PATHS).fields == {"statement": "2+2?", "response_text": "4", "reward": 0.5}


@pytest.mark.parametrize("path", ["request.messages.9.content", "request.nothing.more", "response.choices.x", "none"])
def test_what_is_not_there_is_left_out(path: str) -> None:
    assert mapped(UploadedRow(1, CHAT), {"statement": path}).fields == {}


def test_right_and_wrong_are_rewards() -> None:
    found: dict[str, Any] = mapped(UploadedRow(1, {"ok": True}), {"reward": "ok"}).fields or {}
    assert found == {"reward": 1.0}


@pytest.mark.parametrize("fields", [{"nobody": "a"}, {"statement": ""}, {"statement": "a..b"}])
def test_a_mapping_that_is_none_is_refused_by_name(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_mapping(fields)
    assert refused.value.violations[0].pointer == f"/fields/{next(iter(fields))}"


def test_the_next_path_is_taken_where_none_or_no_text_lies_at_the_first() -> None:
    paths = {"statement": "none.at.all|request|request.messages.0.content"}
    assert mapped(UploadedRow(1, CHAT), paths).fields == {"statement": "be brief"}


def test_paths_go_into_text_that_is_json_and_not_into_other_text() -> None:
    row = {"input": json.dumps(CHAT["request"]), "deep": "[" * 100_000, "broken": '{"a":', "plain": "a"}
    assert mapped(UploadedRow(1, row), {"statement": "input.messages.-1.content"}).fields == {"statement": "2+2?"}
    for name in ("deep", "broken", "plain"):
        assert mapped(UploadedRow(1, row), {"statement": f"{name}.0.a"}).fields == {}


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
ANSWER = {"role": "assistant", "content": "4"}
COMPLETION = {"id": "a1", "model": "m", "choices": [{"message": ANSWER}]}
LOGGED: list[tuple[KnownLog, dict[str, Any]]] = [
    ("openai", {"request": {"model": "m", "messages": MESSAGES}, "response": COMPLETION}),
    ("openai", {"messages": MESSAGES, **COMPLETION}),
    ("openai", {"prompt": "2+2?", "id": "a1", "model": "m", "choices": [{"text": "4"}]}),
    ("langfuse", {"id": "a1", "provided_model_name": "m", "input": MESSAGES, "output": ANSWER}),
    ("langfuse", {"id": "a1", "model": "m", "input": json.dumps({"messages": MESSAGES}), "output": json.dumps(ANSWER)}),
    ("langfuse", {"id": "a1", "model": "m", "input": "2+2?", "output": "4"}),
    (
        "phoenix",
        {
            "context.span_id": "a1",
            "attributes.llm.model_name": "m",
            "attributes.llm.input_messages": [{"message.role": "user", "message.content": "2+2?"}],
            "attributes.llm.output_messages": [{"message.role": "assistant", "message.content": "4"}],
            "attributes.input.value": "the whole request",
        },
    ),
    (
        "phoenix",
        {
            "context.span_id": "a1",
            "attributes.llm.model_name": "m",
            "attributes.input.value": "2+2?",
            "attributes.output.value": "4",
        },
    ),
]


@pytest.mark.parametrize(("log", "row"), LOGGED)
def test_known_logs_need_no_map(log: KnownLog, row: dict[str, Any]) -> None:
    check_mapping(KNOWN_LOGS[log])
    found = mapped(UploadedRow(1, row), KNOWN_LOGS[log]).fields
    assert found == {"statement": "2+2?", "response_text": "4", "trajectory_id": "a1", "sampler": "m"}
