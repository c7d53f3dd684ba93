"""What every request passes first: key, size of its body, origin; and the headers every answer carries."""

from __future__ import annotations

import base64
import binascii
import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.orchestrator.problems import problem
from services.orchestrator.settings import LOOPBACK, Settings
from spo.errors import InvalidInput, SpoError

OPEN_PATHS = ("/healthz", "/readyz")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_ANSWER_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Gate:
    """ASGI middleware. Refuses before anything is parsed; a body is counted as it arrives, whatever its length says."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.max_body_bytes = settings.max_body_bytes
        self.api_key = settings.api_key.get_secret_value() if settings.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await problem(refusal)(scope, receive, send)
            return
        try:
            body = await self._body(receive)
        except InvalidInput as error:
            await problem(error)(scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), _with_headers(send))

    def _refusal(self, scope: Scope, headers: Headers) -> SpoError | None:
        if int(headers.get("content-length") or 0) > self.max_body_bytes:
            return self._too_large()
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            return InvalidInput("an API key is needed: Authorization: Bearer <key>", code="unauthorized")
        if self.api_key is None and not _names_loopback(headers.get("host", "")):
            return InvalidInput("without an API key only requests to localhost are taken", code="cross_site")
        if scope["method"] not in ("GET", "HEAD") and _cross_site(headers):
            return InvalidInput("requests of other sites are refused", code="cross_site")
        return None

    def _has_key(self, headers: Headers) -> bool:
        if self.api_key is None:
            return True
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        # Browsers can only be asked for Basic: the key is then its password.
        given = _basic_password(credentials) if scheme.lower() == "basic" else credentials
        return secrets.compare_digest(given.encode(), self.api_key.encode())

    async def _body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b"".join(parts)
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self.max_body_bytes:
                raise self._too_large()
            parts.append(chunk)
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> InvalidInput:
        return InvalidInput(f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")


def _basic_password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _names_loopback(host: str) -> bool:
    # A site whose name is made to resolve to loopback (DNS rebinding) still sends its own name.
    return urlsplit(f"//{host}").hostname in LOOPBACK


def _cross_site(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _ANSWER_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers
