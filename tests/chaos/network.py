"""A TCP proxy in front of Redis and of each service: what passes it can be slowed, lost for a while, or cut."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

Answer = TypeVar("Answer")

CHUNK_BYTES = 1 << 16
CALL_SECONDS = 10


@dataclass
class Conditions:
    """How the way to one target is: delay of each chunk, share of chunks that wait for a retransmission, or cut off."""

    delay_seconds: float = 0.0
    lost_share: float = 0.0
    retransmit_seconds: float = 0.5
    is_cut: bool = False


@dataclass
class Way:
    """A port of ours that leads to a target (host, port), once that is known."""

    port: int
    target: tuple[str, int] | None = None
    conditions: Conditions = field(default_factory=Conditions)
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    # Half-open: nothing passes them any more, and neither end learns of it.
    silent: set[asyncio.StreamWriter] = field(default_factory=set)


class Network:
    """The proxies of a platform, by the name of what they lead to; in a thread of its own, as a context manager."""

    def __init__(self, names: list[str]) -> None:
        self.ways: dict[str, Way] = {}
        self._names = names
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        for name in self._names:
            self.ways[name] = self._call(self._listen(name))
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        self._loop.close()

    def address(self, name: str) -> str:
        """host:port that leads to this target."""
        return f"127.0.0.1:{self.ways[name].port}"

    def lead(self, name: str, address: str) -> None:
        """Say where a target listens."""
        host, _, port = address.rpartition(":")
        self.ways[name].target = (host, int(port))

    def set(self, name: str, conditions: Conditions) -> None:
        """Change the way to a target; cutting it ends its connections and refuses new ones."""
        self.ways[name].conditions = conditions
        if conditions.is_cut:
            self._call(self._cut(self.ways[name]))

    def silence(self, name: str) -> int:
        """Let the target's present connections be half-open for good, as when a machine vanished; how many."""
        way = self.ways[name]
        way.silent |= way.connections
        return len(way.silent) // 2

    def _call(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_SECONDS)

    async def _listen(self, name: str) -> Way:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(self.ways[name], reader, writer)

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self._servers.append(server)
        return Way(server.sockets[0].getsockname()[1])

    async def _serve(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            if way.conditions.is_cut or way.target is None:
                return
            answers, onward = await asyncio.open_connection(*way.target)
            ends.append(onward)
            way.connections.update(ends)
            both = (self._pump(way, reader, onward), self._pump(way, answers, writer))
            # The end of one direction is the end of the connection: neither Redis nor gRPC half-closes.
            _, rest = await asyncio.wait(map(asyncio.ensure_future, both), return_when=asyncio.FIRST_COMPLETED)
            for pump in rest:
                pump.cancel()
        except OSError:
            pass
        finally:
            way.connections.difference_update(ends)
            way.silent.difference_update(ends)
            for end in ends:
                end.close()

    async def _pump(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                wait = way.conditions.delay_seconds
                if way.conditions.lost_share and random.random() < way.conditions.lost_share:
                    wait += way.conditions.retransmit_seconds
                if wait:
                    await asyncio.sleep(wait)
                if writer in way.silent:
                    continue
                writer.write(chunk)
                await writer.drain()

    async def _cut(self, way: Way) -> None:
        for connection in list(way.connections):
            connection.transport.abort()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for way in self.ways.values():
            await self._cut(way)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
