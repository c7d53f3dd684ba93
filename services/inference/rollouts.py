"""From the stream of prompts through the engine to the stream of rollouts; gRPC takes the same path.

Many groups are sampled at once to keep batches full. A group's entry is acknowledged in the same step that writes its
rollouts, so a replica that dies loses nothing: its entries are no longer kept alive, and another replica claims them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count

import redis
from transformers import PreTrainedTokenizerBase

from services.inference.engine import Sample
from services.inference.engine_thread import EngineDeaths, SampleGroup, sampling_of
from services.inference.episodes import (
    TOKENIZER,
    StartedEpisodes,
    end_token_ids,
    prompt_tokens,
    sample_requests,
    start_episodes,
)
from services.inference.replica import ServingReplica
from services.inference.settings import Settings
from spo import observability, redis_keys
from spo.errors import InvalidInput, SpoError, Unreachable
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams.entries import Entry, decoded
from spo.messaging.streams.recovery import Outage
from spo.messaging.streams.stage import Consumer, StageRunner
from spo.model.chat import ChatFormat
from spo.model.tokenizer import decode_response, opens_reasoning, tokens_to_stop
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Hop, RolloutGroup, Trajectory

BLOCK_SECONDS = 1.0
# The one that is read, and others whose groups are being finished.
MOST_RUNS = 16


@dataclass(frozen=True)
class StartedGroup:
    """A group the engine works on."""

    request: PromptGroup
    sampler: str
    samples: SampleGroup
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    # Whether the prompt opens the reasoning itself.
    opened: bool
    # Of the group's samples, those that are sampled here.
    indexes: Sequence[int]

    @property
    def alone(self) -> bool:
        """Whether nothing else is in the engine meanwhile."""
        return self.samples.alone

    @property
    def future(self) -> Future[list[Sample]]:
        return self.samples.future

    def cancel(self) -> None:
        """Abort the group's sequences, unless it is finished."""
        self.future.cancel()

    def result(self, timeout_seconds: float) -> RolloutGroup:
        """The finished group. Raises Unreachable after timeout_seconds or cancel(), or what the engine raised."""
        try:
            finished = self.future.result(timeout_seconds)
        except CancelledError:
            raise Unreachable("the caller gave the group up") from None
        except TimeoutError:
            self.cancel()
            raise Unreachable(f"the engine did not finish the group in {timeout_seconds:.1f} s") from None
        return RolloutGroup(request=self.request, trajectories=list(map(self.trajectory, count(), finished)))

    def trajectory(self, place: int, sample: Sample) -> Trajectory:
        """A finished sample. place: of its request among those that are sampled here."""
        group, index, sample_request = self.request, self.indexes[place], self.samples.requests[place]
        now = int(time.time() * 1000)
        prefix = group.response_prefix_token_ids
        token_ids, text, stopped = self._response(sample)
        return Trajectory(
            trajectory_id=redis_keys.trajectory_id(
                group.run_id, group.group_id, index, group.attempt, sample.version_first
            ),
            group_id=group.group_id,
            run_id=group.run_id,
            prompt_id=group.prompt.prompt_id,
            sample_index=index,
            attempt=group.attempt,
            source=group.source,
            prompt_token_ids=sample_request.prompt_token_ids[: len(sample_request.prompt_token_ids) - len(prefix)],
            response_token_ids=token_ids,
            # The prefix was given, not sample_request: it has none.
            sampling_logprobs=[] if prefix else sample.logprobs,
            response_text=text,
            reasoning_characters=self.chat.reasoning_length(text, opened=self.opened),
            policy_version_first=sample.version_first,
            policy_version_last=sample.version_last,
            temperature=sample_request.temperature,
            top_p=sample_request.top_p,
            seed=sample_request.seed,
            finish_reason=FINISH_REASON_STOP if stopped else FINISH_REASON_LENGTH,
            sampler=self.sampler,
            created_unix_ms=now,
            hops=[Hop(service="inference", at_unix_ms=now)],
        )

    def _response(self, sample: Sample) -> tuple[list[int], str, bool]:
        """Tokens, text, and whether it ended by itself."""
        prefix = self.request.response_prefix_token_ids
        token_ids, stopped = [*prefix, *sample.token_ids], sample.stopped
        with TOKENIZER:
            if prefix and self.chat.stop:
                # The engine took the prefix for prompt, and looked for no stop string that begins in it.
                length = tokens_to_stop(self.tokenizer, token_ids, self.chat)
                token_ids, stopped = token_ids[:length], stopped or length is not None
            return token_ids, decode_response(self.tokenizer, token_ids, self.chat), stopped


def start_group(
    replica: ServingReplica,
    group: PromptGroup,
    *,
    alone: bool = False,
    indexes: Sequence[int] = (),
    on_sample: Callable[[int, Sample], None] | None = None,
) -> StartedGroup | StartedEpisodes:
    """Submit a group to the engine, or begin its conversations where the prompt names an environment.

    alone: nothing else is in the engine while the group is sampled. indexes: sample only these members of the group
    (not for conversations). on_sample: called in the engine's thread with each sample and its position in the group.

    Raises InvalidInput on a prompt or sampling that can never be served, NotFound or IntegrityError when the policy
    version it names is not available, NotReady or PreconditionFailed when this replica does not serve its run.
    """
    assignment = replica.serving(group.run_id)
    weights = None
    if group.HasField("policy_version"):
        weights = assignment.versions.resolve(group.run_id, group.policy_version)
    if group.prompt.environment:
        return start_episodes(assignment, replica.environments, group, weights, alone=alone)
    chat = assignment.spec.model.chat_format
    prompt_token_ids = prompt_tokens(assignment, group, group.prompt.text)
    ends = end_token_ids(assignment)
    prefix = tuple(group.response_prefix_token_ids)
    requests = [
        replace(request, stop=chat.stop, end_token_ids=ends)
        for request in sample_requests(prompt_token_ids, group.sampling, prefix)
    ]
    if not set(indexes) <= set(range(len(requests))):
        raise InvalidInput(f"a group of {len(requests)} samples has none of {max(indexes)}")
    indexes = indexes or range(len(requests))
    requests = [requests[index] for index in indexes]
    may_switch = not assignment.spec.algorithm.anchors_by_rollouts
    tenant = assignment.tenant
    samples = SampleGroup(group.run_id, requests, weights, alone, may_switch, on_sample=on_sample, tenant=tenant)
    assignment.engine.submit(samples)
    with TOKENIZER:
        opened = opens_reasoning(assignment.tokenizer, prompt_token_ids, chat)
    return StartedGroup(group, assignment.sampler, samples, assignment.tokenizer, chat, opened, indexes)


class RolloutWorker:
    """Samples the prompt groups of the assigned run: a thread waits for each, and the engine has them all at once."""

    def __init__(self, client: RedisClient, replica: ServingReplica, replica_id: str, settings: Settings) -> None:
        self._client = client
        self._replica = replica
        self._replica_id = replica_id
        self._settings = settings
        self._deaths = EngineDeaths(client)
        self._writing = Outage("rollouts cannot be written")
        # When what is in flight is released; far in the future until the process stops.
        self._drained_by = float("inf")

    def run(self, stop: threading.Event) -> None:
        """Read the stream of the assigned run until stop; groups in flight then have drain_seconds to finish.

        After a new assignment the groups of the previous run are finished while those of the next run begin.
        """
        reading, ended = "", threading.Event()
        with ThreadPoolExecutor(MOST_RUNS, thread_name_prefix="rollouts") as pool:
            stages: list[Future[None]] = []
            while not stop.wait(BLOCK_SECONDS / 4):
                run_id = self._run_to_read()
                if run_id != reading:
                    ended.set()
                    reading, ended = run_id, threading.Event()
                    if run_id:
                        stages.append(pool.submit(self._stage(run_id).run, ended))
                for stage in [each for each in stages if each.done()]:
                    stages.remove(stage)
                    stage.result()
            self._drained_by = time.monotonic() + self._settings.drain_seconds
            ended.set()

    def _run_to_read(self) -> str:
        assignment = self._replica.current()
        # Groups that agents play are the orchestrator's; their calls come as any completion.
        return assignment.run_id if assignment and assignment.spec.tasks.harness is None else ""

    def _stage(self, run_id: str) -> StageRunner:
        consumer = Consumer(
            self._client,
            redis_keys.prompts(run_id),
            redis_keys.INFERENCE_GROUP,
            self._replica_id,
            reclaim_after_seconds=self._settings.reclaim_after_seconds,
            run_id=run_id,
        )
        most = self._settings.groups_in_flight
        return StageRunner(
            consumer,
            lambda entries: self._sample(consumer, entries[0]),
            threads=most,
            most=lambda: min(most, self._replica.groups_in_hand),
        )

    def _sample(self, consumer: Consumer, entry: Entry) -> None:
        """Sample one group and pass it on. Raises what decides on its entry."""
        request = decoded(PromptGroup, entry)
        work = sampling_of(request)
        try:
            started = start_group(self._replica, request, alone=self._deaths.suspected(work) or entry.alone)
        except SpoError as error:
            if error.code != "other_run":
                raise
            # It was read just before this replica was assigned to another run, whose next replica takes it.
            consumer.release([entry])
            return
        span = entry.span("sample", run=request.run_id, group=request.group_id, delivery=entry.deliveries)
        if not self._is_finished(started):
            span.end("cancelled")
            consumer.release([entry])
            return
        try:
            with self._deaths.ending(work, alone=started.alone):
                rollouts = started.result(timeout_seconds=0)
        except Exception as error:
            span.end(error.code if isinstance(error, SpoError) else "internal")
            raise
        self._forward(consumer, entry, rollouts, span)

    def _is_finished(self, started: StartedGroup | StartedEpisodes) -> bool:
        """Wait for a group; False when the drain time is over before it is finished: it is left to other replicas."""
        while True:
            try:
                started.future.exception(BLOCK_SECONDS)
                return True
            except CancelledError:
                return True
            except TimeoutError:
                if time.monotonic() >= self._drained_by:
                    started.cancel()
                    return False

    def _forward(self, consumer: Consumer, entry: Entry, rollouts: RolloutGroup, span: observability.Span) -> None:
        """Pass a group to its judges; while Redis takes nothing it is kept, since it would be sampled again."""
        span.note(tokens=sum(len(trajectory.response_token_ids) for trajectory in rollouts.trajectories))
        stream = redis_keys.rollouts_of(rollouts.request.prompt.verifier_pool)
        payload = rollouts.SerializeToString()
        while True:
            try:
                consumer.forward(entry, stream, payload, span.header, run_id=rollouts.request.run_id)
                break
            except redis.RedisError as error:
                self._writing.failed(error)
                if time.monotonic() >= self._drained_by:
                    raise
                time.sleep(BLOCK_SECONDS)
        span.end()
        self._writing.over()
