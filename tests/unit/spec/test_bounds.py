"""Nothing in a JobSpec is without a bound: numbers, texts and lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.spec.job_spec import JobSpec, parse_job_spec

# What bounds a value of this JSON type.
BOUNDS = {
    "integer": {"maximum", "exclusiveMaximum", "enum", "const"},
    "number": {"maximum", "exclusiveMaximum", "enum", "const"},
    "string": {"maxLength", "enum", "const", "pattern"},
    "array": {"maxItems"},
    "object": {"maxProperties", "properties"},
}
MODEL = {"model": {"path": "/models/pi0"}}


def unbounded(node: Any, at: str) -> Iterator[str]:
    if isinstance(node, list):
        for place, member in enumerate(node):
            yield from unbounded(member, f"{at}/{place}")
    elif isinstance(node, dict):
        if isinstance(node.get("type"), str) and not BOUNDS.get(node["type"], node.keys()) & node.keys():
            yield at
        for name, member in node.items():
            if name != "default":
                yield from unbounded(member, f"{at}/{name}")


def test_every_field_of_a_job_spec_has_a_bound() -> None:
    assert list(unbounded(JobSpec.model_json_schema(), "")) == []


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({"model": {"path": "x" * 5000}}, "/model/path"),
        ({"model": {"path": "/models/\x00"}}, "/model/path"),
        ({"model": {"path": ""}}, "/model/path"),
        ({**MODEL, "tasks": {"kind": "jsonl", "path": "x" * 5000}}, "/tasks/path"),
        ({**MODEL, "tasks": {"kind": "jsonl", "path": "a", "evaluation_path": "\x00"}}, "/tasks/evaluation_path"),
        ({**MODEL, "tasks": {"difficulties": ["x" * 5000]}}, "/tasks/difficulties/0"),
        ({**MODEL, "trainer": {"update_interval": 2**40}}, "/trainer/update_interval"),
        ({**MODEL, "trainer": {"max_grad_norm": float("inf")}}, "/trainer/max_grad_norm"),
        ({**MODEL, "replay": {"online_capacity": 2**62}}, "/replay/online_capacity"),
        ({**MODEL, "evaluation": {"ks": [1] * 1000}}, "/evaluation/ks"),
        ({**MODEL, "evaluation": {"ks": [0]}}, "/evaluation/ks/0"),
    ],
)
def test_what_is_out_of_bounds_is_named(document: Any, pointer: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_job_spec(document)

    assert pointer in [fault.pointer for fault in caught.value.violations]
