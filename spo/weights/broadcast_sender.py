"""python -m spo.weights.broadcast_sender: sends stored versions, one after the other, as its parent asks.

A process of its own beside the trainer: training goes on, and a transfer that hangs is ended by killing it. First it
prints the port of its store; then it answers each line of JSON on its input, a `Push`, with a line that says how many
processes received it, or why none did.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from spo.errors import SpoError
from spo.manifest_folder import Manifest
from spo.weights.broadcast import (
    BroadcastFailed,
    GlooGroup,
    Roster,
    await_done,
    gather,
    header_of,
    layout,
    serve,
    stored_tensors,
)


@dataclass(frozen=True)
class Push:
    """One version to send: its whole files in the order of its manifest, and to how many receivers.

    window_seconds: how long they may take to join; seconds: how long the transfer may take from there.
    """

    key: str
    manifest: Manifest
    files: list[str]
    receivers: int
    window_seconds: float
    seconds: float


def send(store: Store, host: str, transport: str, push: Push) -> int:
    """Send one version to whoever joins in time; returns how many processes have it. Raises BroadcastFailed."""
    headers = tuple(header_of(Path(path)) for path in push.files)
    layouts = [layout(header) for header in headers]
    receivers = gather(store, push.key, push.receivers, push.window_seconds)
    nccl_id = _new_nccl_id() if transport == "nccl" and receivers else ""
    roster = Roster(receivers + 1, push.manifest, headers, nccl_id, push.seconds)
    store.set(f"{push.key}/roster", roster.encode())
    try:
        if not receivers:
            return 0
        ends = time.monotonic() + push.seconds
        group = _nccl_sender(roster) if nccl_id else _gloo_sender(store, push.key, roster, host, ends)
        try:
            group.send(
                tensor
                for path, tensors in zip(push.files, layouts, strict=True)
                for tensor in stored_tensors(Path(path), tensors)
            )
            # Only then may this end of the group go.
            return await_done(store, push.key, receivers, ends)
        finally:
            group.destroy()
    finally:
        # Who comes from now on reads that there is no place, and the headers are not kept.
        store.set(f"{push.key}/roster", Roster(0, {}, (), "", 0.0).encode())


class SenderGroup(Protocol):
    """Rank 0's end of one transfer."""

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors of CPU memory in order."""

    def destroy(self) -> None:
        """Leave the group."""


def _gloo_sender(store: Store, key: str, roster: Roster, host: str, ends: float) -> SenderGroup:
    return GlooGroup(store, key, 0, roster.world_size, address=host, ends=ends)


# vLLM is imported on machines with GPUs alone: a trainer elsewhere does without it.
def _nccl_sender(roster: Roster) -> SenderGroup:
    from spo.weights.nccl_group import NcclSender

    return NcclSender(roster.nccl_id, roster.world_size)


def _new_nccl_id() -> str:
    from spo.weights.nccl_group import new_nccl_id

    return new_nccl_id()


def _lines_of_parent() -> queue.SimpleQueue[str]:
    """What the parent writes; when the parent is gone this process ends, in the middle of a transfer too."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--transport", choices=("gloo", "nccl"), required=True)
    arguments = parser.parse_args()
    store, port = serve(arguments.host, arguments.port)
    if arguments.transport == "nccl":
        # Before the first transfer: it takes seconds.
        _new_nccl_id()
    print(json.dumps({"port": port}), flush=True)
    for line in iter(_lines_of_parent().get, ""):
        push = Push(**json.loads(line))
        try:
            answer: dict[str, object] = {"received": send(store, arguments.host, arguments.transport, push)}
        except (BroadcastFailed, SpoError, OSError, RuntimeError) as error:
            answer = {"received": 0, "problem": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
