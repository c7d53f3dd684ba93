"""Where a sender and the receivers of one transfer meet: a store of torch.distributed that the sender serves.

A receiver counts itself in; at the end of the window the sender fixes the group and writes the roster, which says who
takes part and what is sent. Whoever came too late reads that it is not in the group.
"""

from __future__ import annotations

import json
import socket
import time
from base64 import b64decode, b64encode
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from spo.manifest_folder import Manifest

CONNECT_SECONDS = 3.0
# Beyond the sender's window: it opens when the orchestrator has answered the trainer.
ROSTER_SECONDS = 10.0
_POLL_SECONDS = 0.02


class BroadcastFailed(Exception):
    """A transfer that did not come about or to its end; the files hold the same version."""


@dataclass(frozen=True)
class Roster:
    """One transfer: how many processes take part (the sender is rank 0) and the files that are sent.

    headers: of each file of the manifest, as safetensors wrote it. nccl_id: NCCL's unique id in base64, else "".
    seconds: how long it may take from here.
    """

    world_size: int
    manifest: Manifest
    headers: tuple[bytes, ...]
    nccl_id: str
    seconds: float

    def encode(self) -> str:
        """As the store holds it."""
        headers = [b64encode(header).decode() for header in self.headers]
        return json.dumps(vars(self) | {"headers": headers})

    @classmethod
    def decode(cls, raw: bytes) -> Roster:
        """The inverse of `encode`."""
        fields = json.loads(raw)
        return cls(**fields | {"headers": tuple(b64decode(header) for header in fields["headers"])})


def serve(host: str, port: int) -> tuple[Store, int]:
    """The sender's store on an address of this machine, and the port it listens on (port 0: a free one)."""
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=CONNECT_SECONDS)
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        # The other implementation takes no socket that listens already.
        use_libuv=False,
    )
    return store, port


def connect(host: str, port: int) -> Store:
    """A receiver's way to the sender's store. Raises BroadcastFailed where nobody answers in CONNECT_SECONDS."""
    try:
        # TCPStore tries again and again where nothing listens, with warnings.
        socket.create_connection((host, port), CONNECT_SECONDS).close()
        timeout = timedelta(seconds=CONNECT_SECONDS)
        return TCPStore(host, port, wait_for_workers=False, timeout=timeout, use_libuv=False)
    except (OSError, RuntimeError) as error:
        raise BroadcastFailed(f"no sender of weights at {host}:{port}: {error}") from error


def local_address(host: str, port: int) -> str:
    """The address of this machine by which it reaches another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def join(store: Store, key: str, processes: int, window_seconds: float) -> int:
    """Count a receiver of so many processes in and wait for the group; returns the rank of its first process.

    Raises BroadcastFailed when it came too late or the sender is gone.
    """
    try:
        first_rank = store.add(f"{key}/processes", processes) - processes + 1
        store.add(f"{key}/receivers", 1)
        roster = read_roster(store, key, window_seconds + ROSTER_SECONDS)
    except RuntimeError as error:
        raise BroadcastFailed(f"the sender of weights is gone: {error}") from error
    if first_rank + processes > roster.world_size:
        raise BroadcastFailed("the group was complete before this receiver joined it")
    return first_rank


def read_roster(store: Store, key: str, wait_seconds: float) -> Roster:
    """The roster of a transfer. Raises BroadcastFailed when it does not come in time."""
    try:
        store.wait([f"{key}/roster"], timedelta(seconds=wait_seconds))
        return Roster.decode(store.get(f"{key}/roster"))
    except RuntimeError as error:
        raise BroadcastFailed(f"the sender formed no group: {error}") from error


def gather(store: Store, key: str, receivers: int, window_seconds: float) -> int:
    """Wait until so many receivers have joined or the window ends; returns how many processes they have in all."""
    ends = time.monotonic() + window_seconds
    while store.add(f"{key}/receivers", 0) < receivers and time.monotonic() < ends:
        time.sleep(_POLL_SECONDS)
    return int(store.add(f"{key}/processes", 0))


def report_done(store: Store, key: str) -> None:
    """A process has received everything."""
    store.add(f"{key}/done", 1)


def await_done(store: Store, key: str, processes: int, ends: float) -> int:
    """Wait until so many processes have received everything, or until `ends` (monotonic); returns how many have."""
    while (done := int(store.add(f"{key}/done", 0))) < processes and time.monotonic() < ends:
        time.sleep(_POLL_SECONDS)
    return done
