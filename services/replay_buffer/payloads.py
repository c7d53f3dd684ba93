"""Trajectories as serialized bytes: a cache of those seen last, and the response of SampleBatch made of them.

Decoding a payload only to encode it again would take most of the time of a batch. So the response is written here as
protobuf's wire format has it: a field is its number and type, and for anything but a number also its length.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from spo import redis_keys
from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.rpc.client import MAX_MESSAGE_BYTES
from spo.v1.replay_service_pb2 import SampleBatchResponse, SampledTrajectory
from spo.v1.trajectory_pb2 import Trajectory

_LENGTH_DELIMITED, _DOUBLE = 2, 1
_BATCH = bytes([SampleBatchResponse.BATCH_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_TRAJECTORY = bytes([SampledTrajectory.TRAJECTORY_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_VALUE = struct.Struct("<BdBd")
_QHAT_0_TAG = SampledTrajectory.QHAT_0_FIELD_NUMBER << 3 | _DOUBLE
_ERROR_TAG = SampledTrajectory.QHAT_0_ERROR_FIELD_NUMBER << 3 | _DOUBLE


class SampledPayload(NamedTuple):
    """A serialized Trajectory, and Qhat_0 of its prompt with its standard error in reward units."""

    payload: bytes
    qhat_0: float
    error: float = 0.0

    @property
    def trajectory(self) -> Trajectory:
        return Trajectory.FromString(self.payload)


class PayloadCache:
    """Payloads by id, read through to Redis; a payload never changes, so what is cached stays valid."""

    def __init__(self, client: RedisClient, capacity_bytes: int) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._capacity_bytes = capacity_bytes
        self._held_bytes = 0
        self._cached: dict[tuple[str, str], bytes] = {}

    def put(self, run_id: str, trajectory_id: str, payload: bytes) -> None:
        """Cache a payload; the oldest are evicted first, as batches are sampled from the newest experience."""
        with self._lock:
            if self._cached.setdefault((run_id, trajectory_id), payload) is payload:
                self._held_bytes += len(payload)
            while self._held_bytes > self._capacity_bytes:
                self._held_bytes -= len(self._cached.pop(next(iter(self._cached))))

    def get(self, run_id: str, trajectory_ids: Sequence[str]) -> list[bytes | None]:
        """Payloads by id, None where absent."""
        cached = [self._cached.get((run_id, trajectory_id)) for trajectory_id in trajectory_ids]
        if None not in cached:
            return cached
        found = dict(zip(trajectory_ids, cached, strict=True))
        missing = [trajectory_id for trajectory_id, payload in found.items() if payload is None]
        keys = [redis_keys.replay_trajectory(run_id, trajectory_id) for trajectory_id in missing]
        for trajectory_id, payload in zip(missing, self.client.mget(keys), strict=True):
            if payload is not None:
                found[trajectory_id] = payload
                self.put(run_id, trajectory_id, payload)
        return [found[trajectory_id] for trajectory_id in trajectory_ids]


def encode_batch(batch: Iterable[SampledPayload]) -> bytes:
    """A serialized SampleBatchResponse. Raises InvalidInput when it is too large for a message."""
    parts: list[bytes] = []
    for payload, qhat_0, error in batch:
        length = _varint(len(payload))
        sample_length = len(_TRAJECTORY) + len(length) + len(payload) + _VALUE.size
        value = _VALUE.pack(_QHAT_0_TAG, qhat_0, _ERROR_TAG, error)
        parts += (_BATCH, _varint(sample_length), _TRAJECTORY, length, payload, value)
    encoded = b"".join(parts)
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise InvalidInput(
            f"the batch of {len(parts) // 6} trajectories has {len(encoded)} bytes, more than a message's"
            f" {MAX_MESSAGE_BYTES}: take a smaller trainer.batch_size, or shorter responses",
            code="batch_too_large",
        )
    return encoded


@lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first; the eighth says that more follow."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)
