"""Rows of other programs' logs: which of their fields is which of ours."""

from __future__ import annotations

from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.experience.mapped_rows import check_mapping, mapped
from spo.experience.uploads import UploadedRow

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
