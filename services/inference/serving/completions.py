"""A completion from its request to its parts: the prompt in tokens, sampling by the shared engine, parts as they come.

The engine of a replica serves every run whose model it holds, not only the one that is assigned to it: the versions of
all of them take turns in it, as those of one run do.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc

from services.inference.engine import SampledPart, SampleRequest, ServedSampling, ShownToken
from services.inference.engine_thread import SampleGroup
from services.inference.replica import Assignment, ServingReplica, engine_spec_of
from services.inference.sampling import TOKENIZER, end_token_ids
from spo import redis_keys
from spo.errors import InvalidInput, NotReady, PreconditionFailed, SpoError, Unreachable
from spo.messaging.redis_client import RedisClient
from spo.model.tokenizer import encode_chat, encode_text
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS
from spo.spec.job_spec import spec_from_json
from spo.v1 import inference_service_pb2 as wire

MOST_SAMPLES = 64
MOST_TOP_LOGPROBS = 20
MOST_SEED = 2**63 - 1
# What comes within it after a part goes into the next one: readers see no difference, and much less is sent.
PART_SECONDS = 0.04
REMEMBERED_RUNS = 64


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
        return replace(assigned, run_id=run_id, spec=spec)


def responses(
    assignment: Assignment, request: wire.ServeRequest, context: grpc.ServicerContext
) -> Iterator[wire.ServeResponse]:
    """What is sampled, in parts while it is, or whole; nothing is sampled on once the caller has gone.

    Raises InvalidInput on what can never be served, NotFound or IntegrityError when the version is not available.
    """
    weights = assignment.versions.resolve(request.run_id, request.policy_version)
    prompt = _prompt_tokens(assignment, request)
    inbox = _Inbox(context)
    group = SampleGroup(request.run_id, _requests(assignment, request, prompt), weights, on_part=inbox.put)
    group.future.add_done_callback(lambda _: inbox.wake())
    assignment.engine.submit(group)
    context.add_callback(lambda: _give_up(group))
    remaining = context.time_remaining()
    deadline = time.monotonic() + (DEFAULT_DEADLINE_SECONDS if remaining is None else remaining)
    first = wire.ServeResponse(
        prompt_token_ids=prompt, model_hash=assignment.engine_spec.model_hash, sampler=assignment.sampler
    )
    try:
        unfinished = len(group.requests)
        while unfinished:
            parts = inbox.take(deadline, whole=0 if request.stream else unfinished, group=group)
            unfinished -= sum(bool(part.finish_reason) for _, part in parts)
            first.parts.extend(_on_the_wire(index, part, request) for index, part in parts)
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
    )


def _prompt_tokens(assignment: Assignment, request: wire.ServeRequest) -> list[int]:
    if request.token_ids:
        return list(request.token_ids)
    with TOKENIZER:
        if request.messages_json:
            return encode_chat(
                assignment.tokenizer, json.loads(request.messages_json), assignment.spec.model.chat_format
            )
        return encode_text(assignment.tokenizer, request.text)


def _requests(assignment: Assignment, request: wire.ServeRequest, prompt: Sequence[int]) -> list[SampleRequest]:
    room = assignment.engine_spec.max_tokens - len(prompt)
    if room < max(1, request.max_tokens):
        message = (
            f"the model takes {assignment.engine_spec.max_tokens} tokens in all; the prompt has {len(prompt)} of them, "
            f"and {max(1, request.max_tokens)} are asked for"
        )
        raise InvalidInput(message, code="prompt_too_long")
    if not 1 <= request.samples <= MOST_SAMPLES or not 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS:
        raise InvalidInput(f"1 to {MOST_SAMPLES} samples and 0 to {MOST_TOP_LOGPROBS} top log-probs")
    chat = assignment.spec.model.chat_format
    served = ServedSampling(
        request.stream,
        request.top_logprobs if request.logprobs else None,
        request.frequency_penalty,
        request.presence_penalty,
    )
    return [
        SampleRequest(
            prompt_token_ids=tuple(prompt),
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens or room,
            seed=(request.seed + index) % MOST_SEED,
            # A chat ends where the job's responses do; a bare prompt goes on as it is told to.
            stop=(*request.stop, *(chat.stop if request.messages_json else ())),
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
