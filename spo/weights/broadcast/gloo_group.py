"""A group of processes over gloo, for CPU memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from spo.weights.broadcast.rendezvous import BroadcastFailed


class GlooGroup:
    """The members of one transfer; every call ends by `ends` (monotonic). Raises BroadcastFailed."""

    def __init__(self, store: Store, key: str, rank: int, world_size: int, *, address: str, ends: float) -> None:
        self._ends = ends
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = self._left()
        try:
            self._group = ProcessGroupGloo(PrefixStore(f"{key}/gloo", store), rank, world_size, options)
        except RuntimeError as error:
            raise BroadcastFailed(f"the group was not formed: {error}") from error

    def _left(self) -> timedelta:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise BroadcastFailed("the transfer took longer than it may")
        return timedelta(seconds=left)

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0: broadcast tensors one after the other."""
        for tensor in tensors:
            self.broadcast(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        """Send (rank 0) or fill (the others) one contiguous tensor of CPU memory."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._left()
        try:
            flat = [tensor.reshape(-1).view(torch.uint8)]
            self._group.broadcast(flat, options).wait(options.timeout)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise BroadcastFailed(f"the transfer broke off: {error}") from error

    def destroy(self) -> None:
        """Leave the group."""
        del self._group
