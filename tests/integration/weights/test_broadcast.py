"""A stored version over gloo between real processes: the same bytes, and nobody waits for one who is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

import pytest
import torch

from spo.errors import IntegrityError
from spo.weights.broadcast import (
    BroadcastFailed,
    DigestCheck,
    GlooGroup,
    connect,
    header_of,
    join,
    layout,
    read_roster,
    report_done,
)
from spo.weights.store import StoredVersion, WeightStore, whole_entries

HOST = "127.0.0.1"
RUN = "job"
SECONDS = 5.0


class Sender:
    """The process that a trainer starts."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "spo.weights.broadcast", "--host", HOST, "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--transport", "gloo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._said()["port"])

    def _said(self) -> dict[str, object]:
        assert self.process.stdout
        return dict(json.loads(self.process.stdout.readline()))

    def push(self, version: StoredVersion, key: str, receivers: int, window_seconds: float = 20.0) -> None:
        files = [str(path) for path in version.files]
        push = {"key": key, "manifest": version.manifest, "files": files, "receivers": receivers}
        stdin = self.process.stdin
        assert stdin
        _write(stdin, push | {"window_seconds": window_seconds, "seconds": SECONDS})

    def answer(self) -> dict[str, object]:
        return self._said()

    def receive(self, key: str, *, until: int | None = None) -> dict[str, torch.Tensor]:
        """As a replica's worker would; until: it leaves without a word after so many tensors."""
        store = connect(HOST, self.port)
        rank = join(store, key, 1, window_seconds=20)
        roster = read_roster(store, key, 1.0)
        ends = time.monotonic() + roster.seconds
        group = GlooGroup(store, key, rank, roster.world_size, address=HOST, ends=ends)
        check = DigestCheck(whole_entries(roster.manifest), roster.headers)
        received: dict[str, torch.Tensor] = {}
        for tensor in [tensor for header in roster.headers for tensor in layout(header)]:
            if len(received) == until:
                group.destroy()
                return received
            received[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            group.broadcast(received[tensor.name])
            check.take(tensor.name, received[tensor.name])
        check.finish()
        report_done(store, key)
        return received


def _write(stdin: IO[str], message: dict[str, object]) -> None:
    stdin.write(json.dumps(message) + "\n")
    stdin.flush()


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    with sender.process as process:
        process.kill()


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (7,), (1,), (3, 5, 2), (11, 13)]
    found = {f"layer.{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}
    return found | {"half": torch.randn(9, 3, generator=generator).bfloat16()}


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> StoredVersion:
    names = list(tensors)
    shards = [
        ("a.safetensors", {name: tensors[name] for name in names[:3]}),
        ("b.safetensors", {name: tensors[name] for name in names[3:]}),
    ]
    store = WeightStore(tmp_path_factory.mktemp("weights"))
    return store.write(RUN, 1, parent=0, step=1, dtype="float32", shards=shards)


def test_two_receivers_get_the_stored_bytes(
    sender: Sender, version: StoredVersion, tensors: dict[str, torch.Tensor]
) -> None:
    sender.push(version, "both", receivers=2)
    received: list[dict[str, torch.Tensor]] = []
    threads = [threading.Thread(target=lambda: received.append(sender.receive("both"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert sender.answer() == {"received": 2}
    for thread in threads:
        thread.join()
    for found in received:
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    # Nobody is let in afterwards, and nobody waits to learn it.
    with pytest.raises(BroadcastFailed, match="before this receiver"):
        sender.receive("both")


def test_a_receiver_that_dies_ends_the_transfer_for_the_sender_and_the_next_one_works(
    sender: Sender, version: StoredVersion
) -> None:
    sender.push(version, "dies", receivers=1)
    assert len(sender.receive("dies", until=2)) == 2
    answer = sender.answer()
    assert answer["received"] == 0
    sender.push(version, "after", receivers=1)
    assert sender.receive("after")
    assert sender.answer() == {"received": 1}


def test_who_does_not_come_is_not_waited_for_beyond_the_window(sender: Sender, version: StoredVersion) -> None:
    sender.push(version, "nobody", receivers=3, window_seconds=0.1)
    assert sender.answer() == {"received": 0}
    sender.push(version, "one of three", receivers=3, window_seconds=1.0)
    assert sender.receive("one of three")
    assert sender.answer() == {"received": 1}


def test_bytes_that_are_not_the_stored_ones_are_refused(
    version: StoredVersion, tensors: dict[str, torch.Tensor]
) -> None:
    headers = [header_of(path) for path in version.files]
    check = DigestCheck(whole_entries(version.manifest), headers)
    *others, last = layout(headers[0])
    for found in others:
        check.take(found.name, tensors[found.name])
    with pytest.raises(IntegrityError, match="other bytes"):
        check.take(last.name, tensors[last.name] + 1)
    with pytest.raises(IntegrityError, match="not received whole"):
        DigestCheck(whole_entries(version.manifest), headers).finish()


def test_a_sender_that_is_gone_is_not_waited_for(free_port: int) -> None:
    with pytest.raises(BroadcastFailed, match="no sender"):
        connect(HOST, free_port)
