"""What a connection may cost before a request is parsed: bytes of its head, time, and how many there may be.

uvicorn's h11 protocol limits only heads that arrive in pieces, answers faults as plain text, and waits for the rest of
a head for ever. Here every refusal is a problem document, and whoever is slow in either direction is let go.
"""

from __future__ import annotations

import asyncio

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.orchestrator.http.errors import problem
from services.orchestrator.http.middleware import OPEN_PATHS
from spo.errors import InvalidInput, NotReady, SpoError

MAX_HEAD_BYTES = 64 << 10
# A head must be whole after so long, and what is left of a refused body.
HEAD_SECONDS = 10.0
# Longest wait for a client to take what was sent to it.
WRITE_SECONDS = 60.0
# Who was refused may finish the sentence, so that the answer is read before the connection closes.
LINGER_SECONDS = 1.0
LINGER_BYTES = 1 << 20
# Beyond the limit connections are taken for health checks alone, and others told to come back.
RESERVED = 32


class RequestHeads(h11.Connection):
    """h11's connection, with a limit that also holds for heads that arrive in one piece."""

    refusal: SpoError | None = None

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises h11.RemoteProtocolError, and notes in `refusal` what to tell the client."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.refusal = _head_too_large() if error.error_status_hint == 431 else _malformed(str(error))
            raise
        if isinstance(event, h11.Request) and _size(event) > MAX_HEAD_BYTES:
            self.refusal = _head_too_large()
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        return event


class LimitedConnection(H11Protocol):
    """One connection of a client."""

    # How many there may be at once.
    most = 0

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _refused = False
    _ignored_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.conn = RequestHeads(h11.SERVER, MAX_HEAD_BYTES)
        super().connection_made(transport)
        if len(self.connections) > self.most + RESERVED:
            transport.abort()
            return
        if len(self.connections) > self.most:
            self.app = _crowded(self.app)
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._ignored_bytes += len(data)
            if self._ignored_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        """Tell the client what is wrong with its request; called where h11 raised."""
        refusal = self.conn.refusal if isinstance(self.conn, RequestHeads) else None
        self._refuse(refusal or _malformed(msg))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer:
            self._write_timer.cancel()
            self._write_timer = None

    def _follow(self) -> None:
        """Time runs while the client has the floor: no request is under way, or its body goes on after the answer."""
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way or self.transport.is_closing():
            if self._head_timer:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _too_slow(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(InvalidInput(f"the head did not arrive within {HEAD_SECONDS:g} s", code="head_timeout"))
        else:
            # Nothing came at all, or the rest of a body that nobody reads any more.
            self.transport.close()

    def _refuse(self, refusal: SpoError) -> None:
        """Answer with a problem, where an answer can still be given, and close."""
        self._refused = True
        self._stop_timers()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        response = problem(refusal)
        headers = [*response.raw_headers, (b"connection", b"close")]
        body = bytes(response.body)
        for event in (
            h11.Response(status_code=response.status_code, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer:
                timer.cancel()
        self._head_timer = self._write_timer = None


def limited_connections(most_at_once: int) -> type[LimitedConnection]:
    """The protocol class for a uvicorn.Config."""

    class Connection(LimitedConnection):
        most = most_at_once

    return Connection


def _crowded(app: ASGIApp) -> ASGIApp:
    async def crowded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, send)
            return
        refusal = problem(NotReady("too many connections are open; try again", code="too_many_connections"))
        refusal.headers["Connection"] = "close"
        await refusal(scope, receive, send)

    return crowded


def _size(request: h11.Request) -> int:
    return len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)


def _head_too_large() -> InvalidInput:
    return InvalidInput(f"the head of a request has at most {MAX_HEAD_BYTES} bytes", code="head_too_large")


def _malformed(reason: str) -> InvalidInput:
    return InvalidInput(f"this is not HTTP: {reason}"[:300], code="malformed_request")
