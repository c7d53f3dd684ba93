"""Serving the batch of a step: exact shares by source, each by its sampler, the same for a repeated ask."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.replay_buffer.candidates import Candidates
from services.replay_buffer.draws import DrawLog
from services.replay_buffer.limiter import Limiter
from services.replay_buffer.portions import Portion, draw_portion, portions_of
from services.replay_buffer.store import ReplayStore
from spo import metrics, redis_keys
from spo.errors import Conflict, IntegrityError, NotReady, PreconditionFailed
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2 import SampleBatchRequest, SampledTrajectory

POLL_SECONDS = 0.1
MAX_WAIT_SECONDS = 60.0
# By then every training prompt has its value and its offline trajectories: an empty offline source stays empty.
OFFLINE_COMPLETE_STATES = (b"running", b"pausing", b"paused")


class BatchDrawer:
    """Serves SampleBatch for all runs."""

    def __init__(self, store: ReplayStore) -> None:
        self.store = store
        self.draws = DrawLog(store.client)

    def sample(self, request: SampleBatchRequest) -> list[SampledTrajectory]:
        """Return the step's batch, waiting at most wait_seconds for experience.

        Raises NotReady (names the source and its counts), PreconditionFailed when a source will never have anything,
        InvalidInput on an impossible mix, Conflict when the step already got a batch of another size, NotFound.
        """
        candidates = self.store.candidates(request.run_id)
        portions = portions_of(request, candidates)
        deadline = time.monotonic() + min(request.wait_seconds, MAX_WAIT_SECONDS)
        while True:
            try:
                ids = self.draws.recorded(request.run_id, request.step) or self._draw(request, candidates, portions)
                break
            except NotReady:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_SECONDS)
        if len(ids) != request.batch_size:
            raise Conflict(f"step {request.step} was given {len(ids)} trajectories before, not {request.batch_size}")
        return self._with_values(request, candidates, ids)

    def _draw(self, request: SampleBatchRequest, candidates: Candidates, portions: Sequence[Portion]) -> list[str]:
        rng = np.random.default_rng([candidates.spec.seed, request.seed, request.step])
        limiter = Limiter.of(candidates.spec)
        ids: list[str] = []
        with candidates.lock:
            candidates.refresh([portion.rule.source for portion in portions])
            if candidates.counters.get("policy_version", 0) != request.policy_version:
                self.store.note_policy_version(request.run_id, request.policy_version)
                candidates.counters["policy_version"] = request.policy_version
            for portion in portions:
                self._check(candidates, limiter, portion)
                ids += draw_portion(rng, candidates, portion)
        return self._record(request, candidates, portions, ids)

    def _record(
        self, request: SampleBatchRequest, candidates: Candidates, portions: Sequence[Portion], ids: list[str]
    ) -> list[str]:
        drawn = {portion.rule.source: portion.count for portion in portions}
        limit = candidates.spec.replay.max_times_sampled
        # The online portion comes first.
        limited = 0 if limit is None else drawn.get("online", 0)
        held = self.draws.record(request.run_id, request.step, ids, drawn, limited, limit or 0)
        if not held:
            raise NotReady("another request drew the same online trajectories a last time; drawing again")
        return held

    def _check(self, candidates: Candidates, limiter: Limiter, portion: Portion) -> None:
        """Raise NotReady, or PreconditionFailed where waiting is in vain, when a portion cannot be served now."""
        if portion.rule.source == "online":
            online = candidates.online(portion.rule)
            if not limiter.may_sample(online, portion.count):
                reason = _reason(candidates, portion)
                raise NotReady(f"{reason}; {online.available} fresh enough, {online.sampled} served; {limiter}")
        elif not candidates.servable(portion.rule):
            state: Any = self.store.client.get(redis_keys.run_state(candidates.run_id))
            if state in OFFLINE_COMPLETE_STATES:
                reason = _reason(candidates, portion)
                raise PreconditionFailed(f"{reason}; nothing more will come", code="source_empty")
            raise NotReady(_reason(candidates, portion))

    def _with_values(
        self, request: SampleBatchRequest, candidates: Candidates, ids: Sequence[str]
    ) -> list[SampledTrajectory]:
        batch = []
        with candidates.lock:
            # A repeated batch may be the first thing this process serves.
            candidates.refresh([])
        for trajectory_id, trajectory in zip(ids, self.store.get(request.run_id, ids), strict=True):
            if trajectory is None:
                raise IntegrityError(f"step {request.step}: trajectory {trajectory_id} is gone from the buffer")
            batch.append(SampledTrajectory(trajectory=trajectory, qhat_0=candidates.qhat_0(trajectory.prompt_id)))
            if trajectory.source == SOURCE_ONLINE:
                metrics.REPLAY_SAMPLE_AGE.observe(max(0, request.policy_version - trajectory.policy_version_first))
        return batch


def _reason(candidates: Candidates, portion: Portion) -> str:
    wanted = f"{portion.count} {'correct ' if portion.rule.correct_only else ''}wanted per batch"
    return f"source {portion.rule.source}: {candidates.describe(portion.rule)}, {wanted}"
