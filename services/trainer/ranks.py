"""The trainer's processes: one, or several started by torchrun; rank 0 decides and the others follow."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from spo.errors import InvalidInput, SpoError
from spo.local.die_with_parent import die_with_torchrun
from spo.observability import get_logger

log = get_logger("ranks")

T = TypeVar("T")

LOOK_SECONDS = 0.5
STOP_LOOK_SECONDS = 1.0
# What all ranks meet they meet at about the same time, as far as one is not in a collective with one that is gone.
ALONE_SECONDS = 15.0


@dataclass(frozen=True)
class Ranks:
    """The process group of tensors (nccl on GPUs, gloo on CPU) and a gloo group for everything else.

    store: torchrun's own, through which ranks hear of each other while they wait in a collective. behind: a group like
    `control`, for what goes on beside it.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    store: TCPStore | None = None
    timeout: timedelta | None = None
    behind: dist.ProcessGroup | None = None
    _groups: dict[int, dist.ProcessGroup] = field(default_factory=dict, repr=False, compare=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def beside(self) -> Ranks:
        """The same ranks for a thread that works beside the one that carries out commands."""
        return replace(self, control=self.behind or self.control)

    def groups_of(self, width: int) -> int:
        """How many groups of `width` ranks there are. Raises InvalidInput where some would be left over."""
        if self.world_size % width:
            raise InvalidInput(
                f"{self.world_size} ranks cannot be cut into groups of {width} (trainer.sequence_parallel)",
                code="ranks_not_divisible",
            )
        return self.world_size // width

    def neighbours(self, width: int) -> dist.ProcessGroup:
        """The group of tensors of the `width` ranks that this one is among: 0 to width - 1, and so on.

        Every rank calls this together. Raises InvalidInput as `groups_of`.
        """
        if width not in self._groups:
            self.groups_of(width)
            firsts = range(0, self.world_size, width)
            every = [dist.new_group(range(first, first + width), timeout=self.timeout) for first in firsts]
            self._groups[width] = every[self.rank // width]
        return self._groups[width]

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

    @contextmanager
    def together(self, give_up: Callable[[str], None]) -> Iterator[None]:
        """Around work with collectives in it, as loading a model: an SpoError that any rank meets is raised on all.

        Where the others cannot hear of it, because they wait for that rank in a collective, all processes end after
        ALONE_SECONDS with status 1 and torchrun starts them anew. give_up: called before with what that rank met.
        """
        problem: SpoError | None = None
        key, over = f"{start_key('together')}/{next(self._numbers)}", threading.Event()
        watch = threading.Thread(target=self._end_when_alone, args=(key, over, give_up), name="together", daemon=True)
        watch.start()
        try:
            try:
                yield
            except SpoError as error:
                problem = error
                if self.store:
                    self.store.set(key, f"rank {self.rank}: {error.message}")
            for found in self.gather(problem):
                if found:
                    raise found
        finally:
            over.set()
            watch.join()

    def _end_when_alone(self, key: str, over: threading.Event, give_up: Callable[[str], None]) -> None:
        while self.store and not over.wait(LOOK_SECONDS):
            try:
                words = self.store.get(key).decode() if self.store.check([key]) else ""
            except RuntimeError:
                # The store goes with the torchrun that keeps it, which ends this process too.
                return
            if words and not over.wait(ALONE_SECONDS):
                log.error("a rank failed alone, while others wait for it: all begin anew", reason=words)
                give_up(words)
                os._exit(1)

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
    behind = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(rank, world_size, device, control, torchrun_store(world_size), timeout, behind)


def torchrun_store(world_size: int) -> TCPStore | None:
    """A connection of one's own to torchrun's store; None for one rank, or where torchrun did not start them."""
    if world_size == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))


def start_key(name: str) -> str:
    """A key of the store that each start of the ranks has for itself."""
    launch, restart = (os.environ.get(f"TORCHELASTIC_{part}", "0") for part in ("RUN_ID", "RESTART_COUNT"))
    return f"spo/{name}/{launch}/{restart}"


class GroupStop:
    """What the ranks of one trainer know of a SIGTERM that any of them got."""

    def __init__(self, world_size: int) -> None:
        self.told = threading.Event()
        self._store = torchrun_store(world_size)
        # Each start of the ranks has its own: what stopped the last one does not stop the next.
        self._key = start_key("stop")

    def tell(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM of every rank but 0: rank 0 ends the run, and with it this rank's work."""
        self.told.set()
        if self._store:
            self._store.set(self._key, "1")

    def look(self, stop: threading.Event) -> None:
        """Rank 0's worker: stop once any rank got SIGTERM."""
        while self._store and not stop.wait(STOP_LOOK_SECONDS):
            try:
                told = self._store.check([self._key])
            except RuntimeError as error:
                # The store goes with the torchrun that keeps it, which ends this process too.
                log.warning("the other ranks can no longer be heard", reason=str(error)[:200])
                return
            if told:
                log.info("another pod of this trainer got SIGTERM: all stop, after a checkpoint")
                stop.set()
