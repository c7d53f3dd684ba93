"""/v1/chat/completions, /v1/completions and /v1/models, as OpenAI's clients know them: requests, answers, and what
is captured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeVar

import redis
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from ulid import ULID

from services.orchestrator.auth import Principal
from services.orchestrator.capture import Captured, CapturedChoice, CaptureStore
from services.orchestrator.commit import now_ms
from services.orchestrator.container import AppContext, ContextDep, PrincipalDep
from services.orchestrator.http.errors import error_document
from services.orchestrator.http.openai_requests import MOST_TOOLS, ChatRequest, Json, PlainRequest, refused
from services.orchestrator.serving import Target
from services.orchestrator.versions import announced_version
from spo import observability
from spo.errors import FieldViolation, InvalidInput, NotFound, NotReady, SpoError
from spo.observability import get_logger
from spo.v1.inference_service_pb2 import ServedCall, ServedPart, ServedToken, ServeRequest, ServeResponse

# What OpenAI has for a sampled token without a log-prob.
IMPOSSIBLE = -9999.0

log = get_logger("capture")

CAPTURE, CONSENT, LICENCE = "x-spo-capture", "x-spo-consent", "x-spo-licence"
MOST_CAPTURED_CHARACTERS = 200

router = APIRouter(prefix="/v1", tags=["serving"])

EVENT_STREAM = "text/event-stream"
Sampled = TypeVar("Sampled")
WHOLE: dict[int | str, dict[str, object]] = {200: {"content": {"application/json": {}, EVENT_STREAM: {}}}}


@dataclass
class Choice:
    """One sample as far as it has come."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[ServedToken] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    finish_reason: str = ""
    version_first: int = 0
    version_last: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class OpenAiAnswer:
    """A completion as it grows: what clients are told of it, and what may be captured.

    Responses and Messages write the same otherwise (`dialects.py`).
    """

    dialect: ClassVar[str] = "chat"

    id: str
    model: str
    job_id: str
    kind: Literal["chat", "plain"]
    created: int
    choices: list[Choice]
    prompt_token_ids: Sequence[int] = ()
    model_hash: str = ""
    sampler: str = ""
    constrained: bool = False
    # When the first of it came.
    first_unix_ms: int = 0
    # Of each sample: more are left out, where the caller wants one at a time.
    most_calls: int = MOST_TOOLS
    # Whether every chunk has the usage so far.
    continuous_usage: bool = False
    # Whether the caller is told the log-probs that replicas have sent.
    shows_logprobs: bool = True

    def add(self, response: ServeResponse) -> None:
        """Take in what a replica has sent."""
        self.first_unix_ms = self.first_unix_ms or now_ms()
        if response.prompt_token_ids:
            self.prompt_token_ids = tuple(response.prompt_token_ids)
            self.model_hash, self.sampler = response.model_hash, response.sampler
            self.constrained = response.constrained
        for part in response.parts:
            choice = self.choices[part.index]
            choice.texts.append(part.text)
            choice.token_ids.extend(part.token_ids)
            choice.tokens.extend(part.tokens)
            if part.finish_reason:
                choice.calls = [_call(call) for call in part.calls[: self.most_calls]]
                choice.finish_reason = part.finish_reason
                if choice.calls and part.finish_reason == "stop":
                    choice.finish_reason = "tool_calls"
                choice.version_first, choice.version_last = part.version_first, part.version_last

    @property
    def is_whole(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    @property
    def tokens(self) -> int:
        """Of the prompt and all samples."""
        return len(self.prompt_token_ids) + sum(len(choice.token_ids) for choice in self.choices)

    def document(self) -> Json:
        """The whole completion."""
        choices = [self._choice(choice) for choice in self.choices]
        return {**self._head(""), **self._fingerprint(self.choices), "choices": choices, "usage": self.usage()}

    def _fingerprint(self, choices: Sequence[Choice]) -> Json:
        """The weights that finished samples had last."""
        versions = sorted({choice.version_last for choice in choices})
        return {"system_fingerprint": f"{self.job_id}@{'-'.join(map(str, versions))}"}

    def chunk(self, part: ServedPart) -> bytes:
        """What one sample has got since its last chunk, as an event."""
        sampled = self.choices[part.index]
        finish = sampled.finish_reason if part.finish_reason else None
        if self.kind == "chat":
            logprobs = _chat_logprobs(part.tokens) if part.tokens and self.shows_logprobs else None
            delta: Json = {"content": part.text}
            if finish and sampled.calls:
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(sampled.calls)]
            choice: Json = {"index": part.index, "delta": delta, "logprobs": logprobs}
        else:
            offset = sum(map(len, sampled.texts)) - len(part.text)
            logprobs = _plain_logprobs(part.tokens, offset) if part.tokens else None
            choice = {"index": part.index, "text": part.text, "logprobs": logprobs}
        more = self._fingerprint([sampled]) if finish else {}
        if self.continuous_usage:
            more["usage"] = self.usage()
        return event({**self._head(".chunk"), **more, "choices": [{**choice, "finish_reason": finish}]})

    def opening(self) -> bytes:
        """The first chunks of a chat: whose turn it is."""
        if self.kind == "plain":
            return b""
        begun = ({"index": each.index, "delta": {"role": "assistant", "content": ""}} for each in self.choices)
        return b"".join(event({**self._head(".chunk"), "choices": [{**each, "finish_reason": None}]}) for each in begun)

    def closing(self, *, include_usage: bool) -> bytes:
        """The last chunks."""
        told = {**self._head(".chunk"), **self._fingerprint(self.choices), "choices": [], "usage": self.usage()}
        return (event(told) if include_usage else b"") + b"data: [DONE]\n\n"

    def failure(self, error: SpoError) -> bytes:
        """What the client is told of an answer that breaks off."""
        return event(error_document(error, 500))

    def usage(self) -> Json:
        """Tokens of the prompt and of all samples."""
        prompt = len(self.prompt_token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens - prompt, "total_tokens": self.tokens}

    def _head(self, chunk: str) -> Json:
        name = f"chat.completion{chunk}" if self.kind == "chat" else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _choice(self, choice: Choice) -> Json:
        if self.kind == "chat":
            message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                message |= {"content": choice.text or None, "tool_calls": choice.calls}
            said: Json = {"message": message}
            said["logprobs"] = _chat_logprobs(choice.tokens) if choice.tokens and self.shows_logprobs else None
        else:
            said = {"text": choice.text, "logprobs": _plain_logprobs(choice.tokens) if choice.tokens else None}
        return {"index": choice.index, **said, "finish_reason": choice.finish_reason}


def _call(call: ServedCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def event(document: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _chat_logprobs(tokens: Iterable[ServedToken]) -> Json:
    content = [{**_token(token), "top_logprobs": [_token(each) for each in _likely(token)]} for token in tokens]
    return {"content": content, "refusal": None}


def _likely(token: ServedToken) -> list[ServedToken]:
    """The likeliest in its place, without those that top-p leaves no chance: JSON has no -inf."""
    return [each for each in token.top if math.isfinite(each.logprob)]


def _token(token: ServedToken) -> Json:
    return {"token": token.text, "logprob": _nats(token), "bytes": list(token.text.encode())}


def _nats(token: ServedToken) -> float:
    return token.logprob if math.isfinite(token.logprob) else IMPOSSIBLE


def _plain_logprobs(tokens: Iterable[ServedToken], offset: int = 0) -> Json:
    known = list(tokens)
    offsets = []
    for token in known:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in known],
        # A prompt's first token follows nothing.
        "token_logprobs": [None if math.isnan(token.logprob) else _nats(token) for token in known],
        "top_logprobs": [
            None if math.isnan(token.logprob) else {each.text: each.logprob for each in _likely(token)}
            for token in known
        ],
        "text_offset": offsets,
    }


def asks_for_capture(principal: Principal, headers: Mapping[str, str], body: ChatRequest | PlainRequest) -> bool:
    """By the header X-SPO-Capture, else `store: true` or a key with the scope models:capture. Raises InvalidInput."""
    said = headers.get(CAPTURE, "").lower()
    if said not in ("", "true", "false"):
        message = f"{CAPTURE} is true or false"
        raise InvalidInput(message, code="invalid_request", violations=(FieldViolation(f"/{CAPTURE}", message),))
    # Whoever may do everything has not asked for anything.
    by_key = "models:capture" in principal.scopes and not principal.is_admin
    if isinstance(body, ChatRequest) and body.has_tools:
        # What is kept are texts of turns, which would not say what was called.
        if said == "true" or body.store:
            raise refused("/store", "chats with tools are not captured")
        return False
    if body.ignore_eos or (isinstance(body, PlainRequest) and body.echo):
        # What is kept would be no response, or have the prompt twice.
        if said == "true" or body.store:
            raise refused("/store", "completions with echo or ignore_eos are not captured")
        return False
    return said == "true" if said else body.store or by_key


def capture_terms(
    headers: Mapping[str, str], principal: Principal, body: ChatRequest | PlainRequest, wanted: ServeRequest
) -> Captured:
    """What is known of a completion before it is sampled. Raises InvalidInput."""
    long = [name for name in (CONSENT, LICENCE) if len(headers.get(name, "")) > MOST_CAPTURED_CHARACTERS]
    if long:
        message = f"at most {MOST_CAPTURED_CHARACTERS} characters"
        raise InvalidInput(message, code="invalid_request", violations=(FieldViolation(f"/{long[0]}", message),))
    turns = body.turns if isinstance(body, ChatRequest) else [{"role": "prompt", "content": wanted.text}]
    return Captured(
        id=wanted.request_id,
        tenant=principal.tenant,
        by=principal.name,
        model=body.model,
        job_id=wanted.run_id,
        created_unix_ms=int(time.time() * 1000),
        messages=tuple(turns),
        choices=(),
        temperature=body.temperature,
        top_p=body.top_p,
        seed=wanted.seed,
        licence=headers.get(LICENCE, ""),
        consent=headers.get(CONSENT, ""),
        metadata=body.metadata,
    )


def keep(captures: CaptureStore, terms: Captured, answer: OpenAiAnswer) -> None:
    """Capture what was sampled; what cannot be captured is told to the log, and spoils no answer."""
    choices = tuple(
        CapturedChoice(
            each.index,
            each.text,
            each.finish_reason,
            each.version_first,
            each.version_last,
            tuple(each.token_ids),
        )
        for each in answer.choices
    )
    captured = replace(
        terms,
        choices=choices,
        prompt_token_ids=tuple(answer.prompt_token_ids),
        model_hash=answer.model_hash,
        sampler=answer.sampler,
    )
    try:
        result = "kept" if captures.keep(captured) else "sampled out"
    except (SpoError, redis.RedisError) as error:
        result = "failed"
        log.warning("a completion could not be captured", completion=answer.id, reason=str(error)[:500])
    observability.CAPTURED.labels(result=result).inc()


class OpenAiModel(BaseModel):
    """A name that `model` of a request may be; what it stands for is `root`."""

    id: str
    object: str = "model"
    created: int
    owned_by: str
    root: str


class OpenAiModelList(BaseModel):
    object: str = "list"
    data: list[OpenAiModel]


@router.get("/models")
def list_openai_models(context: ContextDep, principal: PrincipalDep) -> OpenAiModelList:
    """The names that are served, then the jobs whose policies replicas have loaded."""
    named = [
        OpenAiModel(
            id=each.name,
            created=int(datetime.fromisoformat(each.at).timestamp()),
            owned_by=each.tenant or "operator",
            root=_root(each.target),
        )
        for each in context.served_models.all(principal.sees_tenant)
    ]
    loaded = sorted({each.run_id for each in context.replicas.live() if each.pool == "inference" and each.run_id})
    jobs = []
    for job_id in loaded:
        # Other tenants' jobs, and those that were deleted a moment ago, are not there.
        with contextlib.suppress(NotFound):
            jobs.append(get_openai_model(context, principal, job_id))
    return OpenAiModelList(data=[*named, *jobs])


@router.get("/models/{model}")
def get_openai_model(context: ContextDep, principal: PrincipalDep, model: str) -> OpenAiModel:
    """One model: a name, `job_...` or `job_...@VERSION`."""
    target = context.served_models.resolve(principal.tenant, model, of_anyone=principal.is_admin)
    owner = context.jobs.tenant(target.job_id) or "operator"
    created = context.jobs.record(target.job_id).created_unix_ms // 1000
    return OpenAiModel(id=model, created=created, owned_by=owner, root=_root(target))


@router.post("/chat/completions", response_class=JSONResponse, responses=WHOLE)
async def chat_completion(
    request: Request, context: ContextDep, principal: PrincipalDep, body: ChatRequest
) -> Response:
    """The model's next turn; the body is OpenAI's, and so is the answer."""
    return await ServedCompletion(context, principal, request, body).respond()


@router.post("/completions", response_class=JSONResponse, responses=WHOLE)
async def plain_completion(
    request: Request, context: ContextDep, principal: PrincipalDep, body: PlainRequest
) -> Response:
    """How the model goes on after a prompt, or after each of several; the body is OpenAI's, and so is the answer."""
    completions = [ServedCompletion(context, principal, request, each) for each in body.each]
    return await (completions[0].respond() if len(completions) == 1 else _together(completions))


# Of one request's prompts: more would take a tenant's places for lasting calls.
PROMPTS_AT_ONCE = 4
# What stands between must pass events on as they come.
NOT_KEPT = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ServedCompletion:
    """One request on its way through the pool. form: how the answer is written."""

    form: type[OpenAiAnswer] = OpenAiAnswer

    def __init__(
        self, context: AppContext, principal: Principal, request: Request, body: ChatRequest | PlainRequest
    ) -> None:
        self.context = context
        self.principal = principal
        self.request = request
        self.body = body
        self.capture: Captured | None = None
        # What shares prefixes with others; "": nothing known.
        self.near = ""

    async def begin(self) -> tuple[AsyncGenerator[ServeResponse, None], OpenAiAnswer]:
        """What will be sampled, once it is read, and the answer that it fills."""
        wanted, answer = await run_in_threadpool(self._begun)
        return self._sampled(wanted, answer), answer

    def _begun(self) -> tuple[ServeRequest, OpenAiAnswer]:
        target, version = self.target()
        wanted = self.body.to_serve(target.job_id, version)
        answer = self.answer_of(target)
        answer.continuous_usage = self.body.stream_options.continuous_usage_stats
        # A session keeps them whether or not its agent asks.
        answer.shows_logprobs = self.body.logprobs is not None and self.body.logprobs is not False
        wanted.request_id = answer.id
        self.prepare(wanted)
        return wanted, answer

    async def respond(self) -> Response:
        parts, answer = await self.begin()
        if not self.body.stream:
            return await self._whole(parts, answer)
        # What is wrong with the request is told by the status, so the first part is waited for.
        try:
            first = await self.while_caller_stays(_next(parts))
        except BaseException:
            await parts.aclose()
            raise
        return StreamingResponse(self._events(first, parts, answer), media_type=EVENT_STREAM, headers=NOT_KEPT)

    def answer_of(self, target: Target) -> OpenAiAnswer:
        """The answer before anything of it is there."""
        chat = isinstance(self.body, ChatRequest)
        return self.form(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{ULID()}",
            model=self.body.model,
            job_id=target.job_id,
            kind="chat" if chat else "plain",
            created=int(time.time()),
            choices=[Choice(index) for index in range(self.body.n)],
            most_calls=MOST_TOOLS if not isinstance(self.body, ChatRequest) or self.body.parallel_tool_calls else 1,
        )

    def prepare(self, wanted: ServeRequest) -> None:
        """Look at what is asked for before anything is sampled, and perhaps change it. Raises SpoError."""
        if asks_for_capture(self.principal, self.request.headers, self.body):
            self.capture = capture_terms(self.request.headers, self.principal, self.body, wanted)

    def keep(self, answer: OpenAiAnswer) -> None:
        """Store what was sampled, before its end is told."""
        if self.capture:
            keep(self.context.captures, self.capture, answer)

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Around the sampling."""
        yield

    def target(self) -> tuple[Target, int]:
        """What is asked for, and the weight version that it means now."""
        served, who = self.context.served_models, self.principal
        target = served.resolve(who.tenant, self.body.model, of_anyone=who.is_admin)
        if target.version is not None:
            return target, target.version
        announced = announced_version(self.context.jobs, target.job_id)
        return target, announced.version if announced else 0

    async def _sampled(self, wanted: ServeRequest, answer: OpenAiAnswer) -> AsyncGenerator[ServeResponse, None]:
        quota = self.context.serving_quota
        with quota.completion(self.principal.tenant), self.under_way():
            try:
                async with contextlib.aclosing(self.context.serving_pool.serve(wanted, self.near)) as parts:
                    async for response in parts:
                        answer.add(response)
                        if answer.is_whole:
                            await run_in_threadpool(self.keep, answer)
                        yield response
            finally:
                quota.spend(self.principal.tenant, answer.tokens)

    async def _whole(self, parts: AsyncGenerator[ServeResponse, None], answer: OpenAiAnswer) -> Response:
        try:
            await self.while_caller_stays(_drained(parts))
        finally:
            await parts.aclose()
        return JSONResponse(answer.document())

    async def while_caller_stays(self, sampled: Coroutine[Any, Any, Sampled]) -> Sampled:
        """What is waited for. Raises NotReady (code "caller_gone") once nobody waits: nothing is sampled on then."""
        sampling, leaving = asyncio.create_task(sampled), asyncio.create_task(self._caller_left())
        try:
            await asyncio.wait((sampling, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not sampling.done():
                raise NotReady("the caller has gone", code="caller_gone")
            return await sampling
        finally:
            for task in (sampling, leaving):
                task.cancel()
            await asyncio.gather(sampling, leaving, return_exceptions=True)

    async def _caller_left(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def _events(
        self, first: ServeResponse, parts: AsyncGenerator[ServeResponse, None], answer: OpenAiAnswer
    ) -> AsyncIterator[bytes]:
        try:
            yield answer.opening() + b"".join(map(answer.chunk, first.parts))
            async for response in parts:
                yield b"".join(map(answer.chunk, response.parts))
            yield answer.closing(include_usage=self.body.stream_options.include_usage)
        except SpoError as error:
            yield answer.failure(error)
        finally:
            await parts.aclose()


async def _together(completions: Sequence[ServedCompletion]) -> Response:
    """One answer with the choices of all prompts, in their order; a few are sampled at once."""
    begun = [await each.begin() for each in completions]
    places = asyncio.Semaphore(PROMPTS_AT_ONCE)

    async def sampled(parts: AsyncGenerator[ServeResponse, None]) -> None:
        async with places:
            await _drained(parts)

    async def all_sampled() -> None:
        async with asyncio.TaskGroup() as tasks:
            for parts, _ in begun:
                tasks.create_task(sampled(parts))

    try:
        await completions[0].while_caller_stays(all_sampled())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        for parts, _ in begun:
            await parts.aclose()
    answers = [answer for _, answer in begun]
    choices = [choice for answer in answers for choice in answer.choices]
    whole = replace(answers[0], choices=[replace(choice, index=index) for index, choice in enumerate(choices)])
    prompt, total = (
        sum(count) for count in zip(*((len(each.prompt_token_ids), each.tokens) for each in answers), strict=True)
    )
    usage = {"prompt_tokens": prompt, "completion_tokens": total - prompt, "total_tokens": total}
    return JSONResponse({**whole.document(), "usage": usage})


async def _drained(parts: AsyncGenerator[ServeResponse, None]) -> None:
    async for _ in parts:
        pass


async def _next(parts: AsyncGenerator[ServeResponse, None]) -> ServeResponse:
    return await anext(parts)


def _root(target: Target) -> str:
    return f"{target.job_id}@{'newest' if target.version is None else target.version}"
