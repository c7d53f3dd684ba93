"""Calls whose length the job decides: they live while the other side shows signs of life, however long they take.

A server sends a part every BEAT_SECONDS while its engine, workers or model are at it, and what has finished at once. A
caller waits while parts come, gives up SILENT_SECONDS after the last one, and keeps what has finished, so that a second
try asks only for the rest. A server whose caller has gone stops. Servers of earlier releases have no parts: they are
asked in one call without a deadline, over a connection that pings watch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from spo.errors import NotReady
from spo.rpc.client import RpcClient, UnknownMethod
from spo.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from spo.v1.judge_service_pb2 import JudgePart, JudgeRequest, JudgeResponse
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import Verdict

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
