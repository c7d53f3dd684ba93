"""Drawing the batch of a step: exact shares by source, uniform in each source's window, the same for a repeated ask."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.replay_buffer.limiter import Limiter
from services.replay_buffer.store import ReplayStore, source_name
from services.replay_buffer.values import PromptValues
from spo import metrics, redis_keys
from spo.algorithm.replay_sampling import draw_ranks, exact_counts
from spo.errors import FieldViolation, IntegrityError, InvalidInput, NotReady
from spo.job_spec import JobSpec
from spo.v1.replay_service_pb2 import SampleBatchRequest, SampledTrajectory
from spo.v1.trajectory_pb2 import Trajectory

POLL_SECONDS = 0.1
MAX_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Portion:
    """How many trajectories of one source a batch holds."""

    source: str
    count: int
    correct_only: bool

    @property
    def window(self) -> str:
        """Name of the source's candidate set."""
        return f"{self.source}:correct" if self.correct_only else self.source


class BatchDrawer:
    """Serves SampleBatch for all runs."""

    def __init__(self, store: ReplayStore, values: PromptValues) -> None:
        self.store = store
        self.values = values

    def sample(self, request: SampleBatchRequest) -> list[SampledTrajectory]:
        """Return the step's batch, waiting at most wait_seconds for experience.

        Raises NotReady (names the source and its counts), InvalidInput on an impossible mix, NotFound.
        """
        spec = self.store.spec(request.run_id)
        if request.batch_size < 1:
            raise InvalidInput(
                "a batch holds at least one trajectory", violations=_fault("/batch_size", "must be >= 1")
            )
        ids = self.store.recorded_batch(request.run_id, request.step)
        if not ids:
            portions = _portions(request, spec)
            self._await(request, spec, portions)
            ids = self._draw(request, spec, portions)
        return self._with_values(request, spec, ids)

    def _await(self, request: SampleBatchRequest, spec: JobSpec, portions: Sequence[Portion]) -> None:
        deadline = time.monotonic() + min(request.wait_seconds, MAX_WAIT_SECONDS)
        limiter = Limiter.of(spec)
        while reason := self._not_ready(request, spec, limiter, portions):
            if time.monotonic() >= deadline:
                raise NotReady(reason)
            time.sleep(POLL_SECONDS)

    def _not_ready(
        self, request: SampleBatchRequest, spec: JobSpec, limiter: Limiter, portions: Sequence[Portion]
    ) -> str:
        """Why no batch can be served now, '' when one can."""
        counts = self.store.counts(request.run_id)
        inserted, sampled = counts.inserted["online"], counts.sampled["online"]
        for portion in portions:
            if portion.source == "online":
                self._drop_stale(request, spec)
                if not limiter.may_sample(inserted, sampled, portion.count):
                    return (
                        f"waiting for online trajectories: {inserted} inserted, {sampled} sampled,"
                        f" {portion.count} wanted ({limiter})"
                    )
            if not self.store.client.zcard(redis_keys.replay_source(request.run_id, portion.window)):
                return (
                    f"source {portion.source} has nothing to serve: {counts.inserted[portion.source]} inserted,"
                    f" {counts.correct[portion.source]} correct, 0 in its window"
                )
        return ""

    def _drop_stale(self, request: SampleBatchRequest, spec: JobSpec) -> None:
        """Take online trajectories older than max_staleness versions out of the window; the ledger keeps them."""
        oldest = request.policy_version - spec.replay.max_staleness
        for window in ("online", "online:correct"):
            key = redis_keys.replay_source(request.run_id, window)
            # Versions only grow with insertion (but for late groups), so stale ones are at the head.
            while head := self._head(request.run_id, key):
                if head.policy_version_first >= oldest:
                    break
                self.store.client.zrem(key, head.trajectory_id)

    def _head(self, run_id: str, key: str) -> Trajectory | None:
        first: Any = self.store.client.zrange(key, 0, 0)
        return self.store.get(run_id, [first[0].decode()])[0] if first else None

    def _draw(self, request: SampleBatchRequest, spec: JobSpec, portions: Sequence[Portion]) -> list[str]:
        rng = np.random.default_rng([spec.seed, request.seed, request.step])
        ids: list[str] = []
        for portion in portions:
            key = redis_keys.replay_source(request.run_id, portion.window)
            window: Any = self.store.client.zrange(key, 0, -1)
            ids += [window[rank].decode() for rank in draw_ranks(rng, len(window), portion.count)]
        drawn = {portion.source: portion.count for portion in portions}
        return self.store.record_batch(request.run_id, request.step, ids, drawn)

    def _with_values(self, request: SampleBatchRequest, spec: JobSpec, ids: Sequence[str]) -> list[SampledTrajectory]:
        trajectories = self.store.get(request.run_id, ids)
        lost = [each for each, found in zip(ids, trajectories, strict=True) if found is None]
        if lost:
            raise IntegrityError(
                f"{len(lost)} trajectories of step {request.step} are gone from the buffer: {lost[:3]}"
            )
        batch = [each for each in trajectories if each is not None]
        qhat_0 = self.values.qhat_0(request.run_id, spec, [each.prompt_id for each in batch])
        for each in batch:
            if source_name(each.source) == "online":
                metrics.REPLAY_SAMPLE_AGE.observe(max(0, request.policy_version - each.policy_version_first))
        return [SampledTrajectory(trajectory=each, qhat_0=q) for each, q in zip(batch, qhat_0, strict=True)]


def _portions(request: SampleBatchRequest, spec: JobSpec) -> list[Portion]:
    mix = [(source_name(part.source), part.share, part.correct_only) for part in request.mix]
    mix = mix or [(part.source, part.share, part.correct_only) for part in spec.replay.mix]
    shares = [share for _, share, _ in mix]
    if any(share < 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise InvalidInput("the shares of a mix sum to 1", violations=_fault("/mix", f"sums to {sum(shares):g}"))
    counts = exact_counts(shares, request.batch_size)
    return [
        Portion(source, count, correct_only)
        for (source, _, correct_only), count in zip(mix, counts, strict=True)
        if count
    ]


def _fault(pointer: str, message: str) -> tuple[FieldViolation, ...]:
    return (FieldViolation(pointer, message),)
