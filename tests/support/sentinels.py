"""A primary, two replicas and three Sentinels of the real server on loopback."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import redis

from spo.local.launcher import server_command
from spo.testing.peers import wait_until
from tests.conftest import free_port

SERVICE = "mymaster"
PASSWORD = "the servers' own"
SENTINEL_PASSWORD = "the Sentinels' own"
DOWN_AFTER_MS = 1000


@dataclass
class SentinelCluster:
    """Servers with a password, Sentinels with another; `kill_primary` leaves the rest to them."""

    folder: Path
    servers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    sentinels: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """All of them, until the Sentinels know each other and the replicas follow."""
        first, *others = (free_port() for _ in range(3))
        self._serve(first)
        for port in others:
            self._serve(port, "--replicaof", f"127.0.0.1 {first}")
        for port in others:
            wait_until(lambda at=port: self._follows(at), "a replica follows", 30)
        for port in (free_port() for _ in range(3)):
            self._watch(port, first)
        wait_until(self._acquainted, "the Sentinels know each other and the replicas", 30)

    def url(self, options: str = "") -> str:
        """What SPO_REDIS_URL would be."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        secret = PASSWORD.replace(" ", "%20")
        words = SENTINEL_PASSWORD.replace(" ", "%20")
        return f"redis+sentinel://:{secret}@{hosts}/{SERVICE}/0?sentinel_password={words}{options}"

    def server(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, password=PASSWORD, socket_timeout=5)

    def primary(self) -> int:
        """Its port, as the Sentinels say it."""
        state = self._ask(next(iter(self.sentinels)))
        return int(state["port"])

    def kill_primary(self) -> int:
        """Kill it and return its port."""
        port = self.primary()
        self.servers[port].kill()
        self.servers[port].wait(20)
        return port

    def revive(self, port: int) -> None:
        """Start it again with its data; the Sentinels make it a replica."""
        self._serve(port)
        wait_until(lambda: self._follows(port), "the old primary follows the new one", 60)
        wait_until(self._acquainted, "the Sentinels see it", 60)

    def stop(self) -> None:
        for process in (*self.sentinels.values(), *self.servers.values()):
            process.kill()
            process.wait(20)

    def _serve(self, port: int, *options: str) -> None:
        secrets = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
        command = [*server_command(port, self.folder / str(port)), *secrets, *options]
        self.servers[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: self._answers(port), "a server answers", 20)

    def _watch(self, port: int, primary: int) -> None:
        file = self.folder / f"sentinel-{port}.conf"
        file.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {self.folder}\n"
            f'requirepass "{SENTINEL_PASSWORD}"\nsentinel sentinel-pass "{SENTINEL_PASSWORD}"\n'
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary} 2\n"
            f'sentinel auth-pass {SERVICE} "{PASSWORD}"\n'
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\nsentinel failover-timeout {SERVICE} 10000\n"
        )
        program = server_command(port, self.folder / "unused")[0]
        command = [program, str(file), "--sentinel"]
        self.sentinels[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _answers(self, port: int) -> bool:
        try:
            return bool(self.server(port).ping())
        except redis.RedisError:
            return False

    def _follows(self, port: int) -> bool:
        try:
            return self.server(port).info("replication").get("master_link_status") == "up"
        except redis.RedisError:
            return False

    def _ask(self, port: int) -> dict[str, int | str]:
        sentinel = redis.Redis(port=port, password=SENTINEL_PASSWORD, socket_timeout=5)
        found: dict[str, int | str] = sentinel.sentinel_master(SERVICE)
        return found

    def _acquainted(self) -> bool:
        try:
            states = [self._ask(port) for port in self.sentinels]
        except redis.RedisError:
            return False
        return all(each["num-other-sentinels"] == 2 and each["num-slaves"] == 2 for each in states)
