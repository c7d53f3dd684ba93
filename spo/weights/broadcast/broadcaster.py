"""A trainer's side of broadcasts: it starts the sender, a process of its own, and never waits for a transfer."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec

import torch
from ulid import ULID

from spo.observability.logs import get_logger
from spo.v1.weights_pb2 import BroadcastOffer
from spo.weights.store import StoredVersion

log = get_logger("broadcast")

# Beyond window and transfer, before a sender that does not answer is killed.
GRACE_SECONDS = 10.0
_ANY_ADDRESS = ("0.0.0.0", "::")


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
            command = [sys.executable, "-m", "spo.weights.broadcast.sender", "--host", self._host]
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
