"""Serving the batch of a step: exact shares by source, each by its sampler, the same for a repeated ask."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from services.replay_buffer.batch_encoding import Drawn
from services.replay_buffer.batch_log import BatchLog
from services.replay_buffer.limiter import Limiter
from services.replay_buffer.sampling_index import SamplingIndex
from services.replay_buffer.shared_rollout_ingest import is_read_to_its_end
from services.replay_buffer.source_quota import SourceQuota, draw_quota, quotas_of
from services.replay_buffer.store import ReplayStore
from services.replay_buffer.windows import Candidate
from spo.errors import Conflict, IntegrityError, NotReady, PreconditionFailed
from spo.messaging.run_status import run_state
from spo.observability import metrics
from spo.spec.job_state import ESTIMATED
from spo.spec.section import LIVE_SOURCES
from spo.v1.replay_service_pb2 import SampleBatchRequest

POLL_SECONDS = 0.1
MAX_WAIT_SECONDS = 60.0

# Ids of a trajectory and of its prompt.
DrawnIds = tuple[str, str]


class BatchSampler:
    """Serves SampleBatch for all runs."""

    def __init__(self, store: ReplayStore) -> None:
        self.store = store
        self.batch_log = BatchLog(store.client)

    def sample(self, request: SampleBatchRequest) -> list[Drawn]:
        """Return the step's batch, waiting at most wait_seconds for experience.

        Raises NotReady (names the source and its counts), PreconditionFailed when a source will never have anything,
        InvalidInput on an impossible mix, Conflict when the step already got a batch of another size, NotFound.
        """
        index = self.store.index(request.run_id)
        quotas = quotas_of(request, index)
        deadline = time.monotonic() + min(request.wait_seconds, MAX_WAIT_SECONDS)
        while True:
            try:
                places = self._recorded(request, index) or self._draw(request, index, quotas)
                break
            except NotReady:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_SECONDS)
        if len(places) != request.batch_size:
            raise Conflict(f"step {request.step} was given {len(places)} trajectories before, not {request.batch_size}")
        return self._with_values(request, index, places)

    def _recorded(self, request: SampleBatchRequest, index: SamplingIndex) -> list[DrawnIds]:
        ids = self.batch_log.recorded(request.run_id, request.step)
        if not ids:
            return []
        with index.lock:
            # It may be the first thing this process serves.
            index.refresh([])
        return list(zip(ids, self.store.prompts_of(request.run_id, ids), strict=True))

    def _draw(self, request: SampleBatchRequest, index: SamplingIndex, quotas: Sequence[SourceQuota]) -> list[DrawnIds]:
        rng = np.random.default_rng([index.spec.seed, request.seed, request.step])
        drawn: list[Candidate] = []
        with index.lock:
            index.refresh([quota.rule.source for quota in quotas])
            if index.counters.get("policy_version", 0) != request.policy_version:
                self.store.note_policy_version(request.run_id, request.policy_version)
                index.counters["policy_version"] = request.policy_version
            for quota in quotas:
                self._check(index, quota)
                chosen = draw_quota(rng, index, quota)
                if quota.rule.source in LIVE_SOURCES:
                    newest = index.newest_version(quota.rule.source)
                    ages = [max(0, newest - each.version) for each in chosen]
                    metrics.REPLAY_SAMPLE_AGE.observe(sum(ages) / len(ages))
                drawn += chosen
            # Turns are counted: a draw that this one did not know of makes it void.
            after = index.counts.draws_read if index.spec.replay.max_times_sampled is not None else None
        places = [(trajectory_id, each.prompt_id) for each in drawn for trajectory_id in each.trajectory_ids]
        ids = [trajectory_id for trajectory_id, _ in places]
        counts = {quota.rule.source: quota.count for quota in quotas}
        held = self.batch_log.record(request.run_id, request.step, ids, counts, after)
        if not held:
            raise NotReady("another request drew at the same time; the turns must be counted again")
        if held == ids:
            return places
        return list(zip(held, self.store.prompts_of(request.run_id, held), strict=True))

    def _check(self, index: SamplingIndex, quota: SourceQuota) -> None:
        """Raise NotReady, or PreconditionFailed where waiting is in vain, when a portion cannot be served now."""
        reason = _reason(index, quota)
        if quota.rule.source in LIVE_SOURCES:
            limiter = Limiter.of(index.spec, quota.rule.source)
            live = index.live(quota.rule)
            if limiter.may_sample(live, quota.count):
                return
            if not (quota.rule.source == "shared" and is_read_to_its_end(self.store.client, index)):
                raise NotReady(f"{reason}; {live.available} fresh enough, {live.sampled} served; {limiter}")
            # Nothing will ever come in again, so nothing is gained by sparing what there is.
            reason = f"{reason}; {index.spec.rollout.follow} has ended"
        if not index.servable(quota.rule):
            if run_state(self.store.client, index.run_id) in ESTIMATED:
                # All offline trajectories are there by now: an empty offline source stays empty.
                raise PreconditionFailed(f"{reason}; nothing more will come", code="source_empty")
            raise NotReady(reason)

    def _with_values(
        self, request: SampleBatchRequest, index: SamplingIndex, places: Sequence[DrawnIds]
    ) -> list[Drawn]:
        payloads = self.store.payloads.get(request.run_id, [trajectory_id for trajectory_id, _ in places])
        batch = []
        for (trajectory_id, prompt_id), payload in zip(places, payloads, strict=True):
            if payload is None:
                raise IntegrityError(f"step {request.step}: trajectory {trajectory_id} is gone from the buffer")
            batch.append(Drawn(payload, index.qhat_0(prompt_id)))
        return batch


def _reason(index: SamplingIndex, quota: SourceQuota) -> str:
    wanted = f"{quota.count} {'correct ' if quota.rule.correct_only else ''}wanted per batch"
    return f"source {quota.rule.source}: {index.describe(quota.rule)}, {wanted}"
