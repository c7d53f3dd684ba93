"""gRPC plumbing: servers with health checking, clients with deadlines, and the one mapping of SpoErrors to statuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
import redis
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from spo import errors, tracing
from spo.healthcheck import REASON
from spo.logs import get_logger
from spo.redis_client import as_spo_error
from spo.v1 import errors_pb2

log = get_logger("rpc")

DEFAULT_DEADLINE_SECONDS = 30.0
MAX_MESSAGE_BYTES = 64 << 20
PAUSE_SECONDS = 0.5
# Servers end connections of this age (calls under way go on), so that clients ask DNS again and find new replicas.
CONNECTION_AGE_SECONDS = 60
KEEPALIVE_SECONDS = 30
MOST_REASON_CHARACTERS = 500
SAY_SECONDS = 10.0

_CODES: tuple[tuple[type[errors.SpoError], int], ...] = (
    (errors.InvalidInput, code_pb2.INVALID_ARGUMENT),
    (errors.NotFound, code_pb2.NOT_FOUND),
    (errors.Conflict, code_pb2.ABORTED),
    (errors.PreconditionFailed, code_pb2.FAILED_PRECONDITION),
    (errors.NotReady, code_pb2.UNAVAILABLE),
    (errors.ResourceExhausted, code_pb2.RESOURCE_EXHAUSTED),
    (errors.IntegrityError, code_pb2.DATA_LOSS),
    (errors.SpoError, code_pb2.INTERNAL),
)
_BY_CODE: dict[str, type[errors.SpoError]] = {"lease_lost": errors.LeaseLost}
_BY_STATUS: dict[grpc.StatusCode, type[errors.SpoError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidInput,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.FAILED_PRECONDITION: errors.PreconditionFailed,
    grpc.StatusCode.UNAVAILABLE: errors.NotReady,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unreachable,
    grpc.StatusCode.CANCELLED: errors.Unreachable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.DATA_LOSS: errors.IntegrityError,
}
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def status_of(error: errors.SpoError) -> Any:
    """The gRPC status, with an ErrorDetail, that says the same as the error."""
    code = next(number for kind, number in _CODES if isinstance(error, kind))
    detail = errors_pb2.ErrorDetail(
        code=error.code,
        retryable=error.retryable,
        violations=[
            errors_pb2.FieldViolation(pointer=violation.pointer, message=violation.message)
            for violation in error.violations
        ],
    )
    packed = AnyMessage()
    packed.Pack(detail)
    return rpc_status.to_status(status_pb2.Status(code=code, message=error.message, details=[packed]))


def error_of(failure: grpc.RpcError, service: str, address: str) -> errors.SpoError:
    """The SpoError a failed call stands for; names the service and where it was looked for when it did not answer."""
    status = failure.code()
    rich = rpc_status.from_call(failure)
    if rich is not None:
        for packed in rich.details:
            detail = errors_pb2.ErrorDetail()
            if packed.Unpack(detail):
                kind = _BY_CODE.get(detail.code) or _BY_STATUS.get(status, errors.InternalError)
                violations = tuple(errors.FieldViolation(each.pointer, each.message) for each in detail.violations)
                return kind(rich.message, code=detail.code, violations=violations)
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return errors.Unreachable(f"{service} at {address} did not answer: {failure.details()}")
    return _BY_STATUS.get(status, errors.InternalError)(f"{service} at {address}: {failure.details()}")


class _TypedErrors(grpc.ServerInterceptor):
    """Turns what a handler raises into a status with details; anything unexpected is logged and becomes INTERNAL."""

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler

        serialize = handler.response_serializer
        method = handler_call_details.method
        trace = next((value for name, value in handler_call_details.invocation_metadata if name == tracing.HEADER), "")

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            if not trace:
                return handler.unary_unary(request, context)
            with tracing.span(method.rsplit("/", 1)[-1], parent=trace, kind="SERVER"):
                return handler.unary_unary(request, context)

        def behaviour(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return answer(request, context)
            except errors.SpoError as error:
                context.abort_with_status(status_of(error))
            except redis.RedisError as error:
                log.warning("rpc handler failed on Redis", method=method, reason=str(error)[:500])
                context.abort_with_status(status_of(as_spo_error(error)))
            except Exception as error:
                log.exception("rpc handler failed", method=method)
                context.abort_with_status(status_of(errors.InternalError(f"{type(error).__name__}: {error}")))

        return grpc.unary_unary_rpc_method_handler(
            behaviour,
            request_deserializer=handler.request_deserializer,
            # A handler may answer with its response's bytes: what is stored serialized is passed on as it is.
            response_serializer=lambda answer: answer if isinstance(answer, bytes) else serialize(answer),
        )


class _Health(health.HealthServicer):  # type: ignore[misc]
    """The standard health check, whose trailing metadata says why it is not SERVING."""

    reason = ""

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if self.reason:
            context.set_trailing_metadata(((REASON, self.reason),))
        return super().Check(request, context)


class RpcServer:
    """A gRPC server with health checking; `add` registers servicers before `start`."""

    def __init__(self, host: str, port: int, max_workers: int = 16) -> None:
        self.server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=max_workers, thread_name_prefix="rpc"),
            interceptors=[_TypedErrors()],
            options=[
                *_OPTIONS,
                ("grpc.so_reuseport", 0),
                ("grpc.max_connection_age_ms", CONNECTION_AGE_SECONDS * 1000),
                # By default a server hangs up on clients that ping so often during a long call ("too many pings").
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 1000 // 2),
            ],
        )
        self.health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.set_serving(False)
        self.port = self.server.add_insecure_port(f"{host}:{port}")
        self.address = f"{host}:{self.port}"

    def set_serving(self, serving: bool, reason: str = "") -> None:
        """Readiness as seen by the standard gRPC health check; `spo.healthcheck` shows the reason why not."""
        # Metadata takes printable ASCII.
        printable = " ".join(reason.split()).encode("ascii", "replace").decode()
        self.health.reason = "" if serving else printable[:MOST_REASON_CHARACTERS]
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        self.health.set("", status)

    def start(self) -> None:
        self.server.start()

    def stop(self, grace_seconds: float) -> None:
        self.health.enter_graceful_shutdown()
        self.server.stop(grace_seconds).wait(grace_seconds + 1)


def channel(address: str) -> grpc.Channel:
    """A channel that spreads calls over all addresses of its target and reconnects quickly."""
    return grpc.insecure_channel(
        address,
        options=[
            *_OPTIONS,
            ("grpc.service_config", '{"loadBalancingConfig":[{"round_robin":{}}]}'),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ],
    )


class Client:
    """A stub whose every call has a deadline and fails with a SpoError.

    `Client("replay-buffer", address, ReplayServiceStub).call("SampleBatch", request, deadline_seconds=5)`.
    """

    def __init__(self, service: str, address: str, stub: Callable[[grpc.Channel], Any]) -> None:
        self.service = service
        self.address = address
        self._channel = channel(address)
        self._closed = False
        self._stub = stub(self._channel)

    def call(
        self,
        method: str,
        request: Any,
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
        request: Any,
        deadline_seconds: float,
        stop: threading.Event | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> Any:
        try:
            if stop is None:
                return getattr(self._stub, method)(request, timeout=deadline_seconds, metadata=metadata)
            reply = getattr(self._stub, method).future(request, timeout=deadline_seconds, metadata=metadata)
            arrived = threading.Event()
            reply.add_done_callback(lambda _: arrived.set())
            while not arrived.wait(PAUSE_SECONDS):
                if stop.is_set():
                    reply.cancel()
                    raise errors.Unreachable(f"gave up on {self.service}: the process is stopping")
            return reply.result()
        except grpc.RpcError as failure:
            raise error_of(failure, self.service, self.address) from None
        except ValueError:
            # gRPC's way of refusing calls after close; anything else is a fault of ours.
            if not self._closed:
                raise
            raise errors.Unreachable(f"the connection to {self.service} is closed: the process is stopping") from None

    def call_patiently(
        self,
        method: str,
        request: Any,
        deadline_seconds: float,
        *,
        patience_seconds: float,
        stop: threading.Event,
        wanted: Callable[[], bool] = lambda: True,
        passing: frozenset[str] = frozenset(),
    ) -> Any:
        """Like `call`, repeated while the error is retryable or its code is one of `passing`, for callers with time.

        Each try has the deadline. The last error is raised after patience_seconds or when the result is no longer
        wanted, NotReady once stop is set. What is waited for is logged every SAY_SECONDS.
        """
        began = said = time.monotonic()
        while True:
            try:
                return self.call(method, request, deadline_seconds)
            except errors.SpoError as error:
                now = time.monotonic()
                passes = error.retryable or error.code in passing
                if not passes or now - began > patience_seconds or not wanted():
                    raise
                if now - said > SAY_SECONDS:
                    said = now
                    log.warning("waiting for a service", waits_for=self.service, method=method, reason=error.message)
                if stop.wait(PAUSE_SECONDS):
                    raise errors.NotReady(f"stopped while waiting for {self.service}: {error.message}") from None

    def close(self) -> None:
        """End the connection; calls under way fail with Unreachable."""
        self._closed = True
        self._channel.close()


def is_healthy(address: str, deadline_seconds: float = 1.0) -> bool:
    """Whether the service at address says SERVING to the standard health check."""
    with channel(address) as link:
        try:
            reply = health_pb2_grpc.HealthStub(link).Check(health_pb2.HealthCheckRequest(), timeout=deadline_seconds)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
