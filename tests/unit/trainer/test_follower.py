"""A trainer's pod that does not hold rank 0 still answers its probes."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from services.trainer import loop
from services.trainer.ranks import Ranks
from services.trainer.settings import Settings
from spo.rpc.client import is_healthy


@pytest.fixture
def alone() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
    try:
        yield Ranks(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("local_rank", "answers"), [("0", True), ("1", False)])
def test_the_first_process_of_a_following_pod_says_that_it_is_well(
    alone: Ranks, local_rank: str, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    seen: list[bool] = []
    monkeypatch.setattr(loop, "follow_jobs", lambda *_: seen.append(is_healthy(f"127.0.0.1:{port}", 5)))

    before = signal.getsignal(signal.SIGTERM)
    try:
        # Nobody told the trainer to go: torchrun is to start this process again.
        assert loop.follow(alone, Settings(port=port)) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [answers]
    assert not is_healthy(f"127.0.0.1:{port}", 0.2)
