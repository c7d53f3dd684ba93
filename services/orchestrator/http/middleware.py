"""What every request passes first: limits of its connection, authentication, scopes, rate limit, origin, size of the
body, headers.

What a connection may cost before a request is parsed: bytes of its head, time, and how many there may be.
uvicorn's h11 protocol limits only heads that arrive in pieces, answers faults as plain text, and waits for the rest of
a head for ever. Here every refusal is a problem document, and whoever is slow in either direction is let go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from urllib.parse import SplitResult, urlsplit

import h11
import redis
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from ulid import ULID
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.orchestrator.auth import READING, Principal, RateLimit
from services.orchestrator.container import AppContext, at_the_door
from services.orchestrator.http.errors import SESSION, as_page, dialect, problem, said_of_redis
from services.orchestrator.settings import LOOPBACK
from spo.errors import InvalidInput, NotReady, ResourceExhausted, SpoError
from spo.observability import get_logger

log = get_logger("middleware")

OPEN_PATHS = ("/healthz", "/readyz", "/health")
# What a standby answers besides; for everything else it names the leader.
STANDBY_PATHS = ("/version", "/metrics")
# The `type` of a refusal leads here, so those who were refused must be able to read it.
OPEN_PAGES = "/errors"
# Longest wait for a whole body, so that slow senders hold no connection for ever.
BODY_SECONDS = 120.0
# Longest wait for a whole part of a dataset, each piece of which arrives within the above.
PART_SECONDS = 1800.0
# Takes whole files in one body.
IMPORT_PATH = "/v1/experience/import"
IMPORTS_AT_ONCE = 4
# Agents send the whole conversation with each call.
SESSION_BODY_BYTES = 32 << 20
# Parts of datasets are written to disk as they arrive, so they are not read here.
STREAMED_PATHS = "/v1/datasets/"
TINKER_PATHS, TINKER_PREFIX = "/tinker/", "tml-"
# Asked all the time by every client of the Tinker API, and of no use to an audit.
TINKER_POLLS = tuple(
    f"/tinker/api/v1/{name}"
    for name in ("retrieve_future", "session_heartbeat", "telemetry", "client/config", "client/dynamic_config")
)
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_RESPONSE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
NOBODY = Principal("nobody")

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


class RateLimited(ResourceExhausted):
    """Too many requests of one principal."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many requests; the next may come in {seconds} s", code="rate_limited")
        self.seconds = seconds


class RequestMiddleware:
    """Refuses before anything is parsed; bodies are counted as they arrive, whatever Content-Length says."""

    def __init__(self, app: ASGIApp, context: AppContext) -> None:
        self.app = app
        settings = context.settings
        self.max_body_bytes = settings.max_body_bytes
        self.max_import_bytes = settings.max_import_bytes
        self.max_part_bytes = settings.max_part_bytes
        self.has_key = settings.api_key is not None
        self.authenticator = context.authenticator
        self.sessions = context.agent_sessions
        self.audit = context.audit
        self.leadership = context.leadership
        self.rate = RateLimit(settings.rate_limit)
        self._imports = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        audited = _AuditedRequest(scope, send)
        with ExitStack() as held:
            await self._serve(scope, receive, audited, held)
        if audited.worth_noting:
            await self._note(audited)

    async def _serve(self, scope: Scope, receive: Receive, audited: _AuditedRequest, held: ExitStack) -> None:
        try:
            self._check_origin(scope, Headers(scope=scope))
            if scope["path"] not in OPEN_PATHS and not f"{scope['path']}/".startswith(f"{OPEN_PAGES}/"):
                await self._admit(audited, scope)
            if scope["path"] == IMPORT_PATH:
                held.enter_context(self._place_for_import())
            inside = await self._body(receive, Headers(scope=scope), scope)
        except SpoError as error:
            response = as_page(scope["path"], Headers(scope=scope), problem(error))
            if isinstance(error, RateLimited):
                response.headers["Retry-After"] = str(error.seconds)
            if response.status_code in (408, 413):
                # The rest of the body is not read.
                response.headers["Connection"] = "close"
            if response.status_code == 415:
                response.headers["Accept-Encoding"] = "identity"
            await response(scope, receive, audited.send)
        else:
            await self.app(scope, inside, audited.send)

    @contextmanager
    def _place_for_import(self) -> Iterator[None]:
        """Files are in memory from their first byte until they are stored. Raises NotReady (code "calls_busy")."""
        if self._imports >= IMPORTS_AT_ONCE:
            raise NotReady(f"{IMPORTS_AT_ONCE} files are being imported; try again", code="calls_busy")
        self._imports += 1
        try:
            yield
        finally:
            self._imports -= 1

    async def _admit(self, audited: _AuditedRequest, scope: Scope) -> None:
        client = scope.get("client") or ("unknown", 0)
        try:
            authorization = _authorization(scope["path"], Headers(scope=scope))
            if session := SESSION.match(scope["path"]):
                key = f"{session[1]}{session[2]}" if session[2] else authorization.removeprefix("Bearer ")
                # What it has used is read with its key, once.
                found, standing = await at_the_door(partial(self.sessions.admitted, session[1], key))
                scope.setdefault("state", {})["agent_session"] = standing
            else:
                # Most principals were seen a moment ago: they are known without Redis, so without a thread.
                known = self.authenticator.known(authorization)
                found = known if known else await at_the_door(partial(self.authenticator.principal, authorization))
            audited.principal = found
        except InvalidInput:
            # Guessing is limited by address, so that it cannot use up the rate of a principal.
            await self._count(f"address:{client[0]}")
            raise
        except redis.RedisError as error:
            raise said_of_redis(error) from None
        scope.setdefault("state", {})["principal"] = audited.principal
        await self._count(audited.principal.name)
        audited.principal.check(audited.method, audited.path)
        if audited.path not in STANDBY_PATHS:
            self.leadership.require()

    async def _count(self, name: str) -> None:
        seconds = await self.rate.seconds_to_wait(name)
        if seconds:
            raise RateLimited(seconds)

    async def _note(self, audited: _AuditedRequest) -> None:
        try:
            entry = (audited.method, audited.path, audited.status, audited.request_id)
            await at_the_door(partial(self.audit.record, audited.principal.name, audited.principal.tenant, *entry))
        except redis.RedisError as error:
            log.error(
                "the audit log could not be written",
                reason=str(error),
                principal=audited.principal.name,
                method=audited.method,
                path=audited.path,
                status=audited.status,
            )

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        if not self.has_key and not _names_loopback(headers.get("host", "")):
            raise InvalidInput("without an API key only requests to localhost are taken", code="cross_site")
        if scope["method"] not in READING and _cross_site(headers):
            raise InvalidInput("requests of other sites are refused", code="cross_site")

    async def _body(self, receive: Receive, headers: Headers, scope: Scope) -> Receive:
        """What the application receives: a body read and counted already, or counted while it is read."""
        streamed = scope["method"] == "PATCH" and scope["path"].startswith(STREAMED_PATHS)
        most_bytes = self.max_import_bytes if scope["path"] == IMPORT_PATH else self.max_body_bytes
        if streamed:
            most_bytes = self.max_part_bytes
        elif SESSION.match(scope["path"]):
            most_bytes = max(most_bytes, SESSION_BODY_BYTES)
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > most_bytes:
            raise _too_large(most_bytes)
        # A small compressed body can unpack to any size.
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidInput("send the body uncompressed", code="unsupported_media_type")
        counted = _counted(receive, most_bytes)
        if streamed:
            return counted
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return _replay(await _whole(counted), receive)
        except TimeoutError:
            raise _too_slow() from None


async def _whole(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _counted(receive: Receive, most_bytes: int) -> Receive:
    size = 0
    deadline = time.monotonic() + PART_SECONDS

    async def counted() -> Message:
        nonlocal size
        try:
            async with asyncio.timeout(min(BODY_SECONDS, deadline - time.monotonic())):
                message = await receive()
        except TimeoutError:
            raise _too_slow() from None
        size += len(message.get("body", b""))
        if size > most_bytes:
            raise _too_large(most_bytes)
        return message

    return counted


def _too_slow() -> InvalidInput:
    return InvalidInput(f"the body did not arrive within {BODY_SECONDS:g} s", code="body_timeout")


def _too_large(most_bytes: int) -> InvalidInput:
    return InvalidInput(f"the body is larger than {most_bytes} bytes", code="body_too_large")


class _AuditedRequest:
    """One request as the audit log names it: who asked for what, and how it ended."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.method: str = scope["method"]
        # A session's address may carry its key, which is nobody's to read.
        self.path: str = SESSION.sub(r"/s/\1", scope["path"])
        self.request_id = str(ULID())
        self.principal = NOBODY
        self.status = 0
        self._send = send

    @property
    def worth_noting(self) -> bool:
        """Changes and refusals, but not what the rate limit stopped, which may be a flood."""
        polled = self.path in TINKER_POLLS
        polled = polled or self.path.startswith("/s/")
        return self.status in (401, 403) or (self.method not in READING and self.status != 429 and not polled)

    async def send(self, message: Message) -> None:
        """Pass a response on with the headers that every response has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _RESPONSE_HEADERS.items():
                headers.setdefault(name, value)
            headers["X-Request-Id"] = self.request_id
        await self._send(message)


def _authorization(path: str, headers: Headers) -> str:
    """Clients of the Tinker API send the key in a header of its own, behind a prefix that they insist on; so do
    Anthropic's, without one."""
    of_its_own = path.startswith(TINKER_PATHS) or dialect(path, headers) == "anthropic"
    key = headers.get("x-api-key", "") if of_its_own else ""
    return f"Bearer {key.removeprefix(TINKER_PREFIX)}" if key else headers.get("authorization", "")


def _names_loopback(host: str) -> bool:
    # A site whose name is made to resolve to loopback (DNS rebinding) still sends its own name.
    found = _split(f"//{host}")
    return found is not None and found.hostname in LOOPBACK


def _cross_site(headers: Headers) -> bool:
    origin = headers.get("origin")
    found = _split(origin or "")
    return origin is not None and (found is None or found.netloc != headers.get("host"))


def _split(url: str) -> SplitResult | None:
    """The parts of a URL; None where it is none, as with an unclosed bracket."""
    try:
        return urlsplit(url)
    except ValueError:
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


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
