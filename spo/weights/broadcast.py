"""Stored weight versions by broadcast over one network: where sender and receivers meet, tensors in the order of the
files, and the trainer's side.

Where a sender and the receivers of one transfer meet: a store of torch.distributed that the sender serves.
A receiver counts itself in; at the end of the window the sender fixes the group and writes the roster, which says who
takes part and what is sent. Whoever came too late reads that it is not in the group.

Stored weight versions by broadcast, for a trainer and replicas on one network: the fast way to the same bytes.
The files are the record; a broadcast sends a version that is stored already, tensor by tensor in the order of its
files, and whoever receives it checks the manifest's digests. One transfer is one group: whoever joined in time is in
it, and any failure ends it for all, who then take the files. No wait in it is without a deadline.

`python -m spo.weights.broadcast` sends stored versions, one after the other, as its parent asks. A process of its own
beside the trainer: training goes on, and a transfer that hangs is ended by killing it. First it prints the port of its
store; then it answers each line of JSON on its input, a `Push`, with a line that says how many processes received it,
or why none did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]
from ulid import ULID

from spo.errors import IntegrityError, SpoError
from spo.manifest_folder import FileEntry, Manifest
from spo.model.folder import open_tensors
from spo.observability import get_logger
from spo.v1.weights_pb2 import BroadcastOffer
from spo.weights.store import StoredVersion

CONNECT_SECONDS = 3.0
# Beyond the sender's window: it opens when the orchestrator has answered the trainer.
ROSTER_SECONDS = 10.0
_POLL_SECONDS = 0.02

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

log = get_logger("broadcast")

# Beyond window and transfer, before a sender that does not answer is killed.
GRACE_SECONDS = 10.0
# Tensors travel packed by NCCL; both ends hold two buffers of this size.
NCCL_BUFFER_BYTES = 256 << 20
_ANY_ADDRESS = ("0.0.0.0", "::")


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


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_of(path: Path) -> bytes:
    """What stands in a file before its tensors."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def layout(header: bytes) -> list[TensorLayout]:
    """The tensors of a file in the order of their bytes. Raises IntegrityError on dtypes that policies have not."""
    described = {name: found for name, found in json.loads(header[8:]).items() if name != "__metadata__"}
    in_order = sorted(described.items(), key=lambda item: item[1]["data_offsets"])
    try:
        return [TensorLayout(name, _DTYPES[found["dtype"]], tuple(found["shape"])) for name, found in in_order]
    except KeyError as error:
        raise IntegrityError(f"weights of dtype {error} are not broadcast") from None


def stored_tensors(path: Path, tensors: Sequence[TensorLayout]) -> Iterator[Tensor]:
    """The tensors of a file in their order, each read from the file when it is asked for."""
    with open_tensors(path) as shard:
        for tensor in tensors:
            yield shard.get_tensor(tensor.name)


class DigestCheck:
    """Compares received tensors with the files they are said to be."""

    def __init__(self, entries: Sequence[FileEntry], headers: Sequence[bytes]) -> None:
        self._left = [
            (entry, header, [tensor.name for tensor in layout(header)])
            for entry, header in zip(entries, headers, strict=True)
        ]
        self._open: list[str] = []
        self._hasher = blake3()
        self._begin()

    def _begin(self) -> None:
        if self._left:
            _, header, names = self._left[0]
            self._open = list(names)
            self._hasher = blake3(header, max_threads=blake3.AUTO)

    def take(self, name: str, tensor: Tensor) -> None:
        """Count the next tensor in. Raises IntegrityError where its file turns out to be another."""
        if not self._open or self._open.pop(0) != name:
            raise IntegrityError(f"{name} was received where another tensor was expected")
        self._hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
        if not self._open:
            entry, _, _ = self._left.pop(0)
            if self._hasher.hexdigest() != entry["blake3"]:
                raise IntegrityError(f"{entry['name']} was received with other bytes than are stored")
            self._begin()

    def finish(self) -> None:
        """Raise IntegrityError when something is missing."""
        if self._left:
            raise IntegrityError(f"{self._left[0][0]['name']} was not received whole")


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


class Broadcaster:
    """Offers versions and sends them; the methods never block and may be called from any thread."""

    def __init__(self, host: str, port: int, *, window_seconds: float, transfer_seconds: float) -> None:
        """host: this machine's address where replicas reach it; the one that its name means where it is 0.0.0.0.

        window_seconds: how long replicas may take to join; transfer_seconds: how long it may take from there.
        """
        self._host = socket.gethostbyname(socket.gethostname()) if host in _ANY_ADDRESS else host
        self._wanted_port = port
        self._window_seconds, self._transfer_seconds = window_seconds, transfer_seconds
        self.transport = "nccl" if torch.cuda.is_available() and find_spec("vllm") else "gloo"
        self._sender: subprocess.Popen[str] | None = None
        self._port = 0
        # The version being sent, None while the sender is free.
        self._sending: int | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._keep_sender, name="broadcast", daemon=True)
        self._thread.start()

    def offer(self) -> BroadcastOffer | None:
        """Where replicas can join the next transfer; None while the sender is busy or not up: they take the files."""
        if not self._port or self._sending is not None:
            return None
        return BroadcastOffer(
            host=self._host,
            port=self._port,
            key=str(ULID()),
            transport=self.transport,
            window_seconds=self._window_seconds,
            transfer_seconds=self._transfer_seconds,
        )

    def send(self, version: StoredVersion, offer: BroadcastOffer, replicas: int) -> None:
        """Begin to send a version that was announced with this offer, to as many replicas as serve the run."""
        sender = self._sender
        if sender is None or sender.stdin is None:
            return
        push = {
            "key": offer.key,
            "manifest": version.manifest,
            "files": [str(path.absolute()) for path in version.files],
            "receivers": replicas,
            "window_seconds": offer.window_seconds,
            "seconds": offer.transfer_seconds,
        }
        self._sending = int(version.manifest["version"])
        watch = threading.Timer(offer.window_seconds + offer.transfer_seconds + GRACE_SECONDS, self._kill, [offer.key])
        watch.daemon = True
        self._key, self._watch = offer.key, watch
        watch.start()
        with contextlib.suppress(OSError):
            sender.stdin.write(json.dumps(push) + "\n")
            sender.stdin.flush()

    def close(self) -> None:
        """End the sender."""
        self._closed = True
        if self._sender:
            self._sender.kill()
        self._thread.join()

    def _kill(self, key: str) -> None:
        if self._sender and self._sending is not None and self._key == key:
            log.error("a broadcast of weights hangs; its sender is killed", version=self._sending)
            self._sender.kill()

    def _keep_sender(self) -> None:
        """Run a sender, and another one after it where it died at work."""
        while not self._closed:
            command = [sys.executable, "-m", "spo.weights.broadcast", "--host", self._host]
            command += ["--port", str(self._wanted_port), "--transport", self.transport]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
                self._sender = sender
                if self._closed:
                    # `close` saw the sender before this one, and waits.
                    sender.kill()
                began = self._follow(sender)
            self._port = 0
            self._answered("the sender died")
            if not began and not self._closed:
                log.error("the sender of weights cannot start; versions go by files", host=self._host)
                return

    def _follow(self, sender: subprocess.Popen[str]) -> bool:
        """Read what a sender says until it ends; returns whether it ever began."""
        for line in sender.stdout or ():
            try:
                said = json.loads(line)
            except ValueError:
                # A library's words.
                continue
            if "port" in said:
                self._port = said["port"]
            else:
                self._answered(said.get("problem", ""), said["received"])
        return bool(self._port)

    def _answered(self, problem: str, received: int = 0) -> None:
        version, self._sending = self._sending, None
        if version is None:
            return
        self._watch.cancel()
        if problem and not self._closed:
            log.warning("weights were not broadcast; replicas take the files", version=version, reason=problem)
        elif not problem:
            log.info("weights broadcast", version=version, processes=received)


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
    nccl_id = new_nccl_id() if transport == "nccl" and receivers else ""
    roster = Roster(receivers + 1, push.manifest, headers, nccl_id, push.seconds)
    store.set(f"{push.key}/roster", roster.encode())
    try:
        if not receivers:
            return 0
        ends = time.monotonic() + push.seconds
        group: SenderGroup
        if nccl_id:
            group = NcclSender(nccl_id, roster.world_size)
        else:
            group = GlooGroup(store, push.key, 0, roster.world_size, address=host, ends=ends)
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


class NcclSender:
    """Rank 0 of one transfer by vLLM's own NCCL transfer, on this process's first device; needs vLLM.

    NCCL itself waits without a deadline: receivers abort their end by theirs, and this process is killed by its parent.
    """

    # vLLM is imported on machines with GPUs alone: a trainer elsewhere does without it.
    def __init__(self, nccl_id: str, world_size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self._group = uid_init_process_group(
            b64decode(nccl_id), 0, world_size, torch.accelerator.current_device_index()
        )

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors of CPU memory, packed."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=(("", tensor) for tensor in tensors),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1].cuda(),
            buffer_size_bytes=NCCL_BUFFER_BYTES,
        )

    def destroy(self) -> None:
        """Leave the group."""
        self._group.destroy()


def new_nccl_id() -> str:
    """A unique id for one group, in base64."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return b64encode(bytes(NCCLLibrary().ncclGetUniqueId().internal)).decode()


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
    """The sender's process; returns its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--transport", choices=("gloo", "nccl"), required=True)
    arguments = parser.parse_args()
    store, port = serve(arguments.host, arguments.port)
    if arguments.transport == "nccl":
        # Before the first transfer: it takes seconds.
        new_nccl_id()
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
