"""Samples the batch of a step: exact shares by source, each by its own rule; waits for a run's counters to move."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from services.replay_buffer.sampling_index import FOLLOWED_POSITION, RunChanges, SamplingIndex
from services.replay_buffer.store import ReplayStore, SampledPayload
from services.replay_buffer.windows import (
    SOURCES,
    Candidate,
    Limiter,
    as_memory,
    is_served_as_memory,
    joined,
    marked,
    source_name,
    without_mark,
)
from spo import observability
from spo.algorithm.replay_sampling import exact_counts
from spo.errors import Conflict, FieldViolation, IntegrityError, InvalidInput, NotReady, PreconditionFailed
from spo.observability import get_logger
from spo.rpc.server import LongPolls
from spo.spec.job_spec import SourceMix
from spo.spec.section import LIVE_SOURCES
from spo.v1.replay_service_pb2 import SampleBatchRequest

log = get_logger("sampling")

# What changes without a counter of the run, such as values of prompts, is seen after this.
RETRY_SECONDS = 1.0
MAX_WAIT_SECONDS = 60.0
MAX_STEP = 2**32 - 1
INDEXED_RUNS = 512
# Source of a batch's share -> what it is made of.
WAYS_OUT = {
    "reference": "raise value.samples, or leave correct_only out: pi0 solved too little",
    "human": "give problems human_solutions and set offline.human_solutions",
    "other_run": "name experience that is stored in offline.experience",
    "annotated": "set value.pivotal",
    "shared": "name another run in rollout.follow",
}


@dataclass(frozen=True)
class SourceQuota:
    """How many trajectories of one source a batch holds, and the rule they are sampled by."""

    rule: SourceMix
    count: int


# A sampled trajectory as a batch's record names it, and its prompt; plain, since every batch has many.
SampledId = tuple[str, str]


class BatchSampler:
    """Serves SampleBatch for all runs; owns their sampling indices."""

    def __init__(self, store: ReplayStore, long_polls: int = 448) -> None:
        self.store = store
        self._changes = RunChanges(store.client)
        self._long_polls = LongPolls(long_polls)
        self._indices: dict[str, SamplingIndex] = {}

    def index(self, run_id: str) -> SamplingIndex:
        """The run's sampling index; the least recently used one is dropped for a new one. Raises NotFound."""
        spec = self.store.spec(run_id)
        found = self._indices.pop(run_id, None) or SamplingIndex(self.store.client, run_id, spec)
        # setdefault: of two threads that made one, both must use the same.
        found = self._indices.setdefault(run_id, found)
        for oldest in list(self._indices)[:-INDEXED_RUNS]:
            self._indices.pop(oldest, None)
        return found

    def sample(
        self,
        request: SampleBatchRequest,
        wanted: Callable[[], bool] = lambda: True,
        positions: Sequence[int] = (),
    ) -> list[SampledPayload]:
        """Return the step's batch, waiting at most wait_seconds for experience, while it is wanted.

        positions: return only what stands at these places of it, which are less than its size.

        Raises NotReady (names the source and its counts), PreconditionFailed when a source will never have anything,
        InvalidInput on an impossible mix, Conflict when the step already got a batch of another size, NotFound.
        """
        index = self.index(request.run_id)
        quotas = _quotas_of(request, index)
        sampled = self._draw_when_ready(request, index, quotas, wanted)
        # Groups of agents may lack samples; the trainer knows how many.
        lacking = index.unit_size("online") > 1 and index.spec.tasks.harness is not None
        if len(sampled) > request.batch_size or (len(sampled) < request.batch_size and not lacking):
            raise Conflict(
                f"step {request.step} was given {len(sampled)} trajectories before, not {request.batch_size}"
            )
        chosen = [sampled[position] for position in positions] if positions else sampled
        return self._with_payloads(request, index, chosen)

    def _draw_when_ready(
        self,
        request: SampleBatchRequest,
        index: SamplingIndex,
        quotas: Sequence[SourceQuota],
        wanted: Callable[[], bool],
    ) -> list[SampledId]:
        deadline = time.monotonic() + min(request.wait_seconds, MAX_WAIT_SECONDS)
        try:
            return self._draw(request, index, quotas)
        except NotReady:
            if request.wait_seconds <= 0:
                raise
        with self._long_polls.place(), self._changes.watched(request.run_id):
            while True:
                moves = self._changes.moves(request.run_id)
                try:
                    return self._draw(request, index, quotas)
                except NotReady:
                    left = deadline - time.monotonic()
                    if left <= 0 or not wanted():
                        raise
                self._changes.wait_beyond(request.run_id, moves, min(left, RETRY_SECONDS))

    def _draw(
        self, request: SampleBatchRequest, index: SamplingIndex, quotas: Sequence[SourceQuota]
    ) -> list[SampledId]:
        """The batch that is recorded for the step, or one drawn and recorded now."""
        rng = np.random.default_rng([index.spec.seed, request.seed, request.step])
        sampled: list[SampledId] = []
        with index.lock:
            known = index.refresh([quota.rule.source for quota in quotas], request.step)
            if known:
                return self._with_values(index, known)
            if index.counters.get("policy_version", 0) != request.policy_version:
                self.store.note_policy_version(request.run_id, request.policy_version)
                index.counters["policy_version"] = request.policy_version
            quotas = _without_empty_memory(quotas, index)
            fresh: list[Candidate] = []
            for quota in quotas:
                rule, count = quota.rule, quota.count
                self._check(index, rule, count)
                if rule.source == "memory":
                    joining = index.joining(rng, fresh, count)
                    sampled += [(joined(one.trajectory_ids[0]), one.prompt_id) for one in joining]
                    count -= len(joining)
                chosen = index.draw(rng, rule, count)
                fresh += chosen if rule.source == "online" else []
                if rule.source in LIVE_SOURCES:
                    newest = index.newest_version(rule.source)
                    ages = sum(newest - candidate.version for candidate in chosen if candidate.version < newest)
                    observability.REPLAY_SAMPLE_AGE.observe(ages / len(chosen))
                name = marked if rule.source == "memory" else str
                sampled += [
                    (name(trajectory_id), candidate.prompt_id)
                    for candidate in chosen
                    for trajectory_id in candidate.trajectory_ids
                ]
            # Where the times are limited, a batch that this draw did not know of makes it void.
            limited = index.spec.replay.max_times_sampled is not None
            last_batch = index.sample_counts.batches_read if limited else None
        ids = [trajectory_id for trajectory_id, _ in sampled]
        counts = {quota.rule.source: quota.count for quota in quotas}
        recorded = self.store.record_batch(request.run_id, request.step, ids, counts, last_batch)
        if not recorded:
            drawn = list(map(without_mark, ids))
            with index.lock:
                index.drop(set(drawn) - self.store.in_redis(request.run_id, drawn))
            raise NotReady("another request drew at the same time, or what was drawn has left the window: drawn again")
        if recorded == ids:
            return sampled
        with index.lock:
            return self._with_values(index, recorded)

    def _check(self, index: SamplingIndex, rule: SourceMix, count: int) -> None:
        """Raise NotReady, or PreconditionFailed where waiting is in vain, when a quota cannot be served now."""
        wanted = f"{count} {'correct ' if rule.correct_only else ''}wanted per batch"
        reason = f"source {rule.source}: {index.describe(rule)}, {wanted}"
        if rule.source in LIVE_SOURCES:
            limiter = Limiter.of(index.spec, rule.source)
            live = index.live(rule)
            if limiter.may_sample(live, count):
                return
            position = index.counters.get(FOLLOWED_POSITION, 0)
            if rule.source != "shared" or not self.store.followed_run_is_exhausted(index.run_id, position):
                raise NotReady(f"{reason}; {live.available} fresh enough, {live.sampled} served; {limiter}")
            # Nothing will ever come in again, so nothing is gained by holding back what there is.
            reason = f"{reason}; {index.spec.rollout.follow} has ended"
        if rule.source == "memory":
            if not index.remembers():
                raise NotReady(f"{reason}; the run has found no right answer yet")
            return
        if not index.servable(rule):
            if self.store.is_estimated(index.run_id):
                way_out = WAYS_OUT.get(rule.source, "bring its experience")
                message = f"{reason}; nothing more will come: take {rule.source} out of replay.mix, or {way_out}"
                raise PreconditionFailed(message, code="source_empty")
            raise NotReady(reason)

    def _with_values(self, index: SamplingIndex, trajectory_ids: Sequence[str]) -> list[SampledId]:
        """What was recorded, maybe by another process; the values that it was drawn by are read where they lack."""
        prompt_ids = self.store.prompts_of(index.run_id, list(map(without_mark, trajectory_ids)))
        index.require_values(prompt_ids)
        return list(zip(trajectory_ids, prompt_ids, strict=True))

    def _with_payloads(
        self, request: SampleBatchRequest, index: SamplingIndex, sampled: Sequence[SampledId]
    ) -> list[SampledPayload]:
        payloads = self.store.payloads(request.run_id, [without_mark(trajectory_id) for trajectory_id, _ in sampled])
        values = {prompt_id: index.value(prompt_id) for prompt_id in {prompt_id for _, prompt_id in sampled}}
        batch = []
        for (trajectory_id, prompt_id), payload in zip(sampled, payloads, strict=True):
            if payload is None:
                raise IntegrityError(f"step {request.step}: trajectory {trajectory_id} is gone from the buffer")
            if is_served_as_memory(trajectory_id):
                payload = as_memory(payload)
            qhat_0, error, _ = values[prompt_id]
            batch.append(SampledPayload(payload, qhat_0, error))
        return batch


def _quotas_of(request: SampleBatchRequest, index: SamplingIndex) -> list[SourceQuota]:
    """The batch's quotas, from the request's mix or else the spec's. Raises InvalidInput by field."""
    if request.batch_size < 1:
        raise _refused("a batch holds at least one trajectory", "/batch_size", "must be >= 1")
    if not 0 <= request.step <= MAX_STEP:
        raise _refused("a batch belongs to a step", "/step", f"must be in [0, {MAX_STEP}]")
    rules = _rules_of(request, index) if request.mix else list(index.spec.replay.mix)
    counts = exact_counts([rule.share for rule in rules], request.batch_size)
    for rule, count in zip(rules, counts, strict=True):
        unit = index.unit_size(rule.source)
        if count % unit:
            fault = f"gives {count} {rule.source} trajectories, no whole number of groups of {unit}"
            raise _refused("a batch holds whole groups", "/batch_size", fault)
    return [SourceQuota(rule, count) for rule, count in zip(rules, counts, strict=True) if count]


def _without_empty_memory(quotas: Sequence[SourceQuota], index: SamplingIndex) -> Sequence[SourceQuota]:
    """The quotas, memory last; as long as nothing is remembered, fresh samples take memory's places."""
    memory = next((quota for quota in quotas if quota.rule.source == "memory"), None)
    if memory is None or not any(quota.rule.source == "online" for quota in quotas):
        return quotas
    if index.remembers():
        # Last, since what it gives depends on the groups that were drawn.
        return sorted(quotas, key=lambda quota: quota is memory)
    return [
        SourceQuota(quota.rule, quota.count + (memory.count if quota.rule.source == "online" else 0))
        for quota in quotas
        if quota is not memory
    ]


def _rules_of(request: SampleBatchRequest, index: SamplingIndex) -> list[SourceMix]:
    """The rules of a request's mix: it may change shares and correct_only; samplers and filters are the spec's."""
    if any(part.source not in SOURCES for part in request.mix):
        raise _refused("a mix names known sources", "/mix", "names an unknown source")
    shares = [part.share for part in request.mix]
    if not all(share >= 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise _refused("the shares of a mix sum to 1", "/mix", f"sums to {sum(shares):g}")
    names = [source_name(part.source) for part in request.mix]
    if len(set(names)) < len(names):
        raise _refused("a mix names each source once", "/mix", f"names {', '.join(names)}")
    return [
        index.rule(name).model_copy(update={"share": part.share, "correct_only": part.correct_only})
        for name, part in zip(names, request.mix, strict=True)
    ]


def _refused(reason: str, pointer: str, message: str) -> InvalidInput:
    return InvalidInput(reason, violations=(FieldViolation(pointer, message),))
