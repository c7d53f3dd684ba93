"""gRPC service of the replay buffer: decode, call, encode."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import grpc

from services.replay_buffer.archive import BATCHES_KEPT, ArchivedTrajectories
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.sampling_index import SamplingIndex
from services.replay_buffer.store import StorageMonitor, encode_batch, encode_outlines, encode_parts
from services.replay_buffer.windows import SOURCES, Limiter, source_name
from spo.errors import FieldViolation, InvalidInput, NotFound
from spo.rpc.client import CHUNK_BYTES
from spo.spec.job_spec import longest_trajectory_bytes
from spo.v1 import replay_service_pb2 as replay
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_UNSPECIFIED, Source
from spo.v1.replay_service_pb2_grpc import ReplayServiceServicer
from spo.v1.trajectory_pb2 import Trajectory

# malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The most that glibc takes.
LARGEST_KEPT_BYTES = 32 << 20
MOST_KEPT_BYTES = 128 << 20

DEFAULT_PAGE = 50
MAX_PAGE = 500
# A page ends early where its trajectories are large: it is one message.
READ_AT_ONCE = 32
DEFAULT_STEPS = 100
MAX_STEPS = 1000
# A filtered page reads at most this many trajectories, so that no request reads the whole ledger.
MAX_SCANNED = 5000
# A cursor is an insertion number in Redis, or a place in the experience store.
ARCHIVED = "stored-"
CURSOR = rf"\d{{0,16}}|{ARCHIVED}(0|\d{{1,9}}-\d{{1,9}})"


def keep_large_buffers() -> None:
    """Let the process reuse the memory of large messages, up to MOST_KEPT_BYTES per arena of malloc.

    Otherwise glibc may return each buffer to the kernel, and zeroing the next one's pages costs more than the message
    itself. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES)


class ReplayService(ReplayServiceServicer):
    """Append, SampleBatch, StreamBatch, status and listing; errors are typed in spo.rpc."""

    def __init__(
        self, sampler: BatchSampler, stop_memory_share: float = 0.9, archived: ArchivedTrajectories | None = None
    ) -> None:
        # Batches are large messages; the setting holds for the whole process.
        keep_large_buffers()
        self.sampler = sampler
        self.store = sampler.store
        self.archived = archived
        self.storage = StorageMonitor(self.store.client, stop_memory_share)

    def Append(self, request: replay.AppendRequest, context: grpc.ServicerContext) -> replay.AppendResponse:
        inserted, duplicates = self.store.append(request.run_id, request.trajectories)
        return replay.AppendResponse(inserted=inserted, duplicates=duplicates)

    def SampleBatch(self, request: replay.SampleBatchRequest, context: grpc.ServicerContext) -> bytes:  # type: ignore[override]
        return encode_batch(self.sampler.sample(request, wanted=lambda: context.is_active()))

    def StreamBatch(self, request: replay.StreamBatchRequest, context: grpc.ServicerContext) -> Iterator[bytes]:  # type: ignore[override]
        if not all(0 <= position < request.batch.batch_size for position in request.positions):
            place = FieldViolation("/positions", f"must be in [0, {request.batch.batch_size})")
            raise InvalidInput("a position is outside the batch", violations=(place,))
        batch = self.sampler.sample(request.batch, lambda: context.is_active(), request.positions)
        yield from (
            encode_outlines(batch) if request.outlines else encode_parts(batch, without_texts=request.without_texts)
        )

    def GetReplayStatus(
        self, request: replay.GetReplayStatusRequest, context: grpc.ServicerContext
    ) -> replay.GetReplayStatusResponse:
        index = self.sampler.index(request.run_id)
        pressure = self.storage.pressure()
        with index.lock:
            index.refresh([source_name(code) for code in SOURCES])
            online = index.live(index.rule("online"))
            counts = [_count(index, code) for code in SOURCES]
        limiter = Limiter.of(index.spec, replicas=request.replicas)
        return replay.GetReplayStatusResponse(
            counts=[count for count in counts if count.inserted],
            admissible_inserts=0 if pressure else limiter.admissible_inserts(online),
            groups_per_replica=limiter.groups_per_replica(request.replicas),
            duplicates=self.store.duplicates(request.run_id),
            backpressure=pressure,
        )

    def ListTrajectories(
        self, request: replay.ListTrajectoriesRequest, context: grpc.ServicerContext
    ) -> replay.ListTrajectoriesResponse:
        if not re.fullmatch(CURSOR, request.cursor, re.ASCII):
            raise InvalidInput("the cursor is not one of ours", violations=(FieldViolation("/cursor", "is no number"),))
        self.store.spec(request.run_id)
        limit = max(1, min(request.limit or DEFAULT_PAGE, MAX_PAGE))
        if request.cursor.startswith(ARCHIVED):
            return self._archived_page(request, request.cursor.removeprefix(ARCHIVED), limit)
        found: list[Trajectory] = []
        cursor, scanned, held = request.cursor, 0, 0
        while len(found) < limit and scanned < MAX_SCANNED and held < CHUNK_BYTES:
            count = min(limit - len(found), READ_AT_ONCE)
            page, cursor = self.store.newest_first(request.run_id, request.prompt_id, cursor, count, CHUNK_BYTES)
            found += [trajectory for trajectory in page if request.source in (SOURCE_UNSPECIFIED, trajectory.source)]
            held += sum(trajectory.ByteSize() for trajectory in page)
            scanned += len(page)
            if not cursor:
                break
        # Only what is sampled while a job runs leaves Redis.
        if not cursor and self.archived and request.source in (SOURCE_UNSPECIFIED, SOURCE_ONLINE):
            if found:
                cursor = f"{ARCHIVED}0" if self.store.has_trimmed(request.run_id) else ""
            elif self.store.has_trimmed(request.run_id):
                return self._archived_page(request, "", limit)
        return replay.ListTrajectoriesResponse(trajectories=found, next_cursor=cursor)

    def _archived_page(
        self, request: replay.ListTrajectoriesRequest, cursor: str, limit: int
    ) -> replay.ListTrajectoriesResponse:
        """What has left Redis, from the experience store; what is in both was listed before."""
        if self.archived is None:
            return replay.ListTrajectoriesResponse()
        after = "" if cursor == "0" else cursor
        limit = min(limit, max(1, CHUNK_BYTES // longest_trajectory_bytes(self.store.spec(request.run_id))))
        page = self.archived.page(request.run_id, request.prompt_id, "online", after, limit)
        in_redis = self.store.in_redis(request.run_id, [trajectory.trajectory_id for trajectory in page.trajectories])
        left = [trajectory for trajectory in page.trajectories if trajectory.trajectory_id not in in_redis]
        next_cursor = f"{ARCHIVED}{page.cursor}" if page.cursor else ""
        return replay.ListTrajectoriesResponse(trajectories=left, next_cursor=next_cursor)

    def GetTrajectory(
        self, request: replay.GetTrajectoryRequest, context: grpc.ServicerContext
    ) -> replay.GetTrajectoryResponse:
        found = self._one(request.run_id, request.trajectory_id)
        limit = max(1, min(request.steps_limit or DEFAULT_STEPS, MAX_STEPS))
        index = self.sampler.index(request.run_id)
        with index.lock:
            index.refresh([])
            index.sample_counts.refresh()
            steps = index.sample_counts.steps_of(found.trajectory_id)
        start = max(0, min(request.steps_from, len(steps)))
        return replay.GetTrajectoryResponse(
            trajectory=found,
            steps=steps[start : start + limit],
            times_sampled=len(steps),
            copies=self.store.copies(request.run_id, found.trajectory_id),
        )

    def _one(self, run_id: str, trajectory_id: str) -> Trajectory:
        try:
            return self.store.one(run_id, trajectory_id)
        except NotFound:
            self.store.spec(run_id)
            found = self.archived.find(run_id, [trajectory_id]) if self.archived else {}
            if trajectory_id not in found:
                raise
            return found[trajectory_id]

    def GetBatch(self, request: replay.GetBatchRequest, context: grpc.ServicerContext) -> replay.GetBatchResponse:
        self.store.spec(request.run_id)
        ids = self.store.batch(request.run_id, request.step)
        if not ids:
            raise NotFound(
                f"run {request.run_id} has no batch for step {request.step} on record: none was drawn, or it is older "
                f"than the newest {BATCHES_KEPT} and than what a trainer may resume from",
                code="unknown_batch",
            )
        return replay.GetBatchResponse(trajectory_ids=ids)


def _count(index: SamplingIndex, code: Source.ValueType) -> replay.SourceCount:
    name = source_name(code)
    return replay.SourceCount(
        source=code,
        available=index.available(index.rule(name)),
        **{count: index.counters.get(f"{count}:{name}", 0) for count in ("inserted", "sampled", "correct")},
    )
