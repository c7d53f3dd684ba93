"""The example of a reward service is what the platform asks, and its OpenAPI document is the committed one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from services.verifier.http_scorer import IDEMPOTENCY, SIGNATURE, TIMESTAMP, ServiceAnswer, signature_of, verdicts_in

DOCS = Path(__file__).parents[3] / "docs"
BODY = json.dumps({"version": 1, "responses": ["57", "it is 57", "58"], "arguments": {"expected": ["57"]}}).encode()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("REWARD_SECRET", "s3")
    found = importlib.util.spec_from_file_location("reward_service", DOCS / "examples" / "reward_service.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(__import__("sys").modules, "reward_service", module)
    found.loader.exec_module(module)
    return module


def test_the_example_scores_what_the_platform_signs_and_refuses_all_else(example: Any) -> None:
    now = str(int(example.time.time()))
    kind = {"Content-Type": "application/json"}
    headers = {**kind, TIMESTAMP: now, IDEMPOTENCY: "k", SIGNATURE: signature_of("s3", now, BODY)}
    old = {TIMESTAMP: "1", SIGNATURE: signature_of("s3", "1", BODY)}
    with TestClient(example.app) as client:
        answered = client.post("/score", content=BODY, headers=headers)
        others = [
            client.post("/score", content=BODY + b" ", headers=headers),
            client.post("/score", content=BODY, headers=headers | {SIGNATURE: signature_of("other", now, BODY)}),
            client.post("/score", content=BODY, headers=headers | old),
        ]

    verdicts = verdicts_in(ServiceAnswer(answered.status_code, answered.content), "the example", 3, 1.0)
    assert [verdict.score for verdict in verdicts] == [1.0, 0.5, 0.0]
    assert [other.status_code for other in others] == [401] * 3


def test_the_contract_of_reward_services_is_that_of_the_example(example: Any) -> None:
    written = json.dumps(example.app.openapi(), indent=1) + "\n"
    assert (DOCS / "reward_service.openapi.json").read_text() == written
