"""Who submits a job learns at once what may not fit the replicas that live; nothing is refused for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo.spec.job_spec import parse_job_spec
from spo.spec.plan import changed, memory_advice, shape_of_folder
from spo.spec.section import LEAST_OF_ADAPTERS
from spo.tasks import mathematics
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest

# Large enough that a device of a gigabyte is short of it, and nothing of it is ever loaded.
SIZES = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
}
GIGABYTE = 10**9


@pytest.fixture
def context(open_context: Callable[..., AppContext]) -> AppContext:
    # Replicas beat once here, and a check of the model may take longer than a silent one is known.
    return open_context(replica_silence_seconds=600)


@pytest.fixture
def document(document: dict[str, Any]) -> dict[str, Any]:
    """The document with a temperature against which nothing speaks."""
    return {**document, "algorithm": {"beta": 0.3}}


@pytest.fixture
def real(document: dict[str, Any]) -> dict[str, Any]:
    """The document with a model of 0.5B's sizes, but for its vocabulary."""
    config = Path(document["model"]["path"]) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SIZES))
    return document


def beat(context: AppContext, pool: str, *devices: int, accelerated: bool = False) -> None:
    context.replicas.beat(
        HeartbeatRequest(
            replica_id=f"{pool}-{devices}", pool=pool, device_memory_bytes=devices, accelerated=accelerated
        )
    )


def warned(api: httpx.Client, document: dict[str, Any]) -> dict[str, str]:
    answer = api.post("/v1/jobs?validate_only=true", json=document)
    assert answer.status_code == 200, answer.text
    return {each["pointer"]: each["message"] for each in answer.json()["warnings"]}


def test_each_role_that_cannot_hold_the_job_is_a_warning_with_what_helps(
    api: httpx.Client, context: AppContext, real: dict[str, Any]
) -> None:
    assert warned(api, real) == {}
    for pool in ("trainer", "inference", "value-estimation"):
        beat(context, pool, GIGABYTE // 2, GIGABYTE // 2, accelerated=True)

    found = warned(api, real)

    assert list(found) == ["/trainer", "/model/max_response_tokens", "/model/path"]
    assert "each of 2 ranks needs" in found["/trainer"]
    assert "no setting makes it fit" in found["/trainer"]
    # Whoever has room takes the job.
    for pool in ("trainer", "inference", "value-estimation"):
        beat(context, pool, 80 * GIGABYTE, accelerated=True)
    assert warned(api, real) == {}


def test_the_warning_points_at_the_setting_that_helps(
    api: httpx.Client, context: AppContext, real: dict[str, Any]
) -> None:
    beat(context, "trainer", *[4 * GIGABYTE] * 8)

    (pointer, message), *_ = warned(api, real).items()

    assert pointer.startswith("/trainer/")
    assert f"with trainer.{pointer.rpartition('/')[2]}: " in message
    spec = parse_job_spec(real)
    helps = memory_advice(spec, shape_of_folder(Path(spec.model.path)), 8, 4 * GIGABYTE).changes
    assert helps
    assert context.plan_warnings.of(changed(spec, helps)) == []


def test_an_engine_on_a_cpu_is_judged_by_nobody(api: httpx.Client, context: AppContext, real: dict[str, Any]) -> None:
    beat(context, "inference", GIGABYTE)

    assert warned(api, real) == {}


def test_the_answer_to_a_submission_and_the_job_have_the_warnings_and_the_job_is_taken(
    api: httpx.Client, context: AppContext, real: dict[str, Any]
) -> None:
    beat(context, "trainer", GIGABYTE // 2)
    resolved = api.post("/v1/jobs?validate_only=true", json=real).json()

    submitted = api.post("/v1/jobs", json=resolved)

    assert submitted.status_code == 202
    assert submitted.json()["warnings"] == resolved["warnings"] != []
    job_id = submitted.json()["id"]
    assert api.get(f"/v1/jobs/{job_id}").json()["warnings"] == resolved["warnings"]
    message = resolved["warnings"][0]["message"].replace("`", "")[:40]
    assert message in api.get(f"/jobs/{job_id}").text.replace("`", "")
    form = {"spec": json.dumps(real), "check": "1"}
    assert message in api.post("/submit", data=form).text.replace("`", "")
    assert message in api.post("/submit", data={"spec": json.dumps(real)}).text.replace("`", "")


def test_a_share_that_no_term_learns_from_is_a_warning_at_submission(
    api: httpx.Client, document: dict[str, Any]
) -> None:
    losses = [{"objective": "terminal_squared", "sources": ["online"]}]
    mix = [{"source": "online", "share": 0.75}, {"source": "reference", "share": 0.25}]
    document = {**document, "algorithm": {**document["algorithm"], "losses": losses}, "replay": {"mix": mix}}

    answer = api.post("/v1/jobs", json=document)

    assert answer.status_code == 202, answer.text
    (warning,) = answer.json()["warnings"]
    assert warning["pointer"] == "/replay/mix/1/source"
    assert warning["message"].startswith("no term of algorithm.losses learns from reference: 25% of each batch")


@pytest.mark.parametrize(("rate", "warns"), [(1e-6, True), (LEAST_OF_ADAPTERS, False), (3e-3, False)])
def test_an_adapter_that_learns_at_the_rate_of_all_weights_is_a_warning(
    context: AppContext, document: dict[str, Any], rate: float, warns: bool
) -> None:
    spec = {**document, "trainer": {**document["trainer"], "learning_rate": rate}}
    whole = parse_job_spec(spec)
    adapter = parse_job_spec({**spec, "model": {**document["model"], "lora": {}}})

    assert context.plan_warnings.of(whole) == []
    assert [each.pointer for each in context.plan_warnings.of(adapter)] == ["/trainer/learning_rate"] * warns


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        # 44 tokens at most. The paper's is what collapses here, 1 / ln 100 what lives.
        ({"beta": 1 / math.log(100_000)}, "for 0.26 to 1 nats"),
        ({"beta": 1 / math.log(100)}, ""),
        ({"beta": 0.001}, "a beta of 0.16 to 9.1"),
        ({"beta": 20}, "for 0.0011 to 0.0045 nats"),
        ({"beta": 10, "beta_per": "token"}, ""),
        ({"beta": 0.3, "beta_per": "token"}, "asks each token of a response for 3.3 nats"),
        ({"beta": 0.001, "losses": [{"objective": "supervised"}]}, ""),
    ],
)
def test_a_temperature_that_asks_too_much_or_too_little_of_a_token_is_a_warning(
    context: AppContext, document: dict[str, Any], algorithm: dict[str, Any], said: str
) -> None:
    found = context.plan_warnings.of(parse_job_spec({**document, "algorithm": algorithm}))

    assert [each.pointer for each in found] == ["/algorithm/beta"] * bool(said)
    assert not said or said in found[0].message


def test_values_of_a_sharper_pi0_than_the_loss_knows_are_a_warning_where_a_loss_reads_them(
    context: AppContext, document: dict[str, Any]
) -> None:
    sharper = {**document, "value": {"samples": 8, "temperature": 0.4, "top_p": 0.95}}
    found = context.plan_warnings.of(parse_job_spec(sharper))
    assert [each.pointer for each in found] == ["/value/temperature", "/value/top_p"]
    imitated = {**sharper, "algorithm": {"losses": [{"objective": "supervised"}]}}
    assert context.plan_warnings.of(parse_job_spec(imitated)) == []


def test_once_responses_are_known_their_mean_length_decides(
    api: httpx.Client, context: AppContext, document: dict[str, Any]
) -> None:
    """At submission they may be of 11 to 44 tokens, which suits a beta of 1; of 4 tokens it asks too much."""
    document = {**document, "algorithm": {"beta": 1.0}}
    answer = api.post("/v1/jobs", json=document)
    assert answer.status_code == 202
    assert answer.json()["warnings"] == []
    job_id = answer.json()["id"]

    point = json.dumps({"step": 1, "response_length": 4.0})
    context.redis.zadd(own_keys.job_metrics(job_id), {point: 1})

    (warning,) = api.get(f"/v1/jobs/{job_id}").json()["warnings"]
    assert warning["pointer"] == "/algorithm/beta"
    assert "4 tokens, the mean so far," in warning["message"]


def test_what_of_the_rows_is_left_out_or_not_looked_at_is_a_warning(
    api: httpx.Client, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mathematics, "LIBRARY", "no_such_package")
    answer = {"comparison": "math", "extraction": "boxed", "expected": ["x+1"]}
    more = {"answer": answer, "human_solutions": ["\\boxed{x+1}"]}
    rows = [json.dumps({"statement": statement, **more}) for statement in ("a?", "b?", "a?", "c?")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    tasks = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "evaluation_problems": 1}

    answered = api.post("/v1/jobs?validate_only=true", json={**document, "tasks": tasks})

    assert answered.status_code == 200, answered.text
    told = [each["message"] for each in answered.json()["warnings"] if each["pointer"] == "/tasks"]
    assert "1 rows that say what another says are left out" in told
    assert any("1 expected answers of the comparison math were not looked at" in each for each in told), told
