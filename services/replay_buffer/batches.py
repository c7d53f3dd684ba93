"""Drawing the batch of a step: exact shares by source, uniform in each source's window, the same for a repeated ask."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.replay_buffer.candidates import Candidates
from services.replay_buffer.limiter import Limiter
from services.replay_buffer.store import SOURCE_CODES, ReplayStore, source_name
from spo import metrics, redis_keys
from spo.algorithm.replay_sampling import draw_ranks, exact_counts
from spo.errors import Conflict, FieldViolation, IntegrityError, InvalidInput, NotReady, PreconditionFailed
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2 import SampleBatchRequest, SampledTrajectory

POLL_SECONDS = 0.1
MAX_WAIT_SECONDS = 60.0
# By then every training prompt has its value and its offline trajectories: an empty offline source stays empty.
OFFLINE_COMPLETE_STATES = (b"running", b"pausing", b"paused")


@dataclass(frozen=True)
class Portion:
    """How many trajectories of one source a batch holds."""

    source: str
    count: int
    correct_only: bool


class BatchDrawer:
    """Serves SampleBatch for all runs."""

    def __init__(self, store: ReplayStore) -> None:
        self.store = store

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
                ids = self.store.recorded_batch(request.run_id, request.step) or self._draw(
                    request, candidates, portions
                )
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
            candidates.refresh([portion.source for portion in portions])
            if candidates.counters.get("policy_version", 0) != request.policy_version:
                self.store.note_policy_version(request.run_id, request.policy_version)
                candidates.counters["policy_version"] = request.policy_version
            for portion in portions:
                self._check(candidates, limiter, portion)
                window = candidates.servable(portion.source, portion.correct_only)
                units = portion.count // candidates.unit_size(portion.source)
                for rank in draw_ranks(rng, len(window), units):
                    ids += window[rank].trajectory_ids
        drawn = {portion.source: portion.count for portion in portions}
        return self.store.record_batch(request.run_id, request.step, ids, drawn)

    def _check(self, candidates: Candidates, limiter: Limiter, portion: Portion) -> None:
        """Raise NotReady, or PreconditionFailed where waiting is in vain, when a portion cannot be served now."""
        if portion.source == "online":
            online = candidates.online(portion.correct_only)
            if not limiter.may_sample(online, portion.count):
                reason = _reason(candidates, portion)
                raise NotReady(f"{reason}; {online.available} fresh enough, {online.sampled} served; {limiter}")
        elif not candidates.servable(portion.source, portion.correct_only):
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


def portions_of(request: SampleBatchRequest, candidates: Candidates) -> list[Portion]:
    """The batch's portions, from the request's mix or else the spec's. Raises InvalidInput by field."""
    if request.batch_size < 1:
        raise InvalidInput("a batch holds at least one trajectory", violations=_fault("/batch_size", "must be >= 1"))
    if any(part.source not in SOURCE_CODES for part in request.mix):
        raise InvalidInput("a mix names known sources", violations=_fault("/mix", "names an unknown source"))
    mix = [(source_name(part.source), part.share, part.correct_only) for part in request.mix]
    mix = mix or [(part.source, part.share, part.correct_only) for part in candidates.spec.replay.mix]
    shares = [share for _, share, _ in mix]
    if not all(share >= 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise InvalidInput("the shares of a mix sum to 1", violations=_fault("/mix", f"sums to {sum(shares):g}"))
    names = [source for source, _, _ in mix]
    if len(set(names)) < len(names):
        raise InvalidInput("a mix names each source once", violations=_fault("/mix", f"names {', '.join(names)}"))
    counts = exact_counts(shares, request.batch_size)
    for name, count in zip(names, counts, strict=True):
        if count % candidates.unit_size(name):
            fault = f"gives {count} {name} trajectories, no whole number of groups of {candidates.unit_size(name)}"
            raise InvalidInput("a batch holds whole groups", violations=_fault("/batch_size", fault))
    return [
        Portion(source, count, correct_only)
        for (source, _, correct_only), count in zip(mix, counts, strict=True)
        if count
    ]


def _reason(candidates: Candidates, portion: Portion) -> str:
    wanted = f"{portion.count} {'correct ' if portion.correct_only else ''}wanted per batch"
    return f"source {portion.source}: {candidates.describe(portion.source)}, {wanted}"


def _fault(pointer: str, message: str) -> tuple[FieldViolation, ...]:
    return (FieldViolation(pointer, message),)
