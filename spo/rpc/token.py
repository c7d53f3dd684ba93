"""The token that the platform's services show each other, so that nobody else in the cluster is answered.

It travels in the metadata of every call, in clear text where the network does not encrypt: it keeps strangers out where
a cluster enforces no network policies, and is no TLS. Health checks are answered without it.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

import grpc

from spo import errors
from spo.observability.logs import get_logger
from spo.rpc.statuses import status_of

log = get_logger("rpc")

T = TypeVar("T")
Request = TypeVar("Request")
Answer = TypeVar("Answer")

HEADER = "authorization"
SCHEME = "Bearer "
_OPEN = "/grpc.health.v1.Health/"
_SAY_SECONDS = 10.0

_shown = ""


def tokens_of(setting: str) -> list[str]:
    """The tokens of SPO_RPC_TOKEN: one, or several separated by commas while it is changed; the first is shown."""
    return [token for part in setting.split(",") if (token := part.strip())]


def show_token(setting: str) -> None:
    """Have this process show the first token of the setting in the calls of every channel that it opens from now on."""
    global _shown
    _shown = next(iter(tokens_of(setting)), "")


def with_token(channel: grpc.Channel) -> grpc.Channel:
    """The channel, whose calls show this process' token; the same channel where there is none."""
    return grpc.intercept_channel(channel, _ShowToken(_shown)) if _shown else channel


class _CallDetails(NamedTuple):
    """A call as gRPC describes it to an interceptor; grpc.ClientCallDetails is abstract."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _ShowToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._header = (HEADER, SCHEME + token)

    def intercept_unary_unary(
        self, continuation: Callable[..., T], client_call_details: grpc.ClientCallDetails, request: object
    ) -> T:
        return continuation(self._shown(client_call_details), request)

    def intercept_unary_stream(
        self, continuation: Callable[..., T], client_call_details: grpc.ClientCallDetails, request: object
    ) -> T:
        return continuation(self._shown(client_call_details), request)

    def _shown(self, call: grpc.ClientCallDetails) -> _CallDetails:
        return _CallDetails(
            call.method,
            call.timeout,
            [*(call.metadata or ()), self._header],
            call.credentials,
            call.wait_for_ready,
            call.compression,
        )


class RequireToken(grpc.ServerInterceptor):
    """Answers UNAUTHENTICATED (code "rpc_unauthenticated") to calls without one of the tokens, except health checks."""

    def __init__(self, setting: str) -> None:
        self._accepted = [(SCHEME + token).encode() for token in tokens_of(setting)]
        self._said = float("-inf")

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Request, Answer] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Answer] | None:
        if handler_call_details.method.startswith(_OPEN):
            return continuation(handler_call_details)
        shown = next((value for name, value in handler_call_details.invocation_metadata if name == HEADER), "")
        presented = shown if isinstance(shown, bytes) else str(shown).encode()
        # Every token is compared, each in constant time: how long it takes says nothing of how near a guess was.
        if sum(hmac.compare_digest(presented, accepted) for accepted in self._accepted):
            return continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(self._wrong if presented else self._missing)

    def _missing(self, request: object, context: grpc.ServicerContext) -> NoReturn:
        self._refuse(context, "the call shows no token; this service asks for the one in SPO_RPC_TOKEN")

    def _wrong(self, request: object, context: grpc.ServicerContext) -> NoReturn:
        self._refuse(context, "the call shows a token that is not in this service's SPO_RPC_TOKEN")

    def _refuse(self, context: grpc.ServicerContext, message: str) -> NoReturn:
        now = time.monotonic()
        if now - self._said > _SAY_SECONDS:
            self._said = now
            log.warning("a call was refused", peer=context.peer(), reason=message)
        context.abort_with_status(status_of(errors.Unauthenticated(message)))
