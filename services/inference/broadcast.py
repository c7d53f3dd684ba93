"""A version that a trainer sends: joined when the engine is ready for it, at most once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from spo.errors import IntegrityError
from spo.model.adapter_folder import Shapes
from spo.v1.weights_pb2 import BroadcastOffer
from spo.weights.assembly import digest_of, whole_entries
from spo.weights.broadcast.rendezvous import BroadcastFailed, connect, join, read_roster
from spo.weights.broadcast.shards import layout


@dataclass(frozen=True)
class JoinedBroadcast:
    """A transfer that has counted this replica in: what its workers need to know, and how much will come."""

    host: str
    port: int
    key: str
    transport: str
    first_rank: int
    size_bytes: int


@dataclass(eq=False)
class OfferedBroadcast:
    """An offer whose sender answers. manifest_digest: of the announced version; check_shapes: raises IntegrityError."""

    offer: BroadcastOffer
    store: Store
    manifest_digest: str
    check_shapes: Callable[[Shapes], None]
    _once: threading.Lock = field(default_factory=threading.Lock)

    def join(self, processes: int) -> JoinedBroadcast:
        """Count this replica's processes in and wait for the group to be complete.

        Raises BroadcastFailed when it comes too late, or a second time, and IntegrityError when it is another version.
        """
        if not self._once.acquire(blocking=False):
            raise BroadcastFailed("a version is sent once")
        offer = self.offer
        first_rank = join(self.store, offer.key, processes, offer.window_seconds)
        roster = read_roster(self.store, offer.key, wait_seconds=1.0)
        if digest_of(roster.manifest) != self.manifest_digest:
            raise IntegrityError("the trainer sends another version than was announced")
        self.check_shapes({tensor.name: tensor.shape for header in roster.headers for tensor in layout(header)})
        size_bytes = sum(int(entry["size_bytes"]) for entry in whole_entries(roster.manifest))
        return JoinedBroadcast(offer.host, offer.port, offer.key, offer.transport, first_rank, size_bytes)


def reached(
    offer: BroadcastOffer, manifest_digest: str, check_shapes: Callable[[Shapes], None]
) -> OfferedBroadcast | None:
    """The offer, if this replica can take part: its sender answers, and NCCL has a GPU here."""
    if offer.transport == "nccl" and not torch.cuda.is_available():
        return None
    try:
        return OfferedBroadcast(offer, connect(offer.host, offer.port), manifest_digest, check_shapes)
    except BroadcastFailed:
        return None
