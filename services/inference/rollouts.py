"""From the stream of prompts through the engine to the stream of rollouts: many groups at once, the same path for
the stream and for gRPC.

From the stream of prompts through the engine to the stream of rollouts, many groups at once to keep batches full.
A group's entry is acknowledged in the same step that writes its rollouts, so a replica that dies loses nothing: its
entries are no longer kept alive, and another replica claims them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count

import redis
from google.protobuf.message import DecodeError
from transformers import PreTrainedTokenizerBase

from services.inference.engine import Sample
from services.inference.engine_thread import EngineDeaths, SampleGroup, sampling_of
from services.inference.episodes import StartedEpisodes, start_episodes
from services.inference.replica import ServingReplica
from services.inference.sampling import TOKENIZER, end_token_ids, prompt_tokens, sample_requests
from services.inference.settings import Settings
from spo import observability, redis_keys
from spo.errors import InvalidInput, NotFound, SpoError, Unreachable
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams import Consumer, Entry
from spo.messaging.streams.recovery import Outage
from spo.model.chat import ChatFormat
from spo.model.tokenizer import decode_response, opens_reasoning, tokens_to_stop
from spo.observability import get_logger
from spo.v1.prompt_pb2 import PromptGroup
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Hop, RolloutGroup, Trajectory

log = get_logger("rollouts")

BLOCK_SECONDS = 1.0


@dataclass(frozen=True)
class StartedGroup:
    """A group the engine works on."""

    request: PromptGroup
    sampler: str
    samples: SampleGroup
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    # Whether the prompt has begun reasoning.
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
        """The finished group. Raises Unreachable after timeout_seconds, or what the engine raised."""
        try:
            finished = self.future.result(timeout_seconds)
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

    alone: so that nothing else is in the engine when it is sampled. indexes: only these samples of it, except of
    conversations; on_sample: gets each with its place among them, in the engine's thread.

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
    samples = SampleGroup(group.run_id, requests, weights, alone, may_switch, on_sample=on_sample)
    assignment.engine.submit(samples)
    with TOKENIZER:
        opened = opens_reasoning(assignment.tokenizer, prompt_token_ids, chat)
    return StartedGroup(group, assignment.sampler, samples, assignment.tokenizer, chat, opened, indexes)


@dataclass(frozen=True)
class InFlightGroup:
    """A stream entry and the group that the engine samples for it."""

    consumer: Consumer
    entry: Entry
    started: StartedGroup | StartedEpisodes
    span: observability.Span


class RolloutWorker:
    """Two loops: `read` takes prompts, `forward` passes finished groups to the judges."""

    def __init__(self, client: RedisClient, replica: ServingReplica, replica_id: str, settings: Settings) -> None:
        self._client = client
        self._replica = replica
        self._replica_id = replica_id
        self._settings = settings
        self._in_flight: dict[str, InFlightGroup] = {}
        self._lock = threading.Lock()
        self._room = threading.Event()
        self._finished: queue.SimpleQueue[InFlightGroup] = queue.SimpleQueue()
        self._deaths = EngineDeaths(client)
        self._writing = Outage("rollouts cannot be written")

    def read(self, stop: threading.Event) -> None:
        """Take prompt groups of the assigned run until stop, at most `groups_in_flight` at once."""
        consumer: Consumer | None = None
        while not stop.is_set():
            assignment = self._replica.current()
            # Groups that agents play are the orchestrator's; their calls come as any completion.
            if assignment is None or assignment.spec.tasks.harness is not None:
                stop.wait(BLOCK_SECONDS / 4)
                continue
            if consumer is None or consumer.run_id != assignment.run_id:
                if consumer:
                    consumer.holder.forget(consumer.stream)
                consumer = self._consumer(assignment.run_id)
            self._room.clear()
            room = min(self._settings.groups_in_flight, self._replica.groups_in_hand) - len(self._in_flight)
            if room <= 0:
                self._room.wait(BLOCK_SECONDS)
                continue
            try:
                entries = consumer.read(room, BLOCK_SECONDS)
            except (redis.RedisError, NotFound):
                # The consumer has said what it was.
                stop.wait(BLOCK_SECONDS)
                continue
            self._start_all(consumer, entries, stop)

    def forward(self, stop: threading.Event) -> None:
        """Forward finished groups; after stop, go on for drain_seconds with those that are in flight."""
        keep_alive_seconds = self._settings.reclaim_after_seconds / 4
        next_keep_alive = time.monotonic() + keep_alive_seconds
        deadline = float("inf")
        while time.monotonic() < deadline:
            if stop.is_set():
                deadline = min(deadline, time.monotonic() + self._settings.drain_seconds)
                if not self._in_flight:
                    return
            if time.monotonic() >= next_keep_alive:
                self._keep_alive()
                next_keep_alive = time.monotonic() + keep_alive_seconds
            try:
                group = self._finished.get(timeout=min(BLOCK_SECONDS, keep_alive_seconds))
            except queue.Empty:
                continue
            self._finish(group)
        log.warning("drain time is over; unfinished groups are left to other replicas", groups=len(self._in_flight))
        self._release()

    def _consumer(self, run_id: str) -> Consumer:
        return Consumer(
            self._client,
            redis_keys.prompts(run_id),
            redis_keys.INFERENCE_GROUP,
            self._replica_id,
            reclaim_after_seconds=self._settings.reclaim_after_seconds,
            run_id=run_id,
        )

    def _start_all(self, consumer: Consumer, entries: Sequence[Entry], stop: threading.Event) -> None:
        try:
            for entry in entries:
                if entry.alone:
                    self._start_alone(consumer, entry, stop)
                else:
                    self._start(consumer, entry)
        except redis.RedisError as error:
            consumer.interrupted([entry for entry in entries if entry.entry_id not in self._in_flight], error)

    def _start_alone(self, consumer: Consumer, entry: Entry, stop: threading.Event) -> None:
        """Sample a group whose earlier holders vanished while the engine has no other."""
        if self._emptied(stop, lambda: consumer.keep_alive([entry])) and consumer.begin_alone(entry):
            self._start(consumer, entry)
            self._emptied(stop, lambda: None)
        consumer.release(consumer.unfinished([entry] if entry.entry_id not in self._in_flight else []))

    def _emptied(self, stop: threading.Event, meanwhile: Callable[[], None]) -> bool:
        """Wait until no group is in flight; False when the process stops first."""
        while self._in_flight and not stop.is_set():
            self._room.clear()
            if self._in_flight:
                self._room.wait(BLOCK_SECONDS)
            meanwhile()
        return not self._in_flight

    def _start(self, consumer: Consumer, entry: Entry) -> None:
        if entry.entry_id in self._in_flight:
            return
        try:
            request = _decode(entry.payload)
            alone = self._deaths.suspected(sampling_of(request)) or entry.alone
            started = start_group(self._replica, request, alone=alone)
        except redis.RedisError:
            raise
        except Exception as error:
            self._fail(consumer, entry, error)
            return
        span = _span(entry, started)
        group = InFlightGroup(consumer, entry, started, span)
        with self._lock:
            self._in_flight[entry.entry_id] = group
        started.future.add_done_callback(lambda _: self._finished.put(group))

    def _finish(self, group: InFlightGroup) -> None:
        try:
            rollouts = group.started.result(timeout_seconds=0)
            group.span.note(tokens=sum(len(trajectory.response_token_ids) for trajectory in rollouts.trajectories))
            group.consumer.forward(
                group.entry,
                redis_keys.rollouts_of(rollouts.request.prompt.verifier_pool),
                rollouts.SerializeToString(),
                group.span.header,
                run_id=rollouts.request.run_id,
            )
            group.span.end()
            self._writing.over()
            if group.started.alone:
                self._deaths.cleared(sampling_of(group.started.request))
        except redis.RedisError as error:
            self._writing.failed(error)
            time.sleep(BLOCK_SECONDS)
            self._finished.put(group)
            return
        except Exception as error:
            group.span.end(error.code if isinstance(error, SpoError) else "internal")
            if isinstance(error, SpoError) and error.code == "engine_failed":
                # The process ends and tells nobody else: a group that fails engines would come back for ever.
                self._deaths.died(sampling_of(group.started.request), error, alone=group.started.alone)
            self._fail(group.consumer, group.entry, error)
        with self._lock:
            del self._in_flight[group.entry.entry_id]
        self._room.set()

    def _fail(self, consumer: Consumer, entry: Entry, error: Exception) -> None:
        """Let the error decide on the entry; what Redis does not take now is reclaimed later."""
        try:
            if isinstance(error, SpoError) and error.code == "other_run":
                # It was read just before this replica was assigned to another run, whose next replica takes it.
                consumer.release([entry])
            else:
                consumer.fail(entry, error)
        except redis.RedisError as failure:
            consumer.interrupted([entry], failure)

    def _release(self) -> None:
        """Give back what is in flight, so that other replicas need not wait for this one's silence."""
        for group in list(self._in_flight.values()):
            try:
                group.consumer.release([group.entry])
            except redis.RedisError as error:
                log.warning("a group was not given back", entry=group.entry.entry_id, reason=str(error))

    def _keep_alive(self) -> None:
        with self._lock:
            groups = list(self._in_flight.values())
        for consumer in {id(group.consumer): group.consumer for group in groups}.values():
            try:
                consumer.keep_alive([group.entry for group in groups if group.consumer is consumer])
            except redis.RedisError as error:
                log.warning("keep-alive failed; will try again", reason=str(error))


def _decode(payload: bytes) -> PromptGroup:
    try:
        return PromptGroup.FromString(payload)
    except DecodeError as error:
        raise InvalidInput(f"not a PromptGroup: {error}", code="malformed_entry") from None


def _span(entry: Entry, started: StartedGroup | StartedEpisodes) -> observability.Span:
    group = started.request
    if not entry.trace:
        return observability.Span()
    return observability.begin(
        "sample", parent=entry.trace, kind="CONSUMER", run=group.run_id, group=group.group_id, delivery=entry.deliveries
    )
