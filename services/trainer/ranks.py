"""The trainer's processes: one, or several started by torchrun; rank 0 decides and the others follow."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from spo.errors import SpoError
from spo.local.die_with_parent import die_with_torchrun

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The process group of tensors (nccl on GPUs, gloo on CPU) and a gloo group for everything else."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def scatter(self, parcels: list[T] | None) -> T:
        """Rank 0 gives one parcel per rank; everyone gets its own."""
        if self.world_size == 1:
            assert parcels is not None
            return parcels[0]
        received: list[object] = [None]
        dist.scatter_object_list(received, parcels, src=0, group=self.control)
        return cast(T, received[0])

    def share(self, value: T | None) -> T:
        """Everyone gets rank 0's value, whatever the others pass; None is a value too."""
        return cast(T, self.scatter([value] * self.world_size if self.leads else None))

    def alike(self, call: Callable[[], T]) -> T:
        """What the call gives on this rank. An SpoError that it met on any is raised on all, which call it together."""
        problem: SpoError | None = None
        try:
            answer = call()
        except SpoError as error:
            problem = error
        for found in self.gather(problem):
            if found:
                raise found
        return answer

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[object] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return cast(list[T], values)


def join_ranks(timeout_seconds: float) -> Ranks:
    """Set up torch.distributed from torchrun's environment, or alone without it."""
    die_with_torchrun()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    else:
        # Alone: no port to listen on, so nothing to collide with.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(rank, world_size, device, control)
