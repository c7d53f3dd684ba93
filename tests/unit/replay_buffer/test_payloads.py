"""Batches are put together from stored bytes; receivers must not see a difference."""

from __future__ import annotations

import pytest

from services.replay_buffer.store import (
    CHUNK_BYTES,
    CHUNK_TRAJECTORIES,
    SampledPayload,
    chunks,
    content_digest,
    encode_batch,
    encode_parts,
)
from spo.rpc.client import PART_BYTES
from spo.testing.runs import trajectory
from spo.v1.prompt_pb2 import SOURCE_HUMAN
from spo.v1.replay_service_pb2 import SampleBatchResponse, SampledTrajectory


@pytest.mark.parametrize("characters", [0, 1, 100, 20_000, 3_000_000])
def test_a_batch_is_the_same_as_one_encoded_from_messages(characters: int) -> None:
    found = [trajectory(number, text="x" * characters) for number in range(3)]
    values = [-0.25, 0.0, -1.0]

    answer = encode_batch(
        SampledPayload(sample.SerializeToString(), value) for sample, value in zip(found, values, strict=True)
    )

    expected = [SampledTrajectory(trajectory=sample, qhat_0=value) for sample, value in zip(found, values, strict=True)]
    assert SampleBatchResponse.FromString(answer) == SampleBatchResponse(batch=expected)


def test_an_empty_batch_is_an_empty_message() -> None:
    assert SampleBatchResponse.FromString(encode_batch([])) == SampleBatchResponse()


@pytest.mark.parametrize("sizes", [[], [1], [CHUNK_BYTES * 2, 1, CHUNK_BYTES * 2], [CHUNK_BYTES // 3] * 10, [2] * 1000])
def test_no_script_call_carries_too_much_and_none_is_left_out(sizes: list[int]) -> None:
    payloads = [bytes(size) for size in sizes]
    cut = [payloads[chunk] for chunk in chunks(payloads)]

    assert [payload for chunk in cut for payload in chunk] == payloads
    for chunk in cut:
        assert 1 <= len(chunk) <= CHUNK_TRAJECTORIES
        assert len(chunk) == 1 or sum(map(len, chunk)) <= CHUNK_BYTES


@pytest.mark.parametrize("megabytes", [[], [1], [9], [3] * 10, [9, 1, 9], [1, 7, 1, 8, 1]])
@pytest.mark.parametrize("without_texts", [False, True])
def test_parts_hold_the_batch_in_order_and_none_is_larger_than_it_must_be(
    megabytes: list[int], without_texts: bool
) -> None:
    found = [trajectory(number, text="x" * (count << 20)) for number, count in enumerate(megabytes)]
    payloads = [SampledPayload(sample.SerializeToString(), -0.5, 0.25) for sample in found]

    parts = list(encode_parts(payloads, without_texts=without_texts))

    for sample in found if without_texts else ():
        sample.response_text = ""
    received = [sampled for part in parts for sampled in SampleBatchResponse.FromString(part).batch]
    assert received == [SampledTrajectory(trajectory=sample, qhat_0=-0.5, qhat_0_error=0.25) for sample in found]
    for part in parts:
        assert len(part) < PART_BYTES + 10_000 or len(SampleBatchResponse.FromString(part).batch) == 1
    assert len(parts) <= 1 or not without_texts


def block(program: str) -> str:
    return f"```python\n{program}\n```\n"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("print(1)", "print( 1 )  # one", True),
        (block("print(1)"), "So:\n" + block("print( 1 )"), True),
        (block("print(1)") + block("print(2)"), block("print( 1 )") + "No.\n" + block("print(2)"), True),
        (block("print(1)") + block("print(2)"), block("print(1)") + block("print(3)"), False),
        (block("print(1)") + block("print(2)"), block("print(0)") + block("print(2)"), False),
        (block("print(1)") + block("print(2)"), block("print(1)"), False),
        ("the answer is 4", "the answer is 4 ", True),
        ("the answer is 4", "the answer is 5", False),
    ],
)
def test_offline_responses_are_the_same_by_the_programs_that_any_format_may_take(
    one: str, other: str, same: bool
) -> None:
    digests = [content_digest(trajectory(0, source=SOURCE_HUMAN, text=text)) for text in (one, other)]
    assert "" not in digests
    assert (digests[0] == digests[1]) is same
