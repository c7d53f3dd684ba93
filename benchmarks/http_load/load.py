"""Many HTTP clients in one thread: each keeps a connection and asks at its own pace, or without a pause.

A paced client asks at fixed times whatever the answers take, and its latency counts from those times, so a server that
stalls cannot hide it by being asked less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

STATUS_OK = (b"HTTP/1.1 2", b"HTTP/1.0 2")
CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class Answers:
    """Latencies in seconds, and how long it took to get them all."""

    latencies: list[float]
    seconds: float

    @property
    def p99_ms(self) -> float:
        """The latency that one of a hundred answers exceeds."""
        return 1000 * sorted(self.latencies)[int(0.99 * (len(self.latencies) - 1))]

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds


def request(method: str, path: str, key: str = "", body: bytes = b"") -> bytes:
    """One HTTP/1.1 request as bytes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def ask(port: int, next_request: Callable[[], bytes], clients: int, requests: int, per_second: float = 0) -> Answers:
    """So many requests in all; per_second is the rate of all clients together, 0 without a pause."""
    return asyncio.run(_ask(port, next_request, clients, requests // clients, per_second / clients))


async def _ask(port: int, next_request: Callable[[], bytes], clients: int, each: int, rate: float) -> Answers:
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(clients)]
    latencies: list[float] = []
    began = time.perf_counter()

    async def client(number: int) -> None:
        reader, writer = streams[number]
        # Clients do not ask all at once.
        due = began + number / clients / rate if rate else 0.0
        for _ in range(each):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            started = due if rate else time.perf_counter()
            writer.write(next_request())
            await _answer(reader)
            latencies.append(time.perf_counter() - started)
            due += 1 / rate if rate else 0.0

    await asyncio.gather(*map(client, range(clients)))
    seconds = time.perf_counter() - began
    for _, writer in streams:
        writer.close()
    return Answers(latencies, seconds)


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(STATUS_OK):
        raise RuntimeError(f"a request failed: {head[:200]!r}")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.partition(b":")[2]))


class Listeners:
    """So many open event streams of one job; when each event arrived at each of them."""

    def __init__(self, port: int, path: str, key: str, count: int) -> None:
        self.port = port
        self.request = request("GET", path, key).replace(b"\r\n\r\n", b"\r\nAccept: text/event-stream\r\n\r\n")
        self.count = count
        # Event id -> seconds of the monotonic clock at each listener.
        self.arrivals: dict[int, list[float]] = {}
        self.open = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> None:
        """Open them all; each then listens until `close`."""
        gate = asyncio.Semaphore(50)

        async def listen() -> None:
            async with gate:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16)
                self._writers.append(writer)
                writer.write(self.request)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), CONNECT_SECONDS)
                if not head.startswith(STATUS_OK):
                    raise RuntimeError(f"a listener was refused: {head[:200]!r}")
                self.open += 1
            tasks.append(asyncio.create_task(self._listen(reader)))

        tasks: list[asyncio.Task[None]] = []
        await asyncio.gather(*(listen() for _ in range(self.count)))
        self._tasks = tasks

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            if line.startswith(b"id: "):
                self.arrivals.setdefault(int(line[4:]), []).append(time.monotonic())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
