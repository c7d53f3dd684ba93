"""The answer of SampleBatch, put together from trajectories as they are stored.

Decoding and encoding again what is only passed on would take most of the time of a batch. So the bytes are written here
as protobuf's wire format has them: a field is its number and type, and for anything but a number also its length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from spo.v1.replay_service_pb2 import SampleBatchResponse, SampledTrajectory
from spo.v1.trajectory_pb2 import Trajectory

_LENGTH_DELIMITED, _DOUBLE = 2, 1
_BATCH = bytes([SampleBatchResponse.BATCH_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_TRAJECTORY = bytes([SampledTrajectory.TRAJECTORY_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_QHAT_0 = struct.Struct("<Bd")
_QHAT_0_TAG = SampledTrajectory.QHAT_0_FIELD_NUMBER << 3 | _DOUBLE


class Drawn(NamedTuple):
    """A serialized Trajectory and Qhat_0 of its prompt in reward units."""

    payload: bytes
    qhat_0: float

    @property
    def trajectory(self) -> Trajectory:
        return Trajectory.FromString(self.payload)


def batch_bytes(batch: Iterable[Drawn]) -> bytes:
    """A serialized SampleBatchResponse."""
    parts: list[bytes] = []
    for payload, qhat_0 in batch:
        length = _varint(len(payload))
        sample_length = len(_TRAJECTORY) + len(length) + len(payload) + _QHAT_0.size
        parts += (_BATCH, _varint(sample_length), _TRAJECTORY, length, payload, _QHAT_0.pack(_QHAT_0_TAG, qhat_0))
    return b"".join(parts)


def _varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first; the eighth says that more follow."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)
