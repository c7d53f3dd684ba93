"""gRPC servers with health checking: what a handler raises becomes a status with details, and long polls leave
threads for others; and the calls that every pool of judges answers.
"""

# ruff: noqa: N802  (gRPC method names come from the proto)

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
import redis
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from spo import errors, observability
from spo.errors import NotReady
from spo.messaging.redis_client import as_spo_error
from spo.observability import get_logger
from spo.rpc.client import (
    DEFAULT_DEADLINE_SECONDS,
    KEEPALIVE_SECONDS,
    OPTIONS,
    ComingVerdicts,
    RequireToken,
    judged_parts,
    status_of,
)
from spo.rpc.healthcheck import REASON
from spo.v1 import judge_service_pb2 as judge
from spo.v1.judge_service_pb2_grpc import JudgeServiceServicer
from spo.v1.verdict_pb2 import TestSet

# Threads of a server that no long poll takes.
ANSWERING_THREADS = 64

log = get_logger("rpc")

# Servers end connections of this age (calls under way go on), so that clients ask DNS again and find new replicas.
CONNECTION_AGE_SECONDS = 60
MOST_REASON_CHARACTERS = 500


class LongPolls:
    """The places of one server for handlers that wait; a waiting thread costs memory, no CPU."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._free = threading.BoundedSemaphore(places)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place while the body waits. Raises NotReady (code "too_many_waiting") at once when all are taken."""
        if not self._free.acquire(blocking=False):
            raise NotReady(f"{self._places} others already wait here; ask again soon", code="too_many_waiting")
        try:
            yield
        finally:
            self._free.release()


@contextmanager
def _as_statuses(context: grpc.ServicerContext, method: str) -> Iterator[None]:
    try:
        yield
    except errors.SpoError as error:
        context.abort_with_status(status_of(error))
    except redis.RedisError as error:
        log.warning("rpc handler failed on Redis", method=method, reason=str(error)[:500])
        context.abort_with_status(status_of(as_spo_error(error)))
    except NotImplementedError as error:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method}: {error}")
    except Exception as error:
        found = errors.storage_error(error)
        if found:
            log.warning("rpc handler failed on a file", method=method, reason=found.message)
            context.abort_with_status(status_of(found))
        log.exception("rpc handler failed", method=method)
        context.abort_with_status(status_of(errors.InternalError(f"{type(error).__name__}: {error}")))


class _TypedErrors(grpc.ServerInterceptor):
    """Turns what a handler raises into a status with details; anything unexpected is logged and becomes INTERNAL."""

    def __init__(self) -> None:
        # Why methods are still to be added; "" once all are there.
        self.loading = ""

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = continuation(handler_call_details)
        if handler is None and self.loading:
            return grpc.unary_unary_rpc_method_handler(self._not_yet)
        if handler is None or (handler.unary_unary is None and handler.unary_stream is None):
            return handler

        serialize = handler.response_serializer
        method = handler_call_details.method
        trace = next(
            (str(value) for name, value in handler_call_details.invocation_metadata if name == observability.HEADER), ""
        )

        def answer(request: object, context: grpc.ServicerContext) -> object:
            if not trace:
                return handler.unary_unary(request, context)
            with observability.span(method.rsplit("/", 1)[-1], parent=trace, kind="SERVER"):
                return handler.unary_unary(request, context)

        def behaviour(request: object, context: grpc.ServicerContext) -> object:
            with _as_statuses(context, method):
                return answer(request, context)

        def stream(request: object, context: grpc.ServicerContext) -> Iterator[object]:
            with _as_statuses(context, method):
                if not trace:
                    yield from handler.unary_stream(request, context)
                    return
                with observability.span(method.rsplit("/", 1)[-1], parent=trace, kind="SERVER"):
                    yield from handler.unary_stream(request, context)

        def encoded(answer: object) -> bytes:
            # A handler may answer with its response's bytes: what is stored serialized is passed on as it is.
            return answer if isinstance(answer, bytes) else bytes(serialize(answer))

        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                stream, request_deserializer=handler.request_deserializer, response_serializer=encoded
            )
        return grpc.unary_unary_rpc_method_handler(
            behaviour, request_deserializer=handler.request_deserializer, response_serializer=encoded
        )

    def _not_yet(self, request: object, context: grpc.ServicerContext) -> None:
        context.abort_with_status(status_of(errors.NotReady(f"the service starts: {self.loading}")))


class _Health(health.HealthServicer):  # type: ignore[misc]
    """The standard health check, whose trailing metadata says why it is not SERVING."""

    reason = ""

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if self.reason:
            context.set_trailing_metadata(((REASON, self.reason),))
        return super().Check(request, context)


class RpcServer:
    """A gRPC server with health checking; servicers are added before `start`, or after it while it says `loading`.

    token: what callers must show (SPO_RPC_TOKEN); "" answers everybody.
    """

    def __init__(self, host: str, port: int, max_workers: int = 16, token: str = "") -> None:
        self._typed_errors = _TypedErrors()
        guard = [RequireToken(token)] if token else []
        self.server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=max_workers, thread_name_prefix="rpc"),
            interceptors=[*guard, self._typed_errors],
            options=[
                *OPTIONS,
                ("grpc.so_reuseport", 0),
                ("grpc.max_connection_age_ms", CONNECTION_AGE_SECONDS * 1000),
                # A caller whose machine went away without a word is one that has hung up.
                ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
                # By default a server hangs up on clients that ping so often during a long call ("too many pings").
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 1000 // 2),
            ],
        )
        self.health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self._obstacle = ""
        self.set_serving(False)
        self.port = self.server.add_insecure_port(f"{host}:{port}")
        self.address = f"{host}:{self.port}"

    def set_serving(self, serving: bool, reason: str = "") -> None:
        """Readiness as seen by the standard gRPC health check; `spo.rpc.healthcheck` shows the reason why not."""
        self._serving, self._reason = serving, reason
        self._say()

    def set_obstacle(self, reason: str) -> None:
        """Something without which the service is not ready, whatever else is said; "" when it is out of the way."""
        if reason != self._obstacle:
            self._obstacle = reason
            self._say()

    def _say(self) -> None:
        serving, reason = self._serving and not self._obstacle, self._reason or self._obstacle
        # Metadata takes printable ASCII.
        printable = " ".join(reason.split()).encode("ascii", "replace").decode()
        self.health.reason = "" if serving else printable[:MOST_REASON_CHARACTERS]
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        self.health.set("", status)

    def start(self, loading: str = "") -> None:
        """Answer from now on; loading: why servicers are still to come, until `loaded`."""
        self._typed_errors.loading = loading
        if loading:
            self.set_serving(serving=False, reason=loading)
        self.server.start()

    def loaded(self) -> None:
        """All servicers are there."""
        self._typed_errors.loading = ""

    def stop(self, grace_seconds: float) -> None:
        self.health.enter_graceful_shutdown()
        self.server.stop(grace_seconds).wait(grace_seconds + 1)


class UploadedTestSets(Protocol):
    """Where a pool of judges keeps test sets."""

    def upload(self, test_set: TestSet, /) -> str: ...


class JudgeCalls(JudgeServiceServicer):
    """The calls of every pool of judges; a pool says how responses are submitted and what it is.

    unwanted: what waiting for verdicts raises, besides TimeoutError, once nobody waits for them any more.
    """

    def __init__(self, test_sets: UploadedTestSets, unwanted: tuple[type[BaseException], ...]) -> None:
        self._test_sets = test_sets
        self._gone: tuple[type[BaseException], ...] = (*unwanted, TimeoutError)

    def submitted(self, request: judge.JudgeRequest) -> ComingVerdicts:
        """The verdicts to come on a request's responses. Raises InvalidInput, NotFound, ResourceExhausted."""
        raise NotImplementedError

    def UploadTests(
        self, request: judge.UploadTestsRequest, context: grpc.ServicerContext
    ) -> judge.UploadTestsResponse:
        """Store test sets by digest."""
        return judge.UploadTestsResponse(digests=[self._test_sets.upload(test_set) for test_set in request.test_sets])

    def Judge(self, request: judge.JudgeRequest, context: grpc.ServicerContext) -> judge.JudgeResponse:
        """One verdict per response; a caller that hangs up cancels those that wait."""
        batch = self.submitted(request)
        if not context.add_callback(batch.cancel):
            batch.cancel()
        try:
            verdicts = batch.verdicts(context.time_remaining() or DEFAULT_DEADLINE_SECONDS)
        except self._gone:
            batch.cancel()
            raise NotReady("the caller's deadline passed before all responses were judged") from None
        return judge.JudgeResponse(verdicts=verdicts)

    def JudgeParts(self, request: judge.JudgeRequest, context: grpc.ServicerContext) -> Iterator[judge.JudgePart]:
        """As Judge, however long it takes."""
        batch = self.submitted(request)
        try:
            yield from judged_parts(batch, len(request.programs) + len(request.raw_programs), context)
        except self._gone:
            raise NotReady("the call ended before all responses were judged") from None
