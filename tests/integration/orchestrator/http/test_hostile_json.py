"""JSON that nobody well-meaning sends, wherever a body is taken: a typed refusal, and the next request is answered."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

Document = dict[str, Any]
JOB = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"
TAKES_JSON = [
    ("POST", "/v1/jobs"),
    ("POST", "/v1/jobs?validate_only=true"),
    ("POST", f"/v1/jobs/{JOB}/fork"),
    ("POST", f"/v1/jobs/{JOB}/weights/push"),
    ("POST", "/v1/evaluations"),
    ("POST", f"/v1/policies/{JOB}/completions"),
    ("POST", "/v1/keys"),
    ("POST", "/v1/experience/export"),
    ("POST", "/v1/experience/rejudge"),
    ("PUT", "/v1/scale/inference"),
]
# Each in place of a value.
VALUES = {
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "a large integer": "9" * 400,
    "a larger integer": "9" * 5000,
    "a large exponent": "1e999",
    "half a character": r'"\ud800"',
    "half a character, escaped twice": r'"a\udfff\ud800b"',
    "NUL": r'"a\u0000b"',
    "depth": "[" * 5000 + "]" * 5000,
    "some depth": '{"a":' * 40 + "1" + "}" * 40,
    "a long text": json.dumps("x" * 300_000),
    "a long list": json.dumps([0] * 100_000),
    "a key twice": '{"a": 1, "a": 2}',
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize(("method", "path"), TAKES_JSON)
def test_a_hostile_value_is_refused_as_a_problem(api: httpx.Client, method: str, path: str, name: str) -> None:
    value = VALUES[name]
    headers = {"Content-Type": "application/json"}
    for body in (value, f'{{"name": {value}, "job_id": {value}, "model": {{"path": {value}}}, "prompt": {value}}}'):
        answer = api.request(method, path, content=body.encode(), headers=headers)
        assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
        assert answer.headers["content-type"] == "application/problem+json", answer.text[:300]
        assert len(answer.content) < 20_000


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"name": "\ud800"}, "/name"),
        ({"labels": {"\ud800": "x"}}, "/labels"),
        ({"labels": {"x" * 5000: "x"}}, "/labels"),
        ({"labels": {"x": "x" * 5000}}, "/labels/x"),
        ({"name": "x" * 5000}, "/name"),
        ({"seed": 2**63}, "/seed"),
        ({"rollout": {"follow": "job\x00"}}, "/rollout/follow"),
        ({"offline": {"experience": [{"run": "x" * 5000}]}}, "/offline/experience/0/run"),
        ({"tasks": {"kind": "jsonl", "path": "a\x00.jsonl"}}, "/tasks/path"),
        ({"tasks": {"kind": "dataset", "id": "ds_\x00"}}, "/tasks/id"),
    ],
)
def test_a_field_out_of_bounds_is_pointed_at(
    api: httpx.Client, document: Document, fields: Document, pointer: str
) -> None:
    answer = api.post(
        "/v1/jobs", content=json.dumps({**document, **fields}), headers={"Content-Type": "application/json"}
    )

    assert 400 <= answer.status_code < 500, answer.text[:300]
    if answer.json()["code"] != "malformed_json":
        assert any(fault["pointer"].startswith(pointer) for fault in answer.json()["errors"]), answer.text[:500]
    assert api.get("/v1/jobs").json()["items"] == []
