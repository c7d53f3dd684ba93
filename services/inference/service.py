"""gRPC of an inference replica: decode, call, encode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.inference.deaths import EngineDeaths, sampling_of
from services.inference.engine import Sample
from services.inference.episodes.group import StartedEpisodes
from services.inference.replica import ServingReplica
from services.inference.rollouts import StartedGroup, start_group
from services.inference.serving.completions import ServedRuns, responses
from spo.errors import NotReady, ResourceExhausted
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS
from spo.rpc.long_calls import Parts
from spo.rpc.long_polls import ANSWERING_THREADS
from spo.v1 import inference_service_pb2 as inference
from spo.v1.inference_service_pb2_grpc import InferenceServiceServicer

# Health checks share the server's threads: some are kept free for them.
MAX_GENERATE_CALLS = ANSWERING_THREADS - 8


class InferenceService(InferenceServiceServicer):
    """Generate for evaluation and value estimation, Serve for whoever uses a policy, DescribeReplica for people."""

    def __init__(
        self, replica: ServingReplica, replica_id: str, deaths: EngineDeaths, runs: ServedRuns, streams: int
    ) -> None:
        self._runs = runs
        self._streams = threading.BoundedSemaphore(streams)
        self._replica = replica
        self._deaths = deaths
        self._replica_id = replica_id
        self._slots = threading.BoundedSemaphore(MAX_GENERATE_CALLS)
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[int, bool]] = {}

    def Generate(self, request: inference.GenerateRequest, context: grpc.ServicerContext) -> inference.GenerateResponse:
        if not self._slots.acquire(blocking=False):
            raise ResourceExhausted(f"{MAX_GENERATE_CALLS} Generate calls are already being served")
        group = request.group
        try:
            with self._noted(sampling_of(group)) as alone:
                started = start_group(self._replica, group, alone=alone)
                # A caller that gave up frees its sequences.
                context.add_callback(started.cancel)
                remaining = context.time_remaining()
                return inference.GenerateResponse(
                    group=started.result(DEFAULT_DEADLINE_SECONDS if remaining is None else remaining)
                )
        finally:
            self._slots.release()

    def GenerateParts(
        self, request: inference.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference.GeneratePart]:
        """Samples as they finish, of a group of any length; what is in the engine ends with its caller."""
        if not self._slots.acquire(blocking=False):
            raise ResourceExhausted(f"{MAX_GENERATE_CALLS} Generate calls are already being served")
        try:
            with self._noted(sampling_of(request.group)) as alone:
                yield from self._parts(request, context, alone=alone)
        finally:
            self._slots.release()

    def _parts(
        self, request: inference.GenerateRequest, context: grpc.ServicerContext, *, alone: bool
    ) -> Iterator[inference.GeneratePart]:
        group, indexes = request.group, list(request.sample_indexes)
        finished: Parts[tuple[int, Sample] | inference.GeneratePart] = Parts(context)

        def put(place: int, sample: Sample) -> None:
            finished.put((place, sample))

        engine = self._replica.serving(group.run_id).engine
        started = start_group(self._replica, group, alone=alone, indexes=indexes, on_sample=put)
        context.add_callback(started.cancel)
        started.future.add_done_callback(
            lambda future: finished.end(None if future.cancelled() else future.exception())
        )
        seen = -1

        def beat() -> inference.GeneratePart | None:
            nonlocal seen
            asleep = engine.steps == seen and engine.loading is None
            if asleep and not (isinstance(started, StartedEpisodes) and started.awaits_environment):
                return None
            seen = engine.steps
            waits_for = engine.waits_for(started.samples) if isinstance(started, StartedGroup) else ""
            return inference.GeneratePart(steps=seen, waits_for=waits_for)

        try:
            for part in finished.sent(beat):
                if isinstance(part, inference.GeneratePart):
                    yield part
                elif isinstance(started, StartedGroup):
                    yield inference.GeneratePart(finished=[started.trajectory(*part)], steps=engine.steps)
            if started.future.cancelled() or not context.is_active():
                raise NotReady("the caller has gone", code="caller_gone")
            if isinstance(started, StartedEpisodes):
                whole = started.result(0).trajectories
                yield inference.GeneratePart(
                    finished=[each for each in whole if not indexes or each.sample_index in indexes], steps=engine.steps
                )
        finally:
            started.cancel()

    @contextmanager
    def _noted(self, work: str) -> Iterator[bool]:
        """Note work once for all who ask for it at the same time; yields whether it has to be done alone."""
        with self._lock:
            asked, alone = self._asked.get(work, (0, False))
            self._asked[work] = asked + 1, alone
        try:
            if asked:
                yield alone
                return
            with self._deaths.during(work) as alone:
                with self._lock:
                    self._asked[work] = self._asked[work][0], alone
                yield alone
        finally:
            with self._lock:
                asked, alone = self._asked.pop(work)
                if asked > 1:
                    self._asked[work] = asked - 1, alone

    def Serve(
        self, request: inference.ServeRequest, context: grpc.ServicerContext
    ) -> Iterator[inference.ServeResponse]:
        if not self._streams.acquire(blocking=False):
            raise ResourceExhausted("as many completions are being sampled here as this replica takes; try again")
        try:
            yield from responses(self._runs.serving(self._replica, request.run_id), request, context)
        finally:
            self._streams.release()

    def DescribeReplica(
        self, request: inference.DescribeReplicaRequest, context: grpc.ServicerContext
    ) -> inference.DescribeReplicaResponse:
        assignment = self._replica.current()
        if assignment is None:
            return inference.DescribeReplicaResponse(replica_id=self._replica_id)
        return inference.DescribeReplicaResponse(
            replica_id=self._replica_id,
            run_id=assignment.run_id,
            model_hash=assignment.engine_spec.model_hash,
            policy_version=assignment.policy_version,
            engine=assignment.sampler,
            running_sequences=assignment.engine.running_sequences,
        )
