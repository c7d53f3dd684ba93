"""Completions through the pool of inference replicas: which replica is asked, and its answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.assignment import ReplicaAssigner
from services.orchestrator.replicas.registry import LiveReplica
from services.orchestrator.replicas.traffic import ServingTraffic
from spo.errors import NotFound, NotReady, SpoError, Unreachable
from spo.rpc.client import ResponseStream, RpcClient
from spo.spec.job_spec import JobSpec
from spo.spec.job_state import HOLDS_SLOT
from spo.v1.inference_service_pb2 import ServeRequest, ServeResponse
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub

LOOK_SECONDS = 0.25
# For so long a replica that said it cannot serve a run is not asked for it again.
UNFIT_SECONDS = 30.0
# An ended run's use is noted no more often than this.
NOTE_SECONDS = 20.0
MOST_UNFIT = 1000


class NotServed(NotReady):
    """No replica has come to serve a run; one may be on its way, which takes as long as a model takes to load."""

    retry_after_seconds = 10


@dataclass(frozen=True)
class PoolLimits:
    """How many completions are under way at once, how long one may take, and wait for its model."""

    streams: int
    seconds: float
    wait_seconds: float


@dataclass
class _KnownReplicas:
    """Live replicas as they were read a moment ago, and what is remembered of them."""

    replicas: list[LiveReplica] = field(default_factory=list)
    read_at: float = float("-inf")
    unfit: dict[tuple[str, str], float] = field(default_factory=dict)
    noted: dict[str, float] = field(default_factory=dict)


class ServingPool:
    """Asks the replicas; a thread reads each answer, and its parts are awaited in the event loop of whoever asks."""

    def __init__(self, jobs: JobStore, assigner: ReplicaAssigner, limits: PoolLimits, traffic: ServingTraffic) -> None:
        self.jobs = jobs
        self.assigner = assigner
        self.limits = limits
        self.traffic = traffic
        self._threads = ThreadPoolExecutor(limits.streams, thread_name_prefix="serving")
        self._lock = threading.Lock()
        self._clients: dict[str, RpcClient] = {}
        self._turn = itertools.count()
        self._known = _KnownReplicas()

    async def serve(self, request: ServeRequest) -> AsyncGenerator[ServeResponse, None]:
        """The answer in parts. Closing the iterator ends the sampling.

        Raises NotServed when no replica has come to serve the run in time, and what the replica raises.
        """
        with self.traffic.completion(request.run_id):
            async with contextlib.aclosing(self._served(request)) as answer:
                async for response in answer:
                    yield response

    async def _served(self, request: ServeRequest) -> AsyncGenerator[ServeResponse, None]:
        deadline = time.monotonic() + self.limits.wait_seconds
        while True:
            replica = await asyncio.to_thread(self._replica_for, request.run_id)
            if replica is None:
                if time.monotonic() > deadline:
                    raise await asyncio.to_thread(self._not_served, request.run_id)
                await asyncio.sleep(LOOK_SECONDS)
                continue
            begun = False
            try:
                async with contextlib.aclosing(self._answer(replica, request)) as answer:
                    async for response in answer:
                        begun = True
                        yield response
                return
            except SpoError as error:
                moved = error.code == "other_run" or isinstance(error, NotReady)
                if begun or not moved or time.monotonic() > deadline:
                    raise
                self._note_unfit(replica, request.run_id)
                await asyncio.sleep(LOOK_SECONDS)

    async def _answer(self, replica: LiveReplica, request: ServeRequest) -> AsyncGenerator[ServeResponse, None]:
        stream = self._client(replica.address).stream("Serve", request, self.limits.seconds)
        arrived: asyncio.Queue[ServeResponse | BaseException | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._threads.submit(_read, stream, lambda found: loop.call_soon_threadsafe(arrived.put_nowait, found))
        try:
            while (found := await arrived.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            stream.cancel()

    def _replica_for(self, run_id: str) -> LiveReplica | None:
        """One that is assigned to the run, else one that holds its model; None, and the use noted, where none does."""
        spec = self.jobs.spec(run_id)
        candidates = [each for each in self._live() if self._is_fit(each, run_id)]
        chosen = [each for each in candidates if each.run_id == run_id]
        if self.jobs.state(run_id) not in HOLDS_SLOT:
            self._note_use(run_id)
        if not chosen:
            chosen = [each for each in candidates if each.run_id and self._holds(each.run_id, spec)]
        return chosen[next(self._turn) % len(chosen)] if chosen else None

    def _live(self) -> list[LiveReplica]:
        with self._lock:
            known = self._known
            if time.monotonic() - known.read_at > LOOK_SECONDS:
                live = self.assigner.replicas.live()
                known.replicas = [each for each in live if each.pool == "inference" and not each.draining]
                known.read_at = time.monotonic()
                for address in set(self._clients) - {each.address for each in live}:
                    self._clients.pop(address).close()
            return known.replicas

    def _is_fit(self, replica: LiveReplica, run_id: str) -> bool:
        until = self._known.unfit.get((replica.replica_id, run_id), 0.0)
        return bool(replica.address) and replica.refused_run_id != run_id and time.monotonic() > until

    def _holds(self, served: str, spec: JobSpec) -> bool:
        """Whether an engine that serves one run may well serve another; the replica knows it for certain."""
        try:
            other = self.jobs.spec(served)
        except NotFound:
            return False
        return (other.model.path, other.model.dtype) == (spec.model.path, spec.model.dtype)

    def _note_unfit(self, replica: LiveReplica, run_id: str) -> None:
        with self._lock:
            self._known.read_at = float("-inf")
            if replica.run_id != run_id:
                if len(self._known.unfit) >= MOST_UNFIT:
                    self._known.unfit.clear()
                self._known.unfit[replica.replica_id, run_id] = time.monotonic() + UNFIT_SECONDS

    def _note_use(self, run_id: str) -> None:
        with self._lock:
            if time.monotonic() - self._known.noted.get(run_id, float("-inf")) < NOTE_SECONDS:
                return
            self._known.noted = {run_id: time.monotonic(), **dict(itertools.islice(self._known.noted.items(), 100))}
        self.assigner.note_use(run_id)

    def _not_served(self, run_id: str) -> SpoError:
        live, coming = self._live(), self.assigner.serving(run_id)
        busy = sorted({each.run_id for each in live if each.run_id and each.run_id != run_id})
        if not live:
            reason = "no inference replica is running yet, and one is asked for (spo_wanted_replicas)"
        elif coming:
            reason = f"replica {coming[0]} has not loaded its model yet"
        elif busy:
            tenant = self._tenant(run_id)
            named = [other for other in busy if self._tenant(other) == tenant]
            reason = f"the replicas serve {', '.join(named[:3]) or 'other jobs'}"
        else:
            reason = "no replica has loaded its model yet"
        waited = f"{self.limits.wait_seconds:g} s"
        return NotServed(f"no replica serves {run_id} after {waited}: {reason}; try again", code="policy_not_served")

    def _tenant(self, run_id: str) -> str | None:
        try:
            return self.jobs.tenant(run_id)
        except NotFound:
            return None

    def _client(self, address: str) -> RpcClient:
        with self._lock:
            if address not in self._clients:
                self._clients[address] = RpcClient("inference", address, InferenceServiceStub)
            return self._clients[address]

    def close(self) -> None:
        """End the connections; completions under way fail."""
        with self._lock:
            for client in self._clients.values():
                client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _read(stream: ResponseStream, put: Callable[[ServeResponse | BaseException | None], object]) -> None:
    """Pass on what comes, then None, or what was raised."""
    try:
        for response in stream:
            put(response)
        put(None)
    except SpoError as error:
        _put_if_awaited(put, error)
    except RuntimeError:
        # The loop has closed: nobody waits.
        stream.cancel()
    except Exception as error:
        _put_if_awaited(put, Unreachable(f"the answer of a replica broke off: {type(error).__name__}"))


def _put_if_awaited(put: Callable[[ServeResponse | BaseException | None], object], error: SpoError) -> None:
    try:
        put(error)
    except RuntimeError:
        return
