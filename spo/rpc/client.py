"""gRPC clients: every call has a deadline and fails with a SpoError."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spo import errors
from spo.observability import tracing
from spo.observability.logs import get_logger
from spo.rpc.statuses import error_of
from spo.rpc.token import with_token

log = get_logger("rpc")

Answer = TypeVar("Answer")
Reply = TypeVar("Reply", bound=Message)

DEFAULT_DEADLINE_SECONDS = 30.0
MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_SECONDS = 30
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
PAUSE_SECONDS = 0.5
SAY_SECONDS = 10.0
# A call whose length the job decides ends when its server has given no sign of life for so long.
SILENT_SECONDS = 30.0


class UnknownMethod(Exception):
    """The server is of a release that does not have the method: it is asked in the way of that release."""


def channel(address: str, *, is_ours: bool = True) -> grpc.Channel:
    """A channel that spreads calls over all addresses of a target and reconnects quickly; ours are shown our token."""
    plain = grpc.insecure_channel(
        address,
        options=[
            *OPTIONS,
            ("grpc.service_config", '{"loadBalancingConfig":[{"round_robin":{}}]}'),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ],
    )
    return with_token(plain) if is_ours else plain


class _StreamedReply(Protocol):
    """What gRPC gives for an answer in parts."""

    def __iter__(self) -> Iterator[Any]: ...
    def cancel(self) -> bool: ...


class ResponseStream:
    """The parts of an answer as they come; `cancel`, from any thread, ends it on both sides."""

    def __init__(self, reply: _StreamedReply, service: str, address: str) -> None:
        self._reply = reply
        self._service = service
        self._address = address

    def __iter__(self) -> Iterator[Any]:
        """Raises the SpoError the server raised, or Unreachable after the call's deadline."""
        try:
            yield from self._reply
        except grpc.RpcError as failure:
            raise error_of(failure, self._service, self._address) from None

    def cancel(self) -> None:
        self._reply.cancel()


class RpcClient:
    """A stub whose every call has a deadline and fails with a SpoError.

    `RpcClient("replay-buffer", address, ReplayServiceStub).call("SampleBatch", request, deadline_seconds=5)`.
    A server that is not `is_ours` is shown no token.
    """

    def __init__(
        self, service: str, address: str, stub: Callable[[grpc.Channel], Any], *, is_ours: bool = True
    ) -> None:
        self.service = service
        self.address = address
        self._channel = channel(address, is_ours=is_ours)
        self._closed = False
        self._stub = stub(self._channel)

    def call(
        self,
        method: str,
        request: Message,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
        *,
        stop: threading.Event | None = None,
    ) -> Any:
        """Return the response. Raises the SpoError the server raised, or Unreachable after deadline_seconds.

        With `stop`, for long polls: the call is given up, Unreachable, soon after the event is set. Within a span the
        call is a span too.
        """
        if not tracing.current():
            return self._call(method, request, deadline_seconds, stop, ())
        with tracing.span(method, kind="CLIENT", service=self.service) as begun:
            return self._call(method, request, deadline_seconds, stop, ((tracing.HEADER, begun.header),))

    def _call(
        self,
        method: str,
        request: Message,
        deadline_seconds: float,
        stop: threading.Event | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> Any:
        if stop is not None:
            return self._while_wanted(method, request, lambda: not stop.is_set(), deadline_seconds, metadata)
        try:
            return getattr(self._stub, method)(request, timeout=deadline_seconds, metadata=metadata)
        except grpc.RpcError as failure:
            raise error_of(failure, self.service, self.address) from None
        except ValueError:
            # gRPC's way of refusing calls after close; anything else is a fault of ours.
            if not self._closed:
                raise
            raise self._is_closed() from None

    def call_while(self, method: str, request: Message, wanted: Callable[[], bool], kind: type[Reply]) -> Reply:
        """As `call` without a deadline, of a server that cannot show progress: pings watch over the connection.

        kind: of the response. Raises Unreachable soon after `wanted` says no.
        """
        reply = self._while_wanted(method, request, wanted, None, _trace())
        assert isinstance(reply, kind)
        return reply

    def _while_wanted(
        self,
        method: str,
        request: Message,
        wanted: Callable[[], bool],
        deadline_seconds: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> object:
        try:
            reply = getattr(self._stub, method).future(request, timeout=deadline_seconds, metadata=metadata)
        except ValueError:
            raise self._is_closed() from None
        arrived = threading.Event()
        reply.add_done_callback(lambda _: arrived.set())
        try:
            while not arrived.wait(PAUSE_SECONDS):
                if not wanted():
                    raise self._is_given_up()
            answer: object = reply.result()
            return answer
        except grpc.RpcError as failure:
            raise error_of(failure, self.service, self.address) from None
        except grpc.FutureCancelledError:
            raise self._is_closed() from None
        finally:
            reply.cancel()

    def parts(
        self,
        method: str,
        request: Message,
        wanted: Callable[[], bool] = lambda: True,
        silent_seconds: float = SILENT_SECONDS,
    ) -> Iterator[Any]:
        """The parts of an answer that may take any time, as they come; each is a sign of life.

        Raises the SpoError the server raised, Unreachable silent_seconds after the last part or soon after `wanted`
        says no, UnknownMethod. The server is told when the iterator ends early.
        """
        try:
            reply = getattr(self._stub, method)(request, metadata=_trace())
        except ValueError:
            raise self._is_closed() from None
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_read_into, args=(reply, inbox), name="parts", daemon=True).start()
        heard = asked = time.monotonic()
        try:
            while True:
                with suppress(queue.Empty):
                    part = inbox.get(timeout=PAUSE_SECONDS)
                    heard = time.monotonic()
                    if part is None:
                        return
                    if isinstance(part, grpc.RpcError):
                        raise self._raised(method, part)
                    yield part
                now = time.monotonic()
                if now - heard > silent_seconds:
                    message = f"{self.service} at {self.address} showed no progress for {silent_seconds:g} s"
                    raise errors.Unreachable(message)
                if now - asked > PAUSE_SECONDS:
                    asked = now
                    if not wanted():
                        raise self._is_given_up()
        finally:
            reply.cancel()

    def _raised(self, method: str, failure: grpc.RpcError) -> Exception:
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return UnknownMethod(method)
        return error_of(failure, self.service, self.address)

    def _is_closed(self) -> errors.Unreachable:
        return errors.Unreachable(f"the connection to {self.service} is closed: the process is stopping")

    def _is_given_up(self) -> errors.Unreachable:
        message = f"gave up on {self.service}: the process is stopping, or nobody waits for the answer any more"
        return errors.Unreachable(message)

    def stream(self, method: str, request: Message, deadline_seconds: float) -> ResponseStream:
        """Begin a call whose answer comes in parts. Raises Unreachable when the client is closed."""
        try:
            reply = getattr(self._stub, method)(request, timeout=deadline_seconds)
        except ValueError:
            raise self._is_closed() from None
        return ResponseStream(reply, self.service, self.address)

    def call_patiently(
        self,
        method: str,
        request: Message,
        deadline_seconds: float,
        *,
        patience_seconds: float,
        stop: threading.Event,
        wanted: Callable[[], bool] = lambda: True,
        passing: frozenset[str] = frozenset(),
    ) -> Any:
        """Like `call`, each try with the deadline, repeated as `patiently` does."""
        return self.patiently(
            lambda: self.call(method, request, deadline_seconds),
            patience_seconds=patience_seconds,
            stop=stop,
            wanted=wanted,
            passing=passing,
        )

    def patiently(
        self,
        attempt: Callable[[], Answer],
        *,
        patience_seconds: float,
        stop: threading.Event,
        wanted: Callable[[], bool] = lambda: True,
        passing: frozenset[str] = frozenset(),
        signs: Callable[[], int] = lambda: 0,
    ) -> Answer:
        """An attempt, repeated while its error is retryable or its code is one of `passing`, for callers with time.

        The last error is raised after patience_seconds or when the result is no longer wanted, NotReady once stop is
        set. What is waited for is logged every SAY_SECONDS. signs: how many signs of life there have been; patience
        begins anew after each.
        """
        began = said = time.monotonic()
        seen = signs()
        while True:
            try:
                return attempt()
            except errors.SpoError as error:
                now = time.monotonic()
                if signs() != seen:
                    began, seen = now, signs()
                passes = error.retryable or error.code in passing
                if not passes or now - began > patience_seconds or not wanted():
                    raise
                if now - said > SAY_SECONDS:
                    said = now
                    log.warning("waiting for a service", waits_for=self.service, reason=error.message)
                if stop.wait(PAUSE_SECONDS):
                    raise errors.NotReady(f"stopped while waiting for {self.service}: {error.message}") from None

    def close(self) -> None:
        """End the connection; calls under way fail with Unreachable."""
        self._closed = True
        self._channel.close()


def _trace() -> tuple[tuple[str, str], ...]:
    """What continues the trace of the span that the call is made in."""
    current = tracing.current()
    return ((tracing.HEADER, current),) if current else ()


def _read_into(reply: _StreamedReply, inbox: queue.SimpleQueue[Any]) -> None:
    """Parts as they come, then None, or the error instead."""
    try:
        for part in reply:
            inbox.put(part)
        inbox.put(None)
    except grpc.RpcError as failure:
        inbox.put(failure)


def is_healthy(address: str, deadline_seconds: float = 1.0) -> bool:
    """Whether the service at address says SERVING to the standard health check."""
    with channel(address) as connection:
        try:
            reply = health_pb2_grpc.HealthStub(connection).Check(
                health_pb2.HealthCheckRequest(), timeout=deadline_seconds
            )
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
