"""gRPC clients: every call ends, shows the platform's token, keeps messages small, and fails with a SpoError.

The platform's services show each other a token, so that nobody else in the cluster is answered. It travels in the
metadata of every call, in clear text where the network does not encrypt: it keeps strangers out where a cluster
enforces no network policies, and is no TLS. Health checks are answered without it.

A call has a deadline, unless a job decides its length: such a call lives while the other side shows signs of life.
A server sends a part every BEAT_SECONDS while its engine, workers or model are at it, and what has finished at once. A
caller waits while parts come, gives up SILENT_SECONDS after the last one, and keeps what has finished, so that a second
try asks only for the rest. A server whose caller has gone stops. Servers of earlier releases have no parts: they are
asked in one call without a deadline, over a connection that pings watch.
"""

from __future__ import annotations

import hmac
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from spo import errors, observability
from spo.errors import NotReady
from spo.observability import get_logger
from spo.v1 import errors_pb2
from spo.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from spo.v1.judge_service_pb2 import JudgePart, JudgeRequest, JudgeResponse
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import Verdict

_CODES: tuple[tuple[type[errors.SpoError], int], ...] = (
    (errors.InvalidInput, code_pb2.INVALID_ARGUMENT),
    (errors.NotFound, code_pb2.NOT_FOUND),
    (errors.Conflict, code_pb2.ABORTED),
    (errors.PreconditionFailed, code_pb2.FAILED_PRECONDITION),
    (errors.NotReady, code_pb2.UNAVAILABLE),
    (errors.Unauthenticated, code_pb2.UNAUTHENTICATED),
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
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.DATA_LOSS: errors.IntegrityError,
}

log = get_logger("rpc")

T = TypeVar("T")
Request = TypeVar("Request")
Answer = TypeVar("Answer")

HEADER = "authorization"
SCHEME = "Bearer "
_OPEN = "/grpc.health.v1.Health/"
_SAY_SECONDS = 10.0

_shown = ""

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

# An answer may be some times as long as its question, and is one message too.
CHUNK_BYTES = MAX_MESSAGE_BYTES // 4
# Of an answer in parts: what is sent while the next is made.
PART_BYTES = MAX_MESSAGE_BYTES // 8
# A trajectory travels alone in the worst case, with what is added to it on the way.
MAX_TRAJECTORY_BYTES = MAX_MESSAGE_BYTES // 2
# Of a sampled token: its id, its log-prob and its text.
TOKEN_BYTES = 16


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
                violations = tuple(
                    errors.FieldViolation(violation.pointer, violation.message) for violation in detail.violations
                )
                return kind(rich.message, code=detail.code, violations=violations)
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return errors.Unreachable(f"{service} at {address} did not answer: {failure.details()}")
    if status == grpc.StatusCode.UNIMPLEMENTED:
        return errors.PreconditionFailed(
            f"{service} at {address} has no such method: it is older", code="unimplemented"
        )
    return _BY_STATUS.get(status, errors.InternalError)(f"{service} at {address}: {failure.details()}")


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
        if not observability.current():
            return self._call(method, request, deadline_seconds, stop, ())
        with observability.span(method, kind="CLIENT", service=self.service) as begun:
            return self._call(method, request, deadline_seconds, stop, ((observability.HEADER, begun.header),))

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
        says no, UnknownMethod. The server is told when the iterator ends early. Within a span the call is a span too.
        """
        if not observability.current():
            yield from self._received(method, request, wanted, silent_seconds)
            return
        with observability.span(method, kind="CLIENT", service=self.service):
            yield from self._received(method, request, wanted, silent_seconds)

    def _received(
        self, method: str, request: Message, wanted: Callable[[], bool], silent_seconds: float
    ) -> Iterator[Any]:
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
    current = observability.current()
    return ((observability.HEADER, current),) if current else ()


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


def chunks_by_bytes(sizes: Sequence[int], most_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Slices in order, each of at most so many bytes; what is larger by itself is alone."""
    start, held = 0, 0
    for at, size in enumerate(sizes):
        if at > start and held + size > most_bytes:
            yield slice(start, at)
            start, held = at, 0
        held += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def samples_per_message(tokens: int) -> int:
    """How many samples of so many tokens, prompt and response together, an answer can hold; at least one."""
    return max(1, CHUNK_BYTES // (TOKEN_BYTES * tokens))


BEAT_SECONDS = 5.0

Part = TypeVar("Part")


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


# --- callers ---


def generate(
    inference: RpcClient,
    group: PromptGroup,
    *,
    kept: dict[int, Trajectory],
    wanted: Callable[[], bool] = _always,
    alive: Callable[[], None] = _nothing,
) -> list[Trajectory]:
    """Every sample of a group, in their order.

    kept: finished ones by index, filled as they come and never asked for again. alive: called at each sign of life.
    Raises NotReady where some are missing in the end, and what `parts` raises.
    """
    missing = [index for index in range(group.sampling.samples) if index not in kept]
    request = GenerateRequest(group=group, sample_indexes=missing if kept else [])
    try:
        for part in inference.parts("GenerateParts", request, wanted) if missing else ():
            alive()
            kept.update({trajectory.sample_index: trajectory for trajectory in part.finished})
    except UnknownMethod:
        whole = inference.call_while("Generate", GenerateRequest(group=group), wanted, GenerateResponse)
        alive()
        kept.update(enumerate(whole.group.trajectories))
    if not kept.keys() >= set(missing):
        raise NotReady("inference did not answer with every sample", code="judge_incomplete")
    return [kept[index] for index in range(group.sampling.samples)]


def judge(
    judges: RpcClient,
    request: JudgeRequest,
    *,
    wanted: Callable[[], bool] = _always,
    alive: Callable[[], None] = _nothing,
) -> JudgeResponse:
    """The verdicts on programs. alive: called at each sign of life. Raises what `parts` raises."""
    try:
        for part in judges.parts("JudgeParts", request, wanted):
            alive()
            if part.HasField("response"):
                found: JudgeResponse = part.response
                return found
    except UnknownMethod:
        return judges.call_while("Judge", request, wanted, JudgeResponse)
    raise NotReady("the judge ended the call without verdicts", code="judge_incomplete")


# --- servers ---


class ComingVerdicts(Protocol):
    """Verdicts that come in."""

    def pending(self) -> Sequence[Future[Any]]: ...
    def verdicts(self, timeout_seconds: float | None = None) -> list[Verdict]: ...
    def cancel(self) -> None: ...


def judged_parts(batch: ComingVerdicts, programs: int, context: CallContext) -> Iterator[JudgePart]:
    """The parts of a judge's answer; a caller that hangs up cancels the rest. Raises what judging raised, NotReady."""
    pending = batch.pending()
    parts: Parts[JudgePart] = Parts(context)

    def one_ended(_verdict: Future[Any]) -> None:
        if all(each.done() for each in pending):
            parts.end()

    def beat() -> JudgePart:
        return JudgePart(judged=programs - sum(not each.done() for each in pending), programs=programs)

    try:
        for each in pending:
            each.add_done_callback(one_ended)
        if pending:
            yield from parts.sent(beat)
        if not parts.is_wanted:
            raise NotReady("the caller has gone", code="caller_gone")
        yield JudgePart(judged=programs, programs=programs, response=JudgeResponse(verdicts=batch.verdicts(0)))
    finally:
        batch.cancel()


class CallContext(Protocol):
    """What gRPC tells a server about a call."""

    def is_active(self) -> bool: ...
    def add_callback(self, callback: Callable[[], None]) -> bool: ...


class Parts(Generic[Part]):
    """Parts of one answer, from the threads that make them to the one that sends them."""

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._changed = threading.Condition()
        self._waiting: deque[Part] = deque()
        self._error: BaseException | None = None
        self._ended = False
        if not context.add_callback(self.end):
            self.end()

    @property
    def is_wanted(self) -> bool:
        """Whether the caller is still there."""
        return self._context.is_active()

    def put(self, part: Part) -> None:
        """A part of the answer."""
        with self._changed:
            self._waiting.append(part)
            self._changed.notify()

    def end(self, error: BaseException | None = None) -> None:
        """There are no more; error: why, where the answer is not whole."""
        with self._changed:
            self._ended, self._error = True, self._error or error
            self._changed.notify()

    def sent(self, beat: Callable[[], Part | None]) -> Iterator[Part]:
        """The parts as they come, and a beat every BEAT_SECONDS without any: None shows no sign of life.

        Raises the error of the end.
        """
        beats_at = time.monotonic() + BEAT_SECONDS
        while True:
            with self._changed:
                if not self._waiting and not self._ended:
                    self._changed.wait(max(0.0, beats_at - time.monotonic()))
                parts, ended = list(self._waiting), self._ended
                self._waiting.clear()
            yield from parts
            if ended:
                break
            if parts or time.monotonic() >= beats_at:
                if not parts and (part := beat()) is not None:
                    yield part
                beats_at = time.monotonic() + BEAT_SECONDS
        if self._error is not None:
            raise self._error
