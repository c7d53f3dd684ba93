"""/v1/chat/completions, /v1/completions and /v1/models, as OpenAI's clients know them, for the policies of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from datetime import datetime
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from ulid import ULID

from services.orchestrator.auth.principals import Principal
from services.orchestrator.container import AppContext
from services.orchestrator.http.api.openai.answers import Choice, OpenAiAnswer, event
from services.orchestrator.http.api.openai.captured import asks_for_capture, capture_terms, keep
from services.orchestrator.http.api.openai.requests import ChatRequest, PlainRequest
from services.orchestrator.http.dependencies import ContextDep, PrincipalDep
from services.orchestrator.http.openai_errors import error_document
from services.orchestrator.serving.capture import Captured
from services.orchestrator.serving.served_models import Target
from spo.errors import NotFound, NotReady, SpoError
from spo.v1.inference_service_pb2 import ServeRequest, ServeResponse

router = APIRouter(prefix="/v1", tags=["serving"])

EVENT_STREAM = "text/event-stream"
Sampled = TypeVar("Sampled")
_WHOLE: dict[int | str, dict[str, object]] = {200: {"content": {"application/json": {}, EVENT_STREAM: {}}}}


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


@router.post("/chat/completions", response_class=JSONResponse, responses=_WHOLE)
async def chat_completion(
    request: Request, context: ContextDep, principal: PrincipalDep, body: ChatRequest
) -> Response:
    """The model's next turn; the body is OpenAI's, and so is the answer."""
    return await _Completion(context, principal, request, body).respond()


@router.post("/completions", response_class=JSONResponse, responses=_WHOLE)
async def plain_completion(
    request: Request, context: ContextDep, principal: PrincipalDep, body: PlainRequest
) -> Response:
    """How the model goes on after a prompt; the body is OpenAI's, and so is the answer."""
    return await _Completion(context, principal, request, body).respond()


class _Completion:
    """One request on its way through the pool."""

    def __init__(
        self, context: AppContext, principal: Principal, request: Request, body: ChatRequest | PlainRequest
    ) -> None:
        self.context = context
        self.principal = principal
        self.request = request
        self.body = body
        self.capture: Captured | None = None

    async def respond(self) -> Response:
        target, version = await run_in_threadpool(self._target)
        wanted = self.body.to_serve(target.job_id, version)
        chat = isinstance(self.body, ChatRequest)
        answer = OpenAiAnswer(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{ULID()}",
            model=self.body.model,
            job_id=target.job_id,
            kind="chat" if chat else "plain",
            created=int(time.time()),
            choices=[Choice(index) for index in range(self.body.n)],
        )
        wanted.request_id = answer.id
        capturing = asks_for_capture(self.principal, self.request.headers, self.body)
        self.capture = capture_terms(self.request.headers, self.principal, self.body, wanted) if capturing else None
        parts = self._sampled(wanted, answer)
        if not self.body.stream:
            return await self._whole(parts, answer)
        # What is wrong with the request is told by the status, so the first part is waited for.
        try:
            first = await self._while_caller_stays(_next(parts))
        except BaseException:
            await parts.aclose()
            raise
        return StreamingResponse(self._events(first, parts, answer), media_type=EVENT_STREAM)

    def _target(self) -> tuple[Target, int]:
        """What is asked for, and the weight version that it means now."""
        served, who = self.context.served_models, self.principal
        target = served.resolve(who.tenant, self.body.model, of_anyone=who.is_admin)
        if target.version is not None:
            return target, target.version
        announced = self.context.weights.announced(target.job_id)
        return target, announced.version if announced else 0

    async def _sampled(self, wanted: ServeRequest, answer: OpenAiAnswer) -> AsyncGenerator[ServeResponse, None]:
        quota = self.context.serving_quota
        with quota.completion(self.principal.tenant):
            try:
                async with contextlib.aclosing(self.context.serving_pool.serve(wanted)) as parts:
                    async for response in parts:
                        answer.add(response)
                        yield response
            finally:
                quota.spend(self.principal.tenant, answer.tokens)
        if self.capture and answer.is_whole:
            await run_in_threadpool(keep, self.context.captures, self.capture, answer)

    async def _whole(self, parts: AsyncGenerator[ServeResponse, None], answer: OpenAiAnswer) -> Response:
        try:
            await self._while_caller_stays(_drained(parts))
        finally:
            await parts.aclose()
        return JSONResponse(answer.document())

    async def _while_caller_stays(self, sampled: Coroutine[Any, Any, Sampled]) -> Sampled:
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
            yield event(error_document(error, 500))
        finally:
            await parts.aclose()


async def _drained(parts: AsyncGenerator[ServeResponse, None]) -> None:
    async for _ in parts:
        pass


async def _next(parts: AsyncGenerator[ServeResponse, None]) -> ServeResponse:
    return await anext(parts)


def _root(target: Target) -> str:
    return f"{target.job_id}@{'newest' if target.version is None else target.version}"
