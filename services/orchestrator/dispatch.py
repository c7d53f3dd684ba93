"""Dispatches eligible prompts: never more trajectories than the replay limiter admits, never a prompt twice or
skipped.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import redis

from services.orchestrator.commit import Commit, NotLeading, Precondition, Write, now_ms
from services.orchestrator.datasets import TaskLibrary, prompt_of
from services.orchestrator.jobs import JobStore, seed_of
from services.orchestrator.pipeline import DISPATCHER, groups_in_pipeline
from services.orchestrator.replicas import GroupsInHand
from spo import observability, redis_keys
from spo.algorithm.replay_sampling import value_spread
from spo.errors import InternalError, PreconditionFailed, SpoError
from spo.messaging.redis_client import as_spo_error
from spo.messaging.streams.entries import append_words
from spo.messaging.streams.recovery import Outage, TroubleNotes, reason_of
from spo.observability import get_logger
from spo.rpc.client import RpcClient
from spo.service.process import JobSteps
from spo.spec.job_spec import JobSpec
from spo.spec.section import JobState
from spo.tasks.problem import Problem
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup, Sampling
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, GetReplayStatusResponse
from spo.v1.value_pb2 import PromptValue

# Pause per second that reading all values took: while they come in, they change at every look.
PAUSE_PER_SECOND = 20.0

log = get_logger("dispatch")

POLL_SECONDS = 0.2
IDLE_SECONDS = 1.0
MAX_GROUPS_AT_ONCE = 256
# Groups dispatched, prompts of the schedule that had no value when their turn came, groups of unsolved prompts.
_POSITION, _PASSED_OVER, _BY_NEED = "position", "passed_over", "by_need"


@dataclass(frozen=True)
class KnownValues:
    """What was eligible at a number of values, and when it is worth another look."""

    stamp: tuple[int, int]
    prompt_ids: frozenset[str]
    look_again_at: float


class EligiblePrompts:
    """Remembers each running job's eligible prompts; values are only added and refined."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs
        self._known: dict[str, KnownValues] = {}

    def of(self, job_id: str, spec: JobSpec, problems: Sequence[Problem]) -> frozenset[str]:
        """Ids of the prompts with a value, less those that the spec leaves out: unsolved, or with too little spread.

        Of a job that reads no values all prompts.
        """
        known = self._known.get(job_id)
        if not spec.reads_values:
            if known is None:
                known = KnownValues((0, 0), frozenset(problem.problem_id for problem in problems), 0.0)
                self._known[job_id] = known
            return known.prompt_ids
        began = time.monotonic()
        client = self.jobs.client
        stamp = client.hlen(redis_keys.run_values(job_id)), client.hlen(redis_keys.provisional_values(job_id))
        # A prompt that is refined counts in both and may become solved without moving either: looked at again, too.
        if known and (began < known.look_again_at or (known.stamp == stamp and not stamp[1])):
            return known.prompt_ids
        found = frozenset(_eligible(self._stored(job_id), spec))
        now = time.monotonic()
        self._known[job_id] = KnownValues(stamp, found, now + PAUSE_PER_SECOND * (now - began))
        return found

    def forget(self, running: Iterable[str]) -> None:
        """Drop what is remembered of jobs that run no more."""
        for ended in frozenset(tuple(self._known)) - set(running):
            self._known.pop(ended, None)

    def _stored(self, job_id: str) -> dict[str, list[PromptValue]]:
        """By prompt its value so far and its final one, as far as they are there."""
        found: dict[str, list[PromptValue]] = defaultdict(list)
        for key in (redis_keys.provisional_values(job_id), redis_keys.run_values(job_id)):
            for prompt_id, raw in self.jobs.client.hgetall(key).items():
                found[prompt_id.decode()].append(PromptValue.FromString(raw))
        return found


def _eligible(values: Mapping[str, Sequence[PromptValue]], spec: JobSpec) -> Iterable[str]:
    drops = spec.value is not None and spec.value.unsolved == "drop"
    least_spread = max((part.min_value_spread for part in spec.replay.mix if part.source == "online"), default=0.0)
    return (
        prompt_id
        for prompt_id, found in values.items()
        if any(not (drops and value.successes == 0) and _spread(value) >= least_spread for value in found)
    )


def _spread(value: PromptValue) -> float:
    return value_spread(value.successes / value.samples) if value.samples else 0.0


def passes(error: SpoError) -> bool:
    """Whether it is somebody's outage: a service that is away, full, or out of order for now."""
    return error.retryable or isinstance(error, InternalError)


@lru_cache(maxsize=8)
def _order(problems: int, seed: int, epoch: int) -> Sequence[int]:
    """Indices of the problems in the order of an epoch; to shuffle for each prompt would cost more than the prompt."""
    order = list(range(problems))
    random.Random(seed_of(seed, "epoch", epoch)).shuffle(order)
    return order


@dataclass(frozen=True)
class PromptSchedule:
    """The endless order of a run's prompts: seeded shuffles, one epoch after the other."""

    problems: Sequence[Problem]
    seed: int

    @cached_property
    def by_id(self) -> dict[str, Problem]:
        """The problems by their ids."""
        return {problem.problem_id: problem for problem in self.problems}

    def at(self, position: int) -> Problem:
        """The problem at a position; every epoch holds each problem once."""
        epoch, index = divmod(position, len(self.problems))
        return self.problems[_order(len(self.problems), self.seed, epoch)[index]]

    def following(self, position: int, count: int, eligible: Collection[str]) -> tuple[list[Problem], int]:
        """The next `count` eligible problems from a position on, and how many others are passed over on the way.

        None where no problem is eligible.
        """
        if not any(problem.problem_id in eligible for problem in self.problems):
            return [], 0
        found: list[Problem] = []
        end = position
        while len(found) < count:
            problem = self.at(end)
            end += 1
            if problem.problem_id in eligible:
                found.append(problem)
        return found, end - position - len(found)


class PromptDispatcher:
    """Gives every running job its prompts; the position is in Redis and moves in the same step as the prompts."""

    def __init__(
        self, jobs: JobStore, library: TaskLibrary, replay: RpcClient, most_windows: int, in_hand: GroupsInHand
    ) -> None:
        self.most_windows = most_windows
        self.in_hand = in_hand
        self.jobs = jobs
        self.library = library
        self.replay = replay
        self._schedules: dict[str, PromptSchedule] = {}
        self._eligible = EligiblePrompts(jobs)
        # Of each run: what decides which prompts are unsolved, as it was when they were read, and these in order.
        self._unsolved: dict[str, tuple[tuple[int, int, int], list[str]]] = {}
        # A run whose replay buffer does not answer holds up no other.
        self._steps = JobSteps(self._dispatch_or_fail, "dispatch")
        self._outages: dict[str, Outage] = {}
        self._notes = TroubleNotes(jobs.client)

    def run(self, stop: threading.Event) -> None:
        """Dispatch until stop; a service that does not answer costs time, never a prompt."""
        outage = Outage("nothing is dispatched")
        while not stop.is_set():
            running: list[str] = []
            try:
                running = self.jobs.in_states((JobState.RUNNING,))
                self._steps.round(running, IDLE_SECONDS)
                outage.over()
            except (redis.RedisError, NotLeading) as error:
                # Where Redis came back empty, leadership finds out whether this process leads, and ends it if not.
                outage.failed(error)
            self._forget(running)
            stop.wait(POLL_SECONDS if running else IDLE_SECONDS)
        self._steps.close()

    def _forget(self, running: Sequence[str]) -> None:
        self._eligible.forget(running)
        for remembered in (self._schedules, self._outages, self._unsolved):
            # Copied in one step: the threads of other jobs add to it and take from it meanwhile.
            for ended in frozenset(tuple(remembered)) - set(running):
                remembered.pop(ended, None)
                self.in_hand.forget(ended)

    def _dispatch_or_fail(self, job_id: str) -> None:
        """Dispatch; what only time can cure becomes a wait reason of the job, what it cannot ends the job."""
        outage = self._outages.setdefault(job_id, Outage("prompts cannot be dispatched", job=job_id))
        try:
            self.dispatch(job_id)
            outage.over()
        except Exception as error:
            if isinstance(error, redis.RedisError) and as_spo_error(error).retryable:
                raise
            if isinstance(error, SpoError) and not passes(error):
                self.jobs.fail(job_id, error.code, error.message)
                return
            outage.failed(error)
            self._notes.note(job_id, DISPATCHER, reason_of(error))

    def dispatch(self, job_id: str) -> int:
        """Publish as many groups as the limiter has room for; returns how many."""
        spec = self.jobs.spec(job_id)
        if spec.replay.online_share == 0 or self.jobs.record(job_id).is_trained:
            return 0
        # Counted before the limiter is asked: a group ingested in between is counted twice, never forgotten.
        in_pipeline = groups_in_pipeline(self.jobs.client, job_id)
        request = GetReplayStatusRequest(run_id=job_id, replicas=self.in_hand.ready_replicas(job_id))
        status: GetReplayStatusResponse = self.replay.call("GetReplayStatus", request, deadline_seconds=10)
        self.in_hand.learn(job_id, status.groups_per_replica)
        self._refuse_fruitless(job_id, spec, status)
        if status.backpressure:
            self._notes.note(job_id, DISPATCHER, f"no prompts are dispatched: {status.backpressure}")
        room = status.admissible_inserts // spec.rollout.samples_per_prompt - in_pipeline
        return self._publish(job_id, spec, min(room, MAX_GROUPS_AT_ONCE)) if room > 0 else 0

    def _refuse_fruitless(self, job_id: str, spec: JobSpec, status: GetReplayStatusResponse) -> None:
        """Fail a run that trains on correct rollouts alone once its policy finds too few of them.

        Any other cause leaves at most the limiter's slack unused, or a window where several replicas sample; only too
        few correct rollouts admit more.
        Raises PreconditionFailed (code "too_few_correct") after `most_windows` windows.
        """
        replay = spec.replay
        if not any(part.source == "online" and part.correct_only for part in replay.mix):
            return
        slack = replay.error_buffer / replay.samples_per_insert + spec.trainer.batch_size + replay.min_online
        slack += replay.online_capacity if self.in_hand.ready_replicas(job_id) > 1 else 0
        for online in (count for count in status.counts if count.source == SOURCE_ONLINE):
            unused = online.inserted - online.sampled / replay.samples_per_insert
            windows = (unused - slack) / replay.online_capacity
            reason = (
                f"{online.correct} of {online.inserted} rollouts are correct, and the mix serves only correct ones:"
                f" {online.available} can be served now, too few for a batch"
            )
            if windows >= self.most_windows:
                message = f"{reason}, after {self.most_windows} windows of {replay.online_capacity} rollouts"
                raise PreconditionFailed(message, code="too_few_correct")
            if windows > 0:
                self._notes.note(job_id, DISPATCHER, reason)

    def _publish(self, job_id: str, spec: JobSpec, groups: int) -> int:
        cursor = redis_keys.dispatch_cursor(job_id)
        stored = self.jobs.client.hmget(cursor, [_POSITION, _PASSED_OVER, _BY_NEED])
        position, passed_over, by_need = (int(number or 0) for number in stored)
        chosen = self._by_need(job_id, spec, position, groups)
        # The prompts that are chosen do not move the schedule on.
        turns, passing = self._next_problems(job_id, spec, position + passed_over - by_need, groups - len(chosen))
        if len(turns) + len(chosen) < groups:
            return 0
        in_turn = iter(turns)
        problems = [chosen[index] if index in chosen else next(in_turn) for index in range(groups)]
        dispatched = [_group(job_id, spec, problem, position + index) for index, problem in enumerate(problems)]
        spans = [_span(group) for group in dispatched]
        writes: list[Write] = [
            append_words(redis_keys.prompts(job_id), group.SerializeToString(), span.header)
            for group, span in zip(dispatched, spans, strict=True)
        ]
        outcome = self.jobs.commit(
            Commit(
                job_id,
                (JobState.RUNNING,),
                guard=Precondition(cursor, _POSITION, str(position) if position else ""),
                writes=[
                    *writes,
                    ("HSET", cursor, _POSITION, position + groups, _PASSED_OVER, passed_over + passing),
                    ("HSET", cursor, _BY_NEED, by_need + len(chosen)),
                ],
                needs_room=True,
            ),
            durable=False,
        )
        if not outcome.done:
            return 0
        for span in spans:
            span.end()
        return groups

    def _schedule(self, job_id: str, spec: JobSpec) -> PromptSchedule:
        if job_id not in self._schedules:
            self._schedules[job_id] = PromptSchedule(self.library.load(spec.tasks).train, spec.seed)
        return self._schedules[job_id]

    def _by_need(self, job_id: str, spec: JobSpec, position: int, groups: int) -> dict[int, Problem]:
        """The unsolved prompts that take some of the next positions, by offset; decided by the seed and the ledger.

        A prompt has at most one such group at a time: the group may solve it.
        """
        if not spec.rollout.unsolved_share:
            return {}
        by_id = self._schedule(job_id, spec).by_id
        left = self._unsolved_prompts(job_id, spec)
        chosen: dict[int, Problem] = {}
        for index in range(groups):
            draw = random.Random(seed_of(spec.seed, "unsolved", position + index))
            if left and draw.random() < spec.rollout.unsolved_share:
                chosen[index] = by_id[left.pop(draw.randrange(len(left)))]
        return chosen

    def _unsolved_prompts(self, job_id: str, spec: JobSpec) -> list[str]:
        """Training prompts that were tried and are unsolved, sorted; read again when one came or went.

        Where answers of earlier jobs count, untried ones that no answer came with are among them, as far as they may
        be dispatched at all: the others cost no rollout.
        """
        client, outcomes = self.jobs.client, redis_keys.replay_outcomes(job_id)
        schedule, counts = self._schedule(job_id, spec), bool(spec.replay.memory.also)
        changes = int(client.hget(redis_keys.replay_counters(job_id), "unsolved") or 0)
        eligible = self._eligible.of(job_id, spec, schedule.problems) if counts else frozenset()
        stamp = changes, client.hlen(outcomes) if counts else 0, len(eligible)
        read_at, prompts = self._unsolved.get(job_id, ((-1, -1, -1), []))
        if read_at != stamp:
            found = set(map(bytes.decode, client.smembers(redis_keys.replay_unsolved(job_id))))
            if counts:
                found.update(eligible.difference(map(bytes.decode, client.hkeys(outcomes))))
            prompts = sorted(found.intersection(schedule.by_id))
            self._unsolved[job_id] = stamp, prompts
        return list(prompts)

    def _next_problems(self, job_id: str, spec: JobSpec, place: int, count: int) -> tuple[list[Problem], int]:
        """The next problems with a value that the mix takes; prompts without one are passed over until the next epoch.

        None while more values are on their way. Raises PreconditionFailed (code "no_prompts").
        """
        if not count:
            return [], 0
        schedule = self._schedule(job_id, spec)
        # Asked first: a value that comes in between is seen, or the estimates are not yet over.
        pending = self.jobs.record(job_id).estimates_pending
        eligible = self._eligible.of(job_id, spec, schedule.problems)
        problems, passing = schedule.following(place, count, eligible)
        if not problems and not pending:
            raise PreconditionFailed(
                "no training prompt has a value that the mix takes; nothing can be dispatched", code="no_prompts"
            )
        return problems, passing


def _span(group: PromptGroup) -> observability.Span:
    """The first span of the group's trace; a span that is not ended is not exported."""
    return observability.begin(
        "dispatch",
        ids=observability.group_ids(group.run_id, group.group_id),
        kind="PRODUCER",
        run=group.run_id,
        group=group.group_id,
        prompt=group.prompt.prompt_id,
        samples=group.sampling.samples,
    )


def _group(job_id: str, spec: JobSpec, problem: Problem, number: int) -> PromptGroup:
    low, high = spec.rollout.temperature_range
    return PromptGroup(
        group_id=f"{job_id}-{number}",
        run_id=job_id,
        prompt=prompt_of(problem, spec),
        sampling=Sampling(
            samples=spec.rollout.samples_per_prompt,
            temperature_min=low,
            temperature_max=high,
            top_p=spec.rollout.top_p,
            max_tokens=spec.model.max_response_tokens,
            seed=seed_of(spec.seed, "rollout", number),
        ),
        source=SOURCE_ONLINE,
        dispatched_unix_ms=now_ms(),
    )
