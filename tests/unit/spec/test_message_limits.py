"""Jobs whose trajectories, groups or batches are twice what a message holds: they train, or are refused by field."""

from __future__ import annotations

from typing import Any

import pytest

from spo.errors import InvalidInput
from spo.rpc.client import MAX_TRAJECTORY_BYTES
from spo.spec.job_spec import ENTRY_BYTES, PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES, parse_job_spec
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


def test_the_longest_trajectory_that_a_job_may_have_is_one_message() -> None:
    schema = ModelSpec.model_json_schema()["properties"]
    prompt, response = (schema[f"max_{part}_tokens"]["maximum"] for part in ("prompt", "response"))
    assert PROMPT_TOKEN_BYTES * prompt + RESPONSE_TOKEN_BYTES * response < MAX_TRAJECTORY_BYTES
