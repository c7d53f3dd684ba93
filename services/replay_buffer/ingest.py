"""Ingest: judged groups, or another run's ledger, with anchors and reference log-probs, inserted as trajectories and
then acknowledged.

Shared rollouts: a run that follows another copies the online trajectories of that run's ledger into its own.
The followed run's ledger only grows and numbers its trajectories, so a follower is a position in it, as a consumer
group is in a stream. It reads while its own limiter admits inserts, and the followed run never waits for it. Inserts
are by id and the position moves afterwards: when this service is killed in between, the same ones are inserted again,
without effect.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import redis

from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.sampling_index import FOLLOWED_POSITION
from services.replay_buffer.store import ReplayStore, StorageMonitor, check_judged, check_live, check_scored, split_by
from services.replay_buffer.windows import Limiter, group_of, read_fact
from spo import observability, redis_keys
from spo.errors import IntegrityError, InvalidInput, NotReady, SpoError
from spo.messaging.redis_client import as_spo_error, refuses_writes
from spo.messaging.streams.entries import Entry, decoded
from spo.messaging.streams.stage import Consumer, StageRunner
from spo.model.chat import keep_sampled_logprobs
from spo.observability import get_logger
from spo.rpc.client import RpcClient, UnknownMethod, chunks_by_bytes
from spo.service.process import for_each_run
from spo.spec.job_spec import JobSpec
from spo.spec.section import JobState
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_SHARED
from spo.v1.trajectory_pb2 import Hop, RolloutGroup, Trajectory
from spo.v1.value_service_pb2 import (
    ComputeReferenceLogprobsRequest,
    ComputeReferenceLogprobsResponse,
    ReferenceLogprobsPart,
    TokenSequence,
)
from spo.v1.value_service_pb2_grpc import ValueServiceStub

log = get_logger("ingest")

FULL_PAUSE_SECONDS = 0.5
LOG_SECONDS = 10.0
SCORE_PATIENCE_SECONDS = 10.0

POLL_SECONDS = 0.5
ROLLOUTS_PER_READ = 256

# KEYS: counters and spec of the follower; without its spec it is deleted.
# ARGV: position as read, position now, how many of those between were left out.
# When two services read the same rollouts, only the first moves the position.
_MOVE = """
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
if (redis.call('HGET', KEYS[1], 'followed') or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'followed', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'left_out', ARGV[3])
return 1
"""


def note_anchors(spec: JobSpec, trajectories: Sequence[Trajectory]) -> None:
    """Set the anchor of judged online trajectories to the version that sampled them, with that version's log-probs.

    The rewards of a group's samples from one version estimate what that version earns on the prompt; the sampler's
    log-probs, at temperature 1, are the version's own. Log-probs of version 0 come from value-estimation, and where the
    job estimates values, version 0 keeps those: they rest on more samples than a group has.
    """
    if not spec.algorithm.anchors_by_rollouts:
        return
    groups: dict[tuple[str, int], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.source == SOURCE_ONLINE:
            key = (group_of(spec, trajectory), trajectory.policy_version_first)
            groups[key].append(trajectory)
    for (_, version), samples in groups.items():
        if version == 0 and spec.value is not None:
            continue
        rewards = [sample.reward for sample in samples]
        for sample in samples:
            sample.anchor.policy_version = version
            sample.anchor.rewards[:] = rewards
            if version:
                sample.reference_logprobs[:] = sample.sampling_logprobs
                sample.reference_hash = ""


def brings_logprobs(trajectory: Trajectory) -> bool:
    """Whether a trajectory's reference log-probs are of a later version than pi0, which nobody else can compute."""
    return trajectory.anchor.policy_version > 0


def forget_anchor(trajectory: Trajectory) -> None:
    """Make a copy for another run, whose reference is pi0, forget what was measured against the anchor or sampled."""
    if brings_logprobs(trajectory) or not trajectory.reference_hash:
        del trajectory.reference_logprobs[:]
    trajectory.ClearField("anchor")


class _AskedLogprobs:
    """The log-probs of some trajectories, over several attempts."""

    def __init__(
        self, scores: ReferenceScores, run_id: str, trajectories: Sequence[Trajectory], stop: threading.Event
    ) -> None:
        self.signs = 0
        self._scores = scores
        self._run_id = run_id
        self._left = list(trajectories)
        self._stop = stop

    def attempt(self) -> None:
        """Ask for what is left. Raises what `RpcClient.parts` raises."""
        request = ComputeReferenceLogprobsRequest(
            run_id=self._run_id,
            sequences=[
                TokenSequence(
                    prompt_token_ids=each.prompt_token_ids,
                    response_token_ids=each.response_token_ids,
                    segments=each.segments,
                )
                for each in self._left
            ],
        )
        asked, done = self._left, set[int]()
        try:
            self._note(asked, done, request)
        finally:
            self._left = [each for place, each in enumerate(asked) if place not in done]
        if self._left:
            raise NotReady("value-estimation did not answer with every sequence")

    def _note(self, asked: Sequence[Trajectory], done: set[int], request: ComputeReferenceLogprobsRequest) -> None:
        values, silent = self._scores.values, self._scores.deadline_seconds
        try:
            part: ReferenceLogprobsPart
            for part in values.parts("ReferenceLogprobsParts", request, self._is_wanted, silent):
                self.signs += 1
                for scored in part.scored:
                    _write(asked[scored.index], scored.logprobs, part.reference_hash)
                    done.add(scored.index)
        except UnknownMethod:
            whole = values.call_while(
                "ComputeReferenceLogprobs", request, self._is_wanted, ComputeReferenceLogprobsResponse
            )
            for place, (trajectory, found) in enumerate(zip(asked, whole.sequences, strict=True)):
                _write(trajectory, found.logprobs, whole.reference_hash)
                done.add(place)

    def _is_wanted(self) -> bool:
        return not self._stop.is_set()


def _write(trajectory: Trajectory, logprobs: Sequence[float], reference_hash: str) -> None:
    trajectory.reference_logprobs[:] = logprobs
    trajectory.reference_hash = reference_hash


@dataclass(frozen=True)
class ReferenceScores:
    """Asks value-estimation for log-probs; deadline_seconds: how long a call lives without a sign of life."""

    values: RpcClient
    deadline_seconds: float

    @staticmethod
    def at(address: str, deadline_seconds: float) -> ReferenceScores:
        """The client of the service at an address."""
        return ReferenceScores(RpcClient("value-estimation", address, ValueServiceStub), deadline_seconds)

    def add(
        self, run_id: str, trajectories: Sequence[Trajectory], *, patience_seconds: float, stop: threading.Event
    ) -> None:
        """Write reference log-probs (nats) and the reference's hash into the trajectories, in calls cut by bytes.

        Results of an interrupted call are kept, and the next call requests only the rest. Raises SpoError when
        value-estimation refuses the trajectories, or does not respond for longer than patience_seconds.
        """
        # Tokens go there and log-probs come back: four bytes or fewer each.
        sizes = [4 * (len(each.prompt_token_ids) + 2 * len(each.response_token_ids)) for each in trajectories]
        for chunk in chunks_by_bytes(sizes):
            asked = _AskedLogprobs(self, run_id, trajectories[chunk], stop)
            self.values.patiently(
                asked.attempt,
                patience_seconds=patience_seconds,
                stop=stop,
                signs=lambda asked=asked: asked.signs,  # type: ignore[misc]
            )


def note_hop(trajectories: Sequence[Trajectory]) -> None:
    """Add the replay buffer and the time to the trajectories' hops."""
    now = int(time.time() * 1000)
    for trajectory in trajectories:
        trajectory.hops.append(Hop(service="replay-buffer", at_unix_ms=now))


@dataclass(frozen=True)
class JudgedGroup:
    """An entry of the stream, and what it holds."""

    entry: Entry
    group: RolloutGroup
    spans: Sequence[observability.Span]


@dataclass
class IngestWorker:
    """One consumer of the stream `verdicts`."""

    store: ReplayStore
    consumer: Consumer
    scores: ReferenceScores
    groups_per_read: int
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self, stop: threading.Event) -> None:
        """Ingest until stop is set, each run by itself; whatever fails stays pending and is tried again."""
        self._stop = stop
        StageRunner(self.consumer, self.ingest, count=self.groups_per_read).run(stop)

    def ingest(self, entries: list[Entry]) -> None:
        """Insert the groups of these entries and acknowledge them.

        Raises InvalidInput when some trajectories are refused, after the valid ones of all entries are inserted:
        the entries are then tried one by one, and those that fail alone become dead letters with the reason. The groups
        of each run are inserted, and fail, separately.
        """
        by_run: dict[str, list[JudgedGroup]] = defaultdict(list)
        for entry in entries:
            group = decoded(RolloutGroup, entry)
            by_run[group.request.run_id].append(JudgedGroup(entry, group, _spans(entry, group)))
        failures = [failure for run_id, groups in by_run.items() for failure in self._ingest_run(run_id, groups)]
        if failures:
            raise failures[0]

    def _ingest_run(self, run_id: str, groups: Sequence[JudgedGroup]) -> Sequence[SpoError]:
        """Insert groups of one run and acknowledge them; returns why that failed."""
        trajectories = [trajectory for judged in groups for trajectory in judged.group.trajectories]
        spans = [span for judged in groups for span in judged.spans]
        try:
            refusals = self._insert(run_id, trajectories, spans)
        except SpoError as failure:
            return [failure]
        if not refusals:
            self.consumer.finish([judged.entry for judged in groups])
            for span in spans:
                span.end()
        return refusals

    def _insert(
        self, run_id: str, trajectories: Sequence[Trajectory], spans: Sequence[observability.Span]
    ) -> list[InvalidInput]:
        """Score and insert the valid trajectories; returns why the others are refused."""
        spec = self.store.spec(run_id)
        prompts = self.store.known_prompts(run_id, [trajectory.prompt_id for trajectory in trajectories])

        def check(trajectory: Trajectory) -> None:
            check_judged(run_id, spec, trajectory)
            check_live(spec, prompts, trajectory)

        judged, refusals = split_by(check, trajectories)
        note_anchors(spec, judged)
        keeps = spec.trainer.reference == "sampler"
        unscored = [one for one in judged if not (brings_logprobs(one) or (keeps and keep_sampled_logprobs(one)))]
        if spec.trainer.reference != "in_trainer" and unscored:
            self._score(run_id, unscored, spans)
        note_hop(judged)
        scored, more_refusals = split_by(lambda trajectory: check_scored(spec, trajectory), judged)
        self._insert_patiently(run_id, scored)
        observability.REPLAY_INSERTS.labels(result="refused").inc(len(refusals + more_refusals))
        return refusals + more_refusals

    def _insert_patiently(self, run_id: str, trajectories: Sequence[Trajectory]) -> None:
        """Insert them; while Redis is full, wait and log: a redelivered entry would find it just as full."""
        log_next = 0.0
        while True:
            try:
                self.store.insert(run_id, trajectories)
                return
            except redis.ResponseError as error:
                if not refuses_writes(error):
                    raise
                if time.monotonic() >= log_next:
                    log_next = time.monotonic() + LOG_SECONDS
                    log.error(
                        "judged groups wait: Redis is full and refuses writes", run=run_id, reason=str(error)[:300]
                    )
                if self._stop.wait(FULL_PAUSE_SECONDS):
                    raise as_spo_error(error) from None

    def _score(self, run_id: str, trajectories: Sequence[Trajectory], spans: Sequence[observability.Span]) -> None:
        """Add the reference log-probs.

        Every group gets a span of that length; the calls themselves are traced in the first one. While value-estimation
        is unavailable this waits briefly, then the entries are retried later and the job reports what it waits for.
        """
        scoring = [observability.begin("reference log-probs", parent=span.header, groups=len(spans)) for span in spans]
        with observability.within(scoring[0]) if scoring else nullcontext():
            self.scores.add(run_id, trajectories, patience_seconds=SCORE_PATIENCE_SECONDS, stop=self._stop)
        for span in scoring:
            span.end()


def _spans(entry: Entry, group: RolloutGroup) -> list[observability.Span]:
    if not entry.trace:
        return []
    request = group.request
    return [entry.span("ingest", run=request.run_id, group=request.group_id, trajectories=len(group.trajectories))]


class NextRollouts(NamedTuple):
    """The rollouts to copy next, the position after them, and how many were read to find them."""

    trajectory_ids: list[str]
    position: int
    read: int


@dataclass(frozen=True)
class SharedRolloutIngest:
    """Copies for all running jobs that follow another, every POLL_SECONDS."""

    sampler: BatchSampler
    scores: ReferenceScores
    storage: StorageMonitor

    @property
    def store(self) -> ReplayStore:
        return self.sampler.store

    def run(self, stop: threading.Event) -> None:
        """Copy until stop is set; a run that fails is tried again at the next poll and delays no other."""
        for_each_run(
            # Whatever goes wrong (Redis full, value-estimation away), the followed run's ledger still has it.
            lambda run_id: self.copy_new(run_id, stop),
            lambda: self.store.client.zrange(redis_keys.jobs_in_state(JobState.RUNNING), 0, -1),
            stop,
            POLL_SECONDS,
            "shared rollouts are not copied yet",
        )

    def copy_new(self, run_id: str, stop: threading.Event) -> int:
        """Copy as many trajectories as the follower's limiter admits; returns how many were inserted.

        Raises SpoError, RedisError; what was inserted before stays.
        """
        followed = self.store.spec(run_id).rollout.follow
        inserted = 0
        while followed and not stop.is_set() and not self.storage.pressure():
            index = self.sampler.index(run_id)
            rule = index.rule("shared")
            with index.lock:
                index.refresh(["shared"])
                room = Limiter.of(index.spec, "shared").admissible_inserts(index.live(rule))
                position, oldest = index.counters.get(FOLLOWED_POSITION, 0), index.oldest_version(rule)
            found = self._after(followed, position, oldest, room) if room else NextRollouts([], position, 0)
            if found.position == position:
                break
            sampled = [_shared(run_id, followed, rollout) for rollout in self._read(followed, found.trajectory_ids)]
            kept = self._insert(run_id, sampled, stop)
            inserted += kept
            arguments = (position, found.position, found.read - kept)
            keys = redis_keys.replay_counters(run_id), redis_keys.run_spec(run_id)
            self.store.client.eval(_MOVE, len(keys), *keys, *arguments)
        return inserted

    def _after(self, followed: str, position: int, oldest: int, room: int) -> NextRollouts:
        """The next `room` rollouts of version `oldest` or newer; older ones are skipped."""
        numbered = self.store.client.zrangebyscore(
            redis_keys.replay_source(followed, "online"),
            f"({position}",
            "+inf",
            start=0,
            num=ROLLOUTS_PER_READ,
            withscores=True,
        )
        ids = [trajectory_id for trajectory_id, _ in numbered]
        facts = self.store.client.hmget(redis_keys.replay_facts(followed), ids) if ids else []
        fresh: list[str] = []
        read = 0
        for (trajectory_id, number), fact in zip(numbered, facts, strict=True):
            if len(fresh) == room or fact is None:
                break
            position, read = int(number), read + 1
            if read_fact("", fact.decode())[0].version >= oldest:
                fresh.append(trajectory_id.decode())
        return NextRollouts(fresh, position, read)

    def _read(self, followed: str, trajectory_ids: Sequence[str]) -> list[Trajectory]:
        found = self.store.get(followed, trajectory_ids)
        gone = found.count(None)
        if gone:
            # The followed run may be under deletion: then its ledger is gone at the next poll.
            raise IntegrityError(f"{gone} trajectories of {followed} are gone from the buffer")
        return [trajectory for trajectory in found if trajectory is not None]

    def _insert(self, run_id: str, trajectories: Sequence[Trajectory], stop: threading.Event) -> int:
        spec = self.store.spec(run_id)
        judged, refusals = split_by(lambda trajectory: check_judged(run_id, spec, trajectory), trajectories)
        # Both runs have the same reference, as submission checks, so log-probs that came along are still right.
        unscored = [trajectory for trajectory in judged if not trajectory.reference_logprobs]
        if unscored and spec.trainer.reference != "in_trainer":
            self.scores.add(run_id, unscored, patience_seconds=SCORE_PATIENCE_SECONDS, stop=stop)
        scored, more_refusals = split_by(lambda trajectory: check_scored(spec, trajectory), judged)
        refusals += more_refusals
        if refusals:
            log.warning("rollouts were left out", run=run_id, left_out=len(refusals), first=str(refusals[0])[:500])
        note_hop(scored)
        self.store.insert(run_id, scored)
        observability.REPLAY_INSERTS.labels(result="refused").inc(len(refusals))
        return len(scored)


def _shared(run_id: str, followed: str, sampled: Trajectory) -> Trajectory:
    """The follower's copy: an id of its own; text, versions and log-probs as they were sampled."""
    copy = Trajectory()
    copy.CopyFrom(sampled)
    copy.trajectory_id = redis_keys.trajectory_id(
        run_id,
        f"{followed}/{sampled.trajectory_id}",
        sampled.sample_index,
        sampled.attempt,
        sampled.policy_version_first,
    )
    copy.run_id = run_id
    copy.source = SOURCE_SHARED
    copy.origin_run_id = followed
    copy.parents[:] = [sampled.trajectory_id]
    forget_anchor(copy)
    return copy
