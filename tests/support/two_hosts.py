"""Two hosts on one machine: network namespaces joined by a virtual switch, which share files and nothing else."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from tests.conftest import require

# The addresses of docs/two_machines.md.
HEAD, OTHER = "10.0.0.1", "10.0.0.2"
INTERFACE, BRIDGE = "eth0", "switch"
LIMIT_SECONDS = 20


@dataclass(frozen=True)
class Host:
    """A namespace that lives as long as the process that holds it, and the one of the switch at its cable's far end."""

    address: str
    holder: subprocess.Popen[str]
    switch: Host | None = None

    @property
    def namespace(self) -> str:
        """The file for `nsenter --net`."""
        return f"/proc/{self.holder.pid}/ns/net"

    def on(self, command: Sequence[str]) -> list[str]:
        """The command that runs another one on this host."""
        return [require("nsenter"), f"--net={self.namespace}", *command]

    def run(self, *command: str) -> str:
        """Run to the end; returns what it said. Raises CalledProcessError."""
        return subprocess.run(
            self.on(command), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
        ).stdout

    def plug(self, *, out: bool) -> None:
        """Pull the cable at the switch, or put it back: the host keeps its address and routes, as a real one does."""
        assert self.switch is not None
        self.switch.run(require("ip"), "link", "set", self._port, "down" if out else "up")

    @property
    def _port(self) -> str:
        return f"port{self.address.rpartition('.')[2]}"

    def join(self, switch: Host) -> Host:
        """This host with an interface of its own, its other end a port of the switch."""
        ip, joined = require("ip"), replace(self, switch=switch)
        far = ("peer", "name", joined._port, "netns", str(switch.holder.pid))
        self.run(ip, "link", "add", INTERFACE, "type", "veth", *far)
        self.run(ip, "address", "add", f"{self.address}/24", "dev", INTERFACE)
        switch.run(ip, "link", "set", joined._port, "master", BRIDGE)
        self.run(ip, "link", "set", INTERFACE, "up")
        self.run(ip, "link", "set", "lo", "up")
        joined.plug(out=False)
        return joined

    def received_bytes(self) -> int:
        """What has come through the cable."""
        (link,) = json.loads(self.run(require("ip"), "-json", "-statistics", "link", "show", INTERFACE))
        return int(link["stats64"]["rx"]["bytes"])


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """HEAD and OTHER. Raises CalledProcessError or OSError where this process may make no namespaces."""
    with contextlib.ExitStack() as held:
        switch = Host("", held.enter_context(_holder()))
        switch.run(require("ip"), "link", "add", BRIDGE, "up", "type", "bridge")
        head, other = (Host(address, held.enter_context(_holder())).join(switch) for address in (HEAD, OTHER))
        yield head, other


@contextlib.contextmanager
def two_hosts_or_skip(what: str) -> Iterator[tuple[Host, Host]]:
    """As `two_hosts`; where none can be made the test is skipped, and says what is not tested."""
    with contextlib.ExitStack() as held:
        try:
            made = held.enter_context(two_hosts())
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            pytest.skip(f"NOT TESTED, {what}: no networks of its own here: {said}")
        yield made


@contextlib.contextmanager
def _holder() -> Iterator[subprocess.Popen[str]]:
    """A process in a namespace of its own, which ends when its input does: also when the test is killed."""
    command = [require("unshare"), "--net", require("sh"), "-c", "echo made && exec cat"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "made\n":
            raise OSError(process.stderr.read().strip())
        yield process
        process.kill()
