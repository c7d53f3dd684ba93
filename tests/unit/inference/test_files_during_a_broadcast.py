"""A version announced with its files while the engine still waits for its broadcast is loaded from them."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.inference.engine_thread import EngineThread
from services.inference.settings import Settings
from services.inference.weights import PolicyWeightTransfer, Weights
from spo.testing.peers import wait_until
from spo.weights.broadcast import BroadcastFailed

REFERENCE = Weights("", 0, "pi0", ())
FILES = Weights("job", 5, "digest", (Path(__file__),))


class LateBroadcast:
    """A broadcast that does not come; the files are announced while it is waited for."""

    thread: EngineThread

    def join(self, tensor_parallel_size: int) -> None:
        self.thread.announce("job", FILES)
        raise BroadcastFailed("nobody sends")


class UncountedDeaths:
    """Nobody notes which work has killed an engine."""

    def during(self, work: str, *, ends_process: bool = False) -> nullcontext[None]:
        return nullcontext()


class NotedLoads:
    """An engine that holds no model and notes which versions were loaded."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def load(self, paths: tuple[Path, ...], version: int) -> None:
        self.versions.append(version)


def test_files_that_are_announced_while_a_broadcast_fails_are_loaded_and_not_asked_for_again() -> None:
    engine, broadcast, deaths = NotedLoads(), LateBroadcast(), UncountedDeaths()
    thread = broadcast.thread = EngineThread(lambda: cast(Any, engine), REFERENCE, Settings(), cast(Any, deaths))
    thread.announce("job", Weights("job", 5, "digest", None, broadcast=cast(Any, broadcast)))

    thread.start()
    wait_until(lambda: thread.loaded == FILES, "the files of version 5 to be loaded", 10)
    thread.stop()

    assert engine.versions == [5]
    assert thread.take_missing() is None


@pytest.mark.parametrize("comes", ["never", "broken", "in time"])
def test_a_group_that_a_dead_peer_never_joins_ends_at_the_deadline(comes: str) -> None:
    """As NCCL's communicator: nothing aborts it before it is there."""
    release = threading.Event()

    class Inner:
        def init_transfer_engine(self, info: object) -> None:
            if comes == "never":
                release.wait(60)
            if comes == "broken":
                raise RuntimeError("ncclInvalidUsage")

    transfer = cast(Any, PolicyWeightTransfer.__new__(PolicyWeightTransfer))
    transfer._inner, transfer.device, transfer._ends = Inner(), torch.device("cpu"), time.monotonic() + 5.0
    if comes == "in time":
        transfer._joined_within_deadline(None)
        return
    if comes == "never":
        transfer._ends = time.monotonic() + 0.1
    with pytest.raises(BroadcastFailed if comes == "never" else RuntimeError):
        transfer._joined_within_deadline(None)
    release.set()
