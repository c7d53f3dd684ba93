"""gRPC of an inference replica: groups, and completions from a request to its parts as they come.

A completion from its request to its parts: the prompt in tokens, sampling by the shared engine, parts as they come.
The engine of a replica serves every run whose model it holds, not only the one that is assigned to it: the versions of
all of them take turns in it, as those of one run do.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from services.inference.engine import Sample, SampledPart, SampleRequest, ServedSampling, ShownToken
from services.inference.engine_thread import EngineDeaths, SampleGroup, sampling_of
from services.inference.episodes import TOKENIZER, StartedEpisodes, end_token_ids
from services.inference.replica import Assignment, ServingReplica, engine_spec_of
from services.inference.rollouts import StartedGroup, start_group
from spo import observability, redis_keys
from spo.errors import InvalidInput, NotReady, PreconditionFailed, ResourceExhausted, SpoError, Unreachable
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import run_tenant
from spo.model.tokenizer import encode_chat, encode_following, encode_text, opens_reasoning
from spo.model.tool_calls import AnswerReader, Constraint
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS, Parts
from spo.rpc.server import ANSWERING_THREADS
from spo.spec.job_spec import spec_from_json
from spo.v1 import inference_service_pb2 as inference, inference_service_pb2 as wire
from spo.v1.inference_service_pb2_grpc import InferenceServiceServicer

MOST_SAMPLES = 64
MOST_TOP_LOGPROBS = 20
MOST_SEED = 2**63 - 1
# What comes within it after a part goes into the next one: readers see no difference, and much less is sent.
PART_SECONDS = 0.04
# vLLM computes the logits of all tokens of a prompt (or of a part of it) at once, and their log-probs in float32, in
# memory that it has not set aside.
PROMPT_LOGPROBS_BYTES = 4 << 30
LOGIT_BYTES = 8
REMEMBERED_RUNS = 64

# Health checks share the server's threads: some are kept free for them.
MAX_GENERATE_CALLS = ANSWERING_THREADS - 8


class ServedRuns:
    """Runs that this replica's engine can serve beside the one it is assigned to. Safe from several threads."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._known: dict[str, Assignment] = {}

    def serving(self, replica: ServingReplica, run_id: str) -> Assignment:
        """The assigned run, or another of the same model. Raises NotReady, PreconditionFailed (code "other_run")."""
        assigned = replica.current()
        if assigned is None or assigned.run_id == run_id:
            return replica.serving(run_id)
        with self._lock:
            known = self._known.get(run_id)
            if known is None or known.engine is not assigned.engine:
                known = self._beside(assigned, run_id)
                self._known[run_id] = known
                while len(self._known) > REMEMBERED_RUNS:
                    del self._known[next(iter(self._known))]
            return known

    def _beside(self, assigned: Assignment, run_id: str) -> Assignment:
        text = self._client.get(redis_keys.run_spec(run_id))
        if text is None:
            raise PreconditionFailed(f"run {run_id} has no spec", code="other_run")
        spec = spec_from_json(text)
        if not assigned.engine_spec.fits(engine_spec_of(spec, Path(spec.model.path))):
            message = f"this replica holds another model than that of {run_id}"
            raise PreconditionFailed(message, code="other_run")
        return replace(assigned, run_id=run_id, spec=spec, tenant=run_tenant(self._client, run_id) or "")


def responses(
    assignment: Assignment, request: wire.ServeRequest, context: grpc.ServicerContext
) -> Iterator[wire.ServeResponse]:
    """What is sampled, in parts while it is, or whole; nothing is sampled on once the caller has gone.

    Raises InvalidInput on what can never be served, NotFound or IntegrityError when the version is not available.
    """
    any_version = request.loaded_version and request.policy_version > 0
    weights = None if any_version else assignment.versions.resolve(request.run_id, request.policy_version)
    prompt = _prompt_tokens(assignment, request)
    readers = _readers(assignment, request, prompt)
    inbox = _Inbox(context)
    served = _served(assignment, request, prompt)
    echo = _Echo(assignment, request, prompt)
    requests = _requests(assignment, request, prompt, served)
    group = SampleGroup(
        request.run_id, requests, weights, on_part=inbox.put, any_version=any_version, tenant=assignment.tenant
    )
    group.future.add_done_callback(lambda _: inbox.wake())
    assignment.engine.submit(group)
    context.add_callback(lambda: _give_up(group))
    remaining = context.time_remaining()
    deadline = time.monotonic() + (DEFAULT_DEADLINE_SECONDS if remaining is None else remaining)
    first = wire.ServeResponse(
        prompt_token_ids=prompt,
        model_hash=assignment.engine_spec.model_hash,
        sampler=assignment.sampler,
        constrained=bool(served.structural_tag),
    )
    try:
        unfinished = len(group.requests)
        while unfinished:
            parts = inbox.take(deadline, whole=0 if request.stream else unfinished, group=group)
            unfinished -= sum(bool(part.finish_reason) for _, part in parts)
            first.parts.extend(_on_the_wire(index, echo.before(index, part), request) for index, part in parts)
            if readers:
                _read(readers, first.parts)
            yield first
            first = wire.ServeResponse()
    finally:
        group.future.cancel()


def _give_up(group: SampleGroup) -> None:
    group.future.cancel()


class _Inbox:
    """Parts between the engine's thread, which never waits here, and the one that sends them."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        self._wake = threading.Condition()
        self._parts: list[tuple[int, SampledPart]] = []
        self._sent_at = 0.0

    def put(self, index: int, part: SampledPart) -> None:
        with self._wake:
            self._parts.append((index, part))
            if len(self._parts) == 1 or part.finish_reason:
                self._wake.notify()

    def wake(self) -> None:
        with self._wake:
            self._wake.notify()

    def take(self, deadline: float, *, whole: int, group: SampleGroup) -> list[tuple[int, SampledPart]]:
        """What has come, a part of each sequence; whole: wait for so many. Raises what the engine did, Unreachable."""
        pause = self._sent_at + PART_SECONDS - time.monotonic()
        if pause > 0 and not whole and not group.future.done():
            time.sleep(pause)
        with self._wake:
            while len(self._parts) < max(1, whole):
                self._check(group, deadline)
                self._wake.wait(min(1.0, max(0.0, deadline - time.monotonic())))
            taken, self._parts = self._parts, []
        self._sent_at = time.monotonic()
        return _merged(taken)

    def _check(self, group: SampleGroup, deadline: float) -> None:
        if group.future.cancelled() or not self._context.is_active():
            raise NotReady("the caller has gone", code="caller_gone")
        if group.future.done() and (error := group.future.exception()):
            raise error if isinstance(error, SpoError) else NotReady(f"the engine failed: {error}")
        if time.monotonic() > deadline:
            raise Unreachable("the engine did not finish the completion in time")


def _merged(parts: Sequence[tuple[int, SampledPart]]) -> list[tuple[int, SampledPart]]:
    found: dict[int, list[SampledPart]] = {}
    for index, part in parts:
        found.setdefault(index, []).append(part)
    return [(index, same[0] if len(same) == 1 else _joined(same)) for index, same in found.items()]


def _joined(parts: Sequence[SampledPart]) -> SampledPart:
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        tokens=tuple(token for part in parts for token in part.tokens),
        prompt=parts[0].prompt,
    )


class _Echo:
    """Puts the prompt before the first part of each sample, where that is asked for."""

    def __init__(self, assignment: Assignment, request: wire.ServeRequest, prompt: Sequence[int]) -> None:
        self._alone = request.prompt_alone
        self._left = set(range(request.samples)) if request.echo else set()
        if self._left:
            with TOKENIZER:
                self._text = request.text or str(assignment.tokenizer.decode(list(prompt)))
                self._first_text = str(assignment.tokenizer.decode(list(prompt[:1])))

    def before(self, index: int, part: SampledPart) -> SampledPart:
        if index not in self._left:
            return part
        self._left.remove(index)
        if self._alone:
            part = replace(part, text="", token_ids=(), tokens=(), finish_reason="length", stop_reason="")
        # vLLM says nothing of a first token, not even its text.
        prompt = (replace(part.prompt[0], text=self._first_text), *part.prompt[1:]) if part.prompt else ()
        return replace(part, text=self._text + part.text, tokens=(*prompt, *part.tokens))


def _prompt_tokens(assignment: Assignment, request: wire.ServeRequest) -> list[int]:
    if request.token_ids:
        return list(request.token_ids)
    with TOKENIZER:
        if request.messages_json:
            turns, tools = json.loads(request.messages_json), _tools_of(request)
            if tools or any(turn.keys() - {"role", "content"} for turn in turns):
                assignment.tool_format.require(turns, tools=bool(tools))
            chat, shown, context = assignment.spec.model.chat_format, _as_shown(tools), request.context_token_ids
            if context:
                after = encode_following(assignment.tokenizer, turns, request.context_turns, chat, shown, said=context)
                if after is not None:
                    return [*context, *after]
            return encode_chat(assignment.tokenizer, turns, chat, shown)
        return encode_text(assignment.tokenizer, request.text)


def _tools_of(request: wire.ServeRequest) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = json.loads(request.tools_json) if request.tools_json else []
    return tools


def _as_shown(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools as templates take them: whether arguments are held to their schema is no matter of the model's."""
    return [
        {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
        for tool in tools
    ]


def _served(assignment: Assignment, request: wire.ServeRequest, prompt: Sequence[int]) -> ServedSampling:
    tools, chat = _tools_of(request), assignment.spec.model.chat_format
    schema = json.loads(request.answer_schema_json) if request.answer_schema_json else None
    tag = ""
    if tools or schema is not None:
        choice = json.loads(request.tool_choice_json or '"auto"')
        with TOKENIZER:
            opened = opens_reasoning(assignment.tokenizer, prompt, chat)
            thought_end = chat.reasoning[1] if opened and chat.reasoning else ""
            held = Constraint(tools, choice, schema, thought_end, request.one_call)
            tag = held.structural_tag(assignment.tokenizer, assignment.tool_format.parser)
    return ServedSampling(
        request.stream,
        request.top_logprobs if request.logprobs else None,
        request.echo and request.logprobs,
        request.frequency_penalty,
        request.presence_penalty,
        request.ignore_eos,
        shows_special_tokens=bool(tools),
        structural_tag=tag,
    )


def _readers(assignment: Assignment, request: wire.ServeRequest, prompt: Sequence[int]) -> list[AnswerReader]:
    """One for each sample of a chat with tools; none of another."""
    tools = _tools_of(request)
    if not tools:
        return []
    chat = assignment.spec.model.chat_format
    with TOKENIZER:
        length = partial(chat.reasoning_length, opened=opens_reasoning(assignment.tokenizer, prompt, chat))
    form = assignment.tool_format
    return [AnswerReader(assignment.tokenizer, form, tools, length) for _ in range(request.samples)]


def _read(readers: Sequence[AnswerReader], parts: Iterable[wire.ServedPart]) -> None:
    """Put calls in the place of their text."""
    for part in parts:
        reader, ended = readers[part.index], bool(part.finish_reason)
        with TOKENIZER:
            part.text, calls = reader.take(part.text, ended=ended)
        part.calls.extend(wire.ServedCall(id=each.id, name=each.name, arguments_json=each.arguments) for each in calls)
        if calls or reader.malformed:
            observability.TOOL_CALLS.labels(result="read" if calls else "malformed").inc(max(1, len(calls)))


def _requests(
    assignment: Assignment, request: wire.ServeRequest, prompt: Sequence[int], served: ServedSampling
) -> list[SampleRequest]:
    room = assignment.engine_spec.max_tokens - len(prompt)
    if request.path_tokens:
        room = min(room, request.path_tokens - len(prompt))
        request.max_tokens = min(request.max_tokens or room, max(1, room))
    if room < max(1, request.max_tokens):
        message = (
            # Clients look for these words.
            f"this model's maximum context length is {assignment.engine_spec.max_tokens} tokens; the prompt has "
            f"{len(prompt)}, and {max(1, request.max_tokens)} more are asked for"
        )
        raise InvalidInput(message, code="prompt_too_long")
    most = PROMPT_LOGPROBS_BYTES // (LOGIT_BYTES * len(assignment.tokenizer))
    if served.prompt_logprobs and len(prompt) > most:
        message = f"log-probs are told of at most {most} tokens of a prompt of this model, not of {len(prompt)}"
        raise InvalidInput(message, code="prompt_too_long")
    if not 1 <= request.samples <= MOST_SAMPLES or not 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS:
        raise InvalidInput(f"1 to {MOST_SAMPLES} samples and 0 to {MOST_TOP_LOGPROBS} top log-probs")
    chat = assignment.spec.model.chat_format
    return [
        SampleRequest(
            prompt_token_ids=tuple(prompt),
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens or room,
            seed=(request.seed + index) % MOST_SEED,
            # A chat ends where the job's responses do; a bare prompt goes on as it is told to.
            stop=(*request.stop, *(chat.stop if request.messages_json and not request.ignore_eos else ())),
            end_token_ids=end_token_ids(assignment),
            served=served,
        )
        for index in range(request.samples)
    ]


def _on_the_wire(index: int, part: SampledPart, request: wire.ServeRequest) -> wire.ServedPart:
    return wire.ServedPart(
        index=index,
        text=part.text,
        token_ids=part.token_ids,
        tokens=[_token(token, request.top_logprobs) for token in part.tokens],
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        version_first=part.version_first,
        version_last=part.version_last,
    )


def _token(token: ShownToken, top: int) -> wire.ServedToken:
    return wire.ServedToken(
        token_id=token.token_id,
        text=token.text,
        logprob=token.logprob,
        top=[
            wire.ServedToken(token_id=each.token_id, text=each.text, logprob=each.logprob) for each in token.top[:top]
        ],
    )


class InferenceService(InferenceServiceServicer):
    """Generate for evaluation and value estimation, Serve for whoever uses a policy, DescribeReplica for people."""

    def __init__(
        self, replica: ServingReplica, replica_id: str, deaths: EngineDeaths, runs: ServedRuns, streams: int
    ) -> None:
        self._runs = runs
        self._streams = threading.BoundedSemaphore(streams)
        self._replica = replica
        self._deaths = deaths
        self._replica_id = replica_id
        self._slots = threading.BoundedSemaphore(MAX_GENERATE_CALLS)
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[int, bool]] = {}

    def Generate(self, request: inference.GenerateRequest, context: grpc.ServicerContext) -> inference.GenerateResponse:
        if not self._slots.acquire(blocking=False):
            raise ResourceExhausted(f"{MAX_GENERATE_CALLS} Generate calls are already being served")
        group = request.group
        try:
            with self._noted(sampling_of(group)) as alone:
                started = start_group(self._replica, group, alone=alone)
                # A caller that gave up frees its sequences.
                context.add_callback(started.cancel)
                remaining = context.time_remaining()
                return inference.GenerateResponse(
                    group=started.result(DEFAULT_DEADLINE_SECONDS if remaining is None else remaining)
                )
        finally:
            self._slots.release()

    def GenerateParts(
        self, request: inference.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference.GeneratePart]:
        """Samples as they finish, of a group of any length; what is in the engine ends with its caller."""
        if not self._slots.acquire(blocking=False):
            raise ResourceExhausted(f"{MAX_GENERATE_CALLS} Generate calls are already being served")
        try:
            with self._noted(sampling_of(request.group)) as alone:
                yield from self._parts(request, context, alone=alone)
        finally:
            self._slots.release()

    def _parts(
        self, request: inference.GenerateRequest, context: grpc.ServicerContext, *, alone: bool
    ) -> Iterator[inference.GeneratePart]:
        group, indexes = request.group, list(request.sample_indexes)
        finished: Parts[tuple[int, Sample] | inference.GeneratePart] = Parts(context)

        def put(place: int, sample: Sample) -> None:
            finished.put((place, sample))

        engine = self._replica.serving(group.run_id).engine
        started = start_group(self._replica, group, alone=alone, indexes=indexes, on_sample=put)
        context.add_callback(started.cancel)
        started.future.add_done_callback(
            lambda future: finished.end(None if future.cancelled() else future.exception())
        )
        seen = -1

        def beat() -> inference.GeneratePart | None:
            nonlocal seen
            asleep = engine.steps == seen and engine.loading is None
            if asleep and not (isinstance(started, StartedEpisodes) and started.awaits_environment):
                return None
            seen = engine.steps
            waits_for = engine.waits_for(started.samples) if isinstance(started, StartedGroup) else ""
            return inference.GeneratePart(steps=seen, waits_for=waits_for)

        try:
            for part in finished.sent(beat):
                if isinstance(part, inference.GeneratePart):
                    yield part
                elif isinstance(started, StartedGroup):
                    yield inference.GeneratePart(finished=[started.trajectory(*part)], steps=engine.steps)
            if started.future.cancelled() or not context.is_active():
                raise NotReady("the caller has gone", code="caller_gone")
            if isinstance(started, StartedEpisodes):
                whole = started.result(0).trajectories
                yield inference.GeneratePart(
                    finished=[each for each in whole if not indexes or each.sample_index in indexes], steps=engine.steps
                )
        finally:
            started.cancel()

    @contextmanager
    def _noted(self, work: str) -> Iterator[bool]:
        """Note work once for all who ask for it at the same time; yields whether it has to be done alone."""
        with self._lock:
            asked, alone = self._asked.get(work, (0, False))
            self._asked[work] = asked + 1, alone
        try:
            if asked:
                yield alone
                return
            with self._deaths.during(work) as alone:
                with self._lock:
                    self._asked[work] = self._asked[work][0], alone
                yield alone
        finally:
            with self._lock:
                asked, alone = self._asked.pop(work)
                if asked > 1:
                    self._asked[work] = asked - 1, alone

    def Serve(
        self, request: inference.ServeRequest, context: grpc.ServicerContext
    ) -> Iterator[inference.ServeResponse]:
        if not self._streams.acquire(blocking=False):
            raise ResourceExhausted("as many completions are being sampled here as this replica takes; try again")
        try:
            yield from responses(self._runs.serving(self._replica, request.run_id), request, context)
        finally:
            self._streams.release()

    def DescribeReplica(
        self, request: inference.DescribeReplicaRequest, context: grpc.ServicerContext
    ) -> inference.DescribeReplicaResponse:
        assignment = self._replica.current()
        if assignment is None:
            return inference.DescribeReplicaResponse(replica_id=self._replica_id)
        return inference.DescribeReplicaResponse(
            replica_id=self._replica_id,
            run_id=assignment.run_id,
            model_hash=assignment.engine_spec.model_hash,
            policy_version=assignment.policy_version,
            engine=assignment.sampler,
            running_sequences=assignment.engine.running_sequences,
        )
