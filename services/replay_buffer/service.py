"""gRPC face of the replay buffer: decode, call, encode."""

from __future__ import annotations

from typing import Any

from services.replay_buffer.batches import BatchDrawer
from services.replay_buffer.limiter import Limiter
from services.replay_buffer.store import ReplayStore
from spo.errors import NotFound
from spo.v1 import replay_service_pb2 as replay
from spo.v1.prompt_pb2 import SOURCE_UNSPECIFIED
from spo.v1.replay_service_pb2_grpc import ReplayServiceServicer
from spo.v1.trajectory_pb2 import Trajectory

DEFAULT_PAGE = 50
MAX_PAGE = 500
# A filtered page looks at most at this many trajectories, so that no question reads the whole ledger.
MAX_SCANNED = 5000


class ReplayService(ReplayServiceServicer):
    """Append, SampleBatch, status and listing; errors are typed in spo.rpc."""

    def __init__(self, store: ReplayStore, drawer: BatchDrawer) -> None:
        self.store = store
        self.drawer = drawer

    def Append(self, request: replay.AppendRequest, context: Any) -> replay.AppendResponse:
        inserted, duplicates = self.store.append(request.run_id, request.trajectories)
        return replay.AppendResponse(inserted=inserted, duplicates=duplicates)

    def SampleBatch(self, request: replay.SampleBatchRequest, context: Any) -> replay.SampleBatchResponse:
        return replay.SampleBatchResponse(batch=self.drawer.sample(request))

    def GetReplayStatus(self, request: replay.GetReplayStatusRequest, context: Any) -> replay.GetReplayStatusResponse:
        counts = self.store.counts(request.run_id)
        limiter = Limiter.of(self.store.spec(request.run_id))
        return replay.GetReplayStatusResponse(
            counts=self.store.source_counts(request.run_id),
            admissible_inserts=limiter.admissible_inserts(counts.inserted["online"], counts.sampled["online"]),
            duplicates=counts.duplicates,
        )

    def ListTrajectories(
        self, request: replay.ListTrajectoriesRequest, context: Any
    ) -> replay.ListTrajectoriesResponse:
        limit = min(request.limit or DEFAULT_PAGE, MAX_PAGE)
        found: list[Trajectory] = []
        cursor, scanned = request.cursor, 0
        while len(found) < limit and scanned < MAX_SCANNED:
            page, cursor = self.store.newest_first(request.run_id, cursor, limit - len(found))
            found += [each for each in page if _matches(each, request)]
            scanned += len(page)
            if not cursor:
                break
        return replay.ListTrajectoriesResponse(trajectories=found, next_cursor=cursor)

    def GetTrajectory(self, request: replay.GetTrajectoryRequest, context: Any) -> replay.GetTrajectoryResponse:
        (found,) = self.store.get(request.run_id, [request.trajectory_id])
        if found is None:
            raise NotFound(f"run {request.run_id} has no trajectory {request.trajectory_id}")
        return replay.GetTrajectoryResponse(trajectory=found)


def _matches(trajectory: Trajectory, request: replay.ListTrajectoriesRequest) -> bool:
    right_prompt = request.prompt_id in ("", trajectory.prompt_id)
    return right_prompt and request.source in (SOURCE_UNSPECIFIED, trajectory.source)
