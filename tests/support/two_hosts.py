"""Two hosts on one machine: network namespaces joined by a virtual cable, which share files and nothing else."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.conftest import require

# The addresses of docs/two_machines.md.
HEAD, OTHER = "10.0.0.1", "10.0.0.2"
INTERFACE = "eth0"
LIMIT_SECONDS = 20


@dataclass(frozen=True)
class Host:
    """A namespace that lives as long as the process that holds it."""

    address: str
    holder: subprocess.Popen[str]

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

    def received_bytes(self) -> int:
        """What has come through the cable."""
        (link,) = json.loads(self.run(require("ip"), "-json", "-statistics", "link", "show", INTERFACE))
        return int(link["stats64"]["rx"]["bytes"])


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """HEAD and OTHER. Raises CalledProcessError or OSError where this process may make no namespaces."""
    ip = require("ip")
    with contextlib.ExitStack() as held:
        head, other = (Host(address, held.enter_context(_holder())) for address in (HEAD, OTHER))
        head.run(
            ip, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(other.holder.pid)
        )
        for host in (head, other):
            host.run(ip, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.run(ip, "link", "set", INTERFACE, "up")
            host.run(ip, "link", "set", "lo", "up")
        yield head, other


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
