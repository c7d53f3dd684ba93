"""Batches are put together from stored bytes; receivers must not see a difference."""

from __future__ import annotations

import pytest

from services.replay_buffer.store import CHUNK_BYTES, CHUNK_TRAJECTORIES, SampledPayload, chunks, encode_batch
from spo.testing.runs import trajectory
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
