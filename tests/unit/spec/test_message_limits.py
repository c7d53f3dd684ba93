"""Jobs whose trajectories, groups or batches are twice what a message holds: they train, or are refused by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.orchestrator.checks import PlanWarnings
from spo.errors import InvalidInput
from spo.rpc.client import MAX_MESSAGE_BYTES, MAX_TRAJECTORY_BYTES
from spo.spec.job_spec import ENTRY_BYTES, PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES, JobSpec, parse_job_spec
from spo.spec.plan import (
    LIKELY_SHARE,
    MESSAGE_BYTES,
    STOP_SHARE,
    STORED_BYTES,
    STORED_TOKEN_BYTES,
    Device,
    named_shape,
    plan_job,
    system_limits,
)
from spo.spec.section import read_stored
from spo.spec.tasks import ModelSpec


def document(batch: int, tokens: int, samples: int = 4, prompt: int = 1000) -> dict[str, Any]:
    model = {"path": "/pi0", "max_prompt_tokens": prompt, "max_response_tokens": tokens}
    rollout = {"samples_per_prompt": samples}
    return {"model": model, "trainer": {"batch_size": batch}, "rollout": rollout}


HALF = ENTRY_BYTES // (PROMPT_TOKEN_BYTES * 1000 + RESPONSE_TOKEN_BYTES * 32_768)


@pytest.mark.parametrize(
    ("batch", "tokens", "samples", "pointer"),
    [
        # One batch: as many messages as it needs.
        (256, 32_768, 4, ""),
        (512, 16_384, 4, ""),
        (1024, 8192, 4, ""),
        (8192, 32_768, 4, ""),
        (128, 1_000_000, 4, ""),
        # One trajectory, and one group of them.
        (128, 2_000_000, 4, "/model/max_response_tokens"),
        (128, 32_768, HALF, ""),
        (128, 32_768, 2 * HALF, "/rollout/samples_per_prompt"),
        (128, 1_000_000, 64, "/rollout/samples_per_prompt"),
    ],
)
def test_what_no_message_holds_travels_in_parts_or_is_refused_by_field(
    batch: int, tokens: int, samples: int, pointer: str
) -> None:
    sizes = document(batch * samples if samples > 64 else batch, tokens, samples)
    if not pointer:
        parse_job_spec(sizes)
        return
    with pytest.raises(InvalidInput) as caught:
        parse_job_spec(sizes)
    assert [violation.pointer for violation in caught.value.violations] == [pointer]


SHAPE = named_shape("llama-3-8b")
REDIS_BYTES = 3 << 30


def with_window(trajectories: int) -> dict[str, Any]:
    return document(128, 4096) | {"replay": {"online_capacity": trajectories}, "trainer": {"steps": 1, "batch_size": 2}}


def with_batches(steps: int) -> dict[str, Any]:
    return document(128, 4096) | {"trainer": {"steps": 10**6, "checkpoint_interval": steps}}


def trajectory_bytes(tokens: int) -> int:
    return STORED_BYTES + int(STORED_TOKEN_BYTES * LIKELY_SHARE * (tokens + 1000))


ROOM = int(STOP_SHARE * REDIS_BYTES) // trajectory_bytes(4096)
# Each limit of the system: a job at half of it, one at twice, and the field that is named.
WALK = {
    "a trajectory in a message": (
        document(128, MESSAGE_BYTES // RESPONSE_TOKEN_BYTES // 2, 1),
        document(128, MESSAGE_BYTES // RESPONSE_TOKEN_BYTES * 2, 1),
        "/model/max_response_tokens",
    ),
    "a prompt's samples in an entry of Redis": (
        document(8 * HALF, 32_768, HALF // 2),
        document(8 * HALF, 32_768, 2 * HALF),
        "/rollout/samples_per_prompt",
    ),
    "prompt and response in the model's positions": (
        document(128, SHAPE.positions // 2),
        document(128, SHAPE.positions * 2),
        "/model/max_response_tokens",
    ),
    "attention heads over ranks": (
        document(128, 4096) | {"trainer": {"sequence_parallel": SHAPE.heads // 2}},
        document(128, 4096) | {"trainer": {"sequence_parallel": 2 * SHAPE.heads}},
        "/trainer/sequence_parallel",
    ),
    "trajectories in Redis": (with_window(ROOM // 2), with_window(2 * ROOM), "/replay/online_capacity"),
    # A half of each batch is live and is served twice: 32 fresh ones a step, kept for three intervals.
    "trajectories in Redis, of batches": (
        with_batches(ROOM // (3 * 32) // 20 * 10),
        with_batches(2 * ROOM // (3 * 32) // 10 * 10),
        "/trainer/checkpoint_interval",
    ),
}


@pytest.mark.parametrize("name", WALK)
def test_every_limit_of_the_system_is_known_to_the_plan_and_where_a_job_is_submitted(name: str) -> None:
    """At half of it nothing is said; at twice the field is named, by a refusal or in a warning."""
    half, twice, pointer = WALK[name]
    name = name.partition(",")[0]
    # Of positions and Redis only the one that is looked at: long responses go beyond several limits.
    roomy = replace(SHAPE, positions=SHAPE.positions if "positions" in name else 0)
    redis_bytes = REDIS_BYTES if name == "trajectories in Redis" else 0
    assert all(limit.is_met for limit in system_limits(parse_job_spec(half), roomy, redis_bytes))
    spec = read_stored(JobSpec, twice, "a spec that is not checked")
    exceeded = next(limit for limit in system_limits(spec, roomy, redis_bytes) if limit.name == name)
    assert not exceeded.is_met
    assert exceeded.pointer == pointer
    assert any(exceeded.words in told for told in plan_job(spec, roomy, 8, Device(), redis_bytes).warnings)
    if name in ("prompt and response in the model's positions", "attention heads over ranks"):
        # From the folder's configuration: tests/integration/orchestrator/lifecycle/test_model_check.py.
        return
    try:
        told = PlanWarnings(NoReplicas(), lambda: REDIS_BYTES).of(parse_job_spec(twice))  # type: ignore[arg-type]
    except InvalidInput as refused:
        told = list(refused.violations)
    assert pointer in [violation.pointer for violation in told]


def test_the_walk_has_every_limit_and_messages_have_the_sizes_that_the_plan_knows() -> None:
    shared = document(128, 4096) | {"trainer": {"sequence_parallel": 2}}
    known = {limit.name for limit in system_limits(parse_job_spec(shared), SHAPE, REDIS_BYTES)}
    assert known == {name.partition(",")[0] for name in WALK}
    assert MESSAGE_BYTES == MAX_TRAJECTORY_BYTES
    assert 2 * MESSAGE_BYTES == MAX_MESSAGE_BYTES


class NoReplicas:
    def live(self) -> list[object]:
        return []


def test_the_longest_trajectory_that_a_job_may_have_is_one_message() -> None:
    schema = ModelSpec.model_json_schema()["properties"]
    prompt, response = (schema[f"max_{part}_tokens"]["maximum"] for part in ("prompt", "response"))
    assert PROMPT_TOKEN_BYTES * prompt + RESPONSE_TOKEN_BYTES * response < MAX_TRAJECTORY_BYTES
