"""Operations that were asked for and what came of them, each once whatever is sent again, until they are too old."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from blake3 import blake3

from spo.errors import InvalidInput, NotReady, ResourceExhausted
from spo.v1 import tinker_service_pb2 as wire


@dataclass
class Operation:
    """lane: what is changed by it, or sampled from; operations of one lane run in the order in which they came."""

    request_id: str
    tenant: str
    lane: str
    request: wire.SubmitTinkerRequest
    digest: bytes
    deadline: float
    result: wire.TinkerResult | None = None
    ended: float = 0.0

    def check(self) -> None:
        """Raises NotReady once its time is over."""
        if time.monotonic() > self.deadline:
            raise NotReady("the operation took too long, its wait included", code="tinker_too_late")


@dataclass
class Operations:
    """Safe from several threads. Tenants take turns, and so do the lanes of one."""

    most_per_tenant: int
    life_seconds: float
    result_seconds: float
    _known: OrderedDict[tuple[str, str], Operation] = field(default_factory=OrderedDict)
    _lanes: dict[str, OrderedDict[str, deque[Operation]]] = field(default_factory=dict)
    _waiting: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def submit(self, request_id: str, lane: str, request: wire.SubmitTinkerRequest) -> None:
        """Queue an operation; again with the same content changes nothing.

        Raises ResourceExhausted where too much of the tenant waits, InvalidInput on another content under a known id.
        """
        digest = blake3(request.SerializeToString(deterministic=True)).digest()
        with self._changed:
            self._forget()
            known = self._known.get((request.tenant, request_id))
            if known:
                if known.digest != digest:
                    message = f"{request_id} was another request before"
                    raise InvalidInput(message, code="tinker_request_reused")
                return
            if self._waiting[request.tenant] >= self.most_per_tenant:
                message = f"{self.most_per_tenant} operations of yours wait; collect some results first"
                raise ResourceExhausted(message, code="tinker_limit")
            operation = Operation(
                request_id, request.tenant, lane, request, digest, time.monotonic() + self.life_seconds
            )
            self._known[request.tenant, request_id] = operation
            self._lanes.setdefault(request.tenant, OrderedDict()).setdefault(lane, deque()).append(operation)
            self._waiting[request.tenant] += 1
            self._changed.notify_all()

    def collect(self, tenant: str, request_ids: Iterator[str]) -> Iterator[wire.TinkerResult]:
        """What is done, and which ids are unknown, or another tenant's."""
        for request_id in request_ids:
            with self._changed:
                known = self._known.get((tenant, request_id))
            if known is None:
                yield wire.TinkerResult(request_id=request_id, unknown=True)
            elif known.result is not None:
                yield known.result

    def take(self, seconds: float, fits: Callable[[Operation, Operation], bool], most: int) -> list[Operation]:
        """The next operation, and those behind it in its lane that fit it; empty when none came in time."""
        with self._changed:
            if not self._lanes:
                self._changed.wait(seconds)
            if not self._lanes:
                return []
            tenant, lanes = next(iter(self._lanes.items()))
            lane, queue = lanes.popitem(last=False)
            taken = [queue.popleft()]
            while queue and len(taken) < most and fits(taken[0], queue[0]):
                taken.append(queue.popleft())
            if queue:
                lanes[lane] = queue
            del self._lanes[tenant]
            if lanes:
                self._lanes[tenant] = lanes
            return taken

    def end(self, operation: Operation, result: wire.TinkerResult) -> None:
        """Its result can be collected from now on."""
        result.request_id = operation.request_id
        with self._changed:
            operation.result, operation.ended = result, time.monotonic()
            # What was sent is needed no more; its digest says whether it is sent again.
            operation.request = wire.SubmitTinkerRequest()
            self._waiting[operation.tenant] -= 1

    def _forget(self) -> None:
        oldest = time.monotonic() - self.result_seconds
        for key, operation in list(self._known.items()):
            if not operation.ended or operation.ended > oldest:
                break
            del self._known[key]
