"""Sessions of agents over REST: opened by whoever runs the agent, called by the agent in its own API's words."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from typing import Annotated, Any, cast

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from services.orchestrator.agent_episodes import Leased
from services.orchestrator.agents import AgentSession, CallNode, Continuation, SessionSecrets, Standing, Turn, note_call
from services.orchestrator.auth import Principal
from services.orchestrator.commit import now_ms
from services.orchestrator.container import AppContext, ContextDep, Limit, PrincipalDep, SessionId, require_own_job
from services.orchestrator.http.dialects import MessagesRequest, ResponsesRequest, answered
from services.orchestrator.http.openai import (
    EVENT_STREAM,
    WHOLE,
    OpenAiAnswer,
    OpenAiModel,
    OpenAiModelList,
    ServedCompletion,
)
from services.orchestrator.http.openai_requests import ChatMessage, ChatRequest, conversation, refused
from services.orchestrator.job_records import tenants_of
from services.orchestrator.serving import Target
from spo import api
from spo.errors import InvalidInput, NotFound, NotReady, ResourceExhausted
from spo.spec.section import LOWEST_TEMPERATURE, JobState
from spo.v1.inference_service_pb2 import ServedPart, ServeRequest

router = APIRouter(prefix="/v1/agents", tags=["agents"])
calls_router = APIRouter(prefix="/s/{session_id}/v1", tags=["agents"])

# A session's own path may carry its key, for programs that overwrite keys.
SessionPath = Annotated[str, Path(pattern=r"^ses_[0-9A-HJKMNP-TV-Z]{26}(\.[A-Za-z0-9_-]{1,100})?$")]

# The last session of the part before.
SessionCursor = Annotated[str | None, Query(pattern=r"^ses_[0-9A-HJKMNP-TV-Z]{26}$")]

MOST_AT_ONCE = 8
LOOK_SECONDS = 0.2
_AT_ONCE: Counter[str] = Counter()
# Of whoever calls: labels of its own, kept in the trace.
LABELS = ("session-id", "thread-id", "x-session-id", "x-claude-code-session-id")


@router.post("/sessions", status_code=201)
def open_session(
    context: ContextDep, principal: PrincipalDep, request: Request, body: api.SessionRequest
) -> api.SessionGrant:
    """Open a session of a job's policy: a URL and a key for one episode of an agent."""
    require_own_job(context, principal, body.job)
    if 0 < body.temperature < LOWEST_TEMPERATURE:
        raise refused("/temperature", f"0, or at least {LOWEST_TEMPERATURE:g}")
    target = Target(body.job, body.version)
    context.served_models.require("" if principal.is_admin else principal.tenant, target)
    if not principal.is_admin:
        context.agent_sessions.require_place(principal.tenant)
    made = now_ms()
    session = AgentSession(
        id="",
        job_id=body.job,
        tenant=context.jobs.tenant(body.job) or "",
        key_digest="",
        token_digest="",
        created_unix_ms=made,
        deadline_unix_ms=made + body.max_seconds * 1000,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=secrets.randbits(61),
        version=body.version,
        max_calls=body.max_calls,
        max_tokens=body.max_tokens,
        reasoning=body.reasoning,
        problem_id=body.problem,
    )
    return grant_of(request, *context.agent_sessions.open(session))


def grant_of(request: Request, session: AgentSession, opened: SessionSecrets) -> api.SessionGrant:
    """What the runner of an episode is told."""
    return api.SessionGrant(
        id=session.id,
        job_id=session.job_id,
        base_url=f"{str(request.base_url).rstrip('/')}{session.path}/v1",
        key=opened.key,
        token=opened.token,
        model="policy",
        deadline_unix_ms=session.deadline_unix_ms,
    )


@router.get("/sessions")
def list_sessions(
    context: ContextDep, principal: PrincipalDep, job: str, limit: Limit = 100, cursor: SessionCursor = None
) -> api.SessionPage:
    """The sessions of a job, those that end last first."""
    require_own_job(context, principal, job)
    found = context.agent_sessions.of_job(job, limit, after=cursor)
    items = [api.SessionView.model_validate({**asdict(session), **seen}) for session, seen in found]
    return api.SessionPage(items=items, next_cursor=items[-1].id if len(items) == limit else None)


@router.get("/sessions/{session_id}")
def get_session(context: ContextDep, principal: PrincipalDep, session_id: SessionId) -> api.SessionView:
    """A session, what it has used, and its outcome."""
    return _view(context, _own(context, principal, session_id))


@router.get("/sessions/{session_id}/tree")
def get_session_tree(context: ContextDep, principal: PrincipalDep, session_id: SessionId) -> api.SessionTreeView:
    """All calls of a session: messages, tokens, versions, and where its history was broken and why."""
    session = _own(context, principal, session_id)
    nodes = context.agent_sessions.tree(session).nodes()
    calls = [api.SessionCall.model_validate(vars(node)) for node in nodes]
    return api.SessionTreeView(session=_view(context, session), calls=calls)


@router.post("/sessions/{session_id}/outcome")
def end_session(
    context: ContextDep, principal: PrincipalDep, session_id: SessionId, body: api.EpisodeOutcome
) -> api.SessionView:
    """End an episode with its reward; the same outcome again changes nothing."""
    session, outcome = _ended(context, principal, session_id, body)
    context.agent_sessions.close(session, outcome, body.status)
    return _view(context, session)


def _ended(
    context: AppContext, principal: Principal, session_id: str, body: api.EpisodeOutcome
) -> tuple[AgentSession, dict[str, object]]:
    """The session and what is said of its end. Raises InvalidInput for a reward of what cannot have one."""
    session = _own(context, principal, session_id)
    context.agent_sessions.require_token(session, body.token)
    if body.reward is not None and body.status == "failed":
        raise refused("/reward", "what failed has no reward")
    if body.status != "failed" and not int(context.agent_sessions.counts(session)["calls"]):
        raise refused("/status", "the session has made no call: it has failed")
    return session, body.model_dump(mode="json", exclude={"token"})


def _own(context: AppContext, principal: Principal, session_id: str) -> AgentSession:
    """Raises NotFound for another tenant's session as for one that never was."""
    session = context.agent_sessions.get(session_id)
    if principal.sees_tenant not in (None, session.tenant):
        raise NotFound(f"there is no session {session_id}", code="session_not_found")
    return session


def _view(context: AppContext, session: AgentSession) -> api.SessionView:
    return api.SessionView.model_validate({**asdict(session), **context.agent_sessions.seen(session)})


@router.post("/leases")
async def lease_episodes(
    context: ContextDep, principal: PrincipalDep, request: Request, body: api.LeaseRequest
) -> api.LeaseList:
    """Episodes that wait for a runner, as soon as there are some; each is this runner's until its lease runs out."""
    until = time.monotonic() + body.wait_seconds
    while True:
        leased = await run_in_threadpool(_leased, context, principal, body)
        if leased or time.monotonic() >= until or context.stop.is_set():
            break
        await asyncio.sleep(min(LOOK_SECONDS, max(0.0, until - time.monotonic())))
    return api.LeaseList(items=[_lease_view(request, each) for each in leased])


def _leased(context: AppContext, principal: Principal, body: api.LeaseRequest) -> list[Leased]:
    running = context.jobs.in_states((JobState.RUNNING,))
    tenants = tenants_of(context.redis, running)
    own = [each for each in running if principal.sees_tenant in (None, tenants[each])]
    return context.agent_episodes.lease(own, body.pool, body.most)


def _lease_view(request: Request, leased: Leased) -> api.EpisodeLease:
    return api.EpisodeLease(
        lease_id=leased.session.id,
        fence=leased.episode.attempt,
        lease_until_unix_ms=leased.episode.lease_until_unix_ms,
        harness=leased.harness.name,
        arguments=dict(leased.harness.arguments),
        problem_id=leased.session.problem_id,
        statement=leased.statement,
        seed=leased.seed,
        reward=leased.harness.reward,
        session=grant_of(request, leased.session, leased.opened),
    )


@router.post("/leases/{session_id}/renew")
def renew_lease(
    context: ContextDep, principal: PrincipalDep, session_id: SessionId, body: api.LeaseToken
) -> api.RenewedLease:
    """Hold an episode for longer. 412 `lease_lost`: it is another runner's, or its job has ended: stop the agent."""
    session = _own(context, principal, session_id)
    context.agent_sessions.require_token(session, body.token)
    renewed = context.agent_episodes.renew(session)
    counts = context.agent_sessions.counts(session)
    calls = int(counts["calls"]) + int(counts.get("unserved", 0))
    return api.RenewedLease(lease_until_unix_ms=renewed.lease_until_unix_ms, calls=calls)


@router.post("/leases/{session_id}/outcome")
def end_episode(
    context: ContextDep, principal: PrincipalDep, session_id: SessionId, body: api.EpisodeOutcome
) -> api.SessionView:
    """End an episode with its reward; one that failed is begun anew. The same outcome again changes nothing."""
    session, outcome = _ended(context, principal, session_id, body)
    context.agent_episodes.end(session, outcome)
    return _view(context, session)


@router.post("/leases/{session_id}/give-back")
def give_episode_back(
    context: ContextDep, principal: PrincipalDep, session_id: SessionId, body: api.LeaseToken
) -> api.SessionView:
    """Give an episode back that is not at fault: another runner gets it."""
    session = _own(context, principal, session_id)
    context.agent_sessions.require_token(session, body.token)
    context.agent_episodes.give_up(session)
    return _view(context, session)


@calls_router.get("/models")
def list_session_models(request: Request, session_id: SessionPath) -> OpenAiModelList:
    """The one model of the session."""
    session, _ = standing_of(request)
    model = OpenAiModel(
        id="policy", created=session.created_unix_ms // 1000, owned_by=session.tenant or "operator", root=session.job_id
    )
    return OpenAiModelList(data=[model])


@calls_router.post("/chat/completions", response_class=JSONResponse, responses=WHOLE)
async def session_chat_completion(
    request: Request, context: ContextDep, principal: PrincipalDep, session_id: SessionPath, body: ChatRequest
) -> Response:
    """The policy's next turn in a session; any `model` means the session's policy."""
    return await EpisodeCompletion(context, principal, request, body).respond()


@calls_router.post("/responses", response_class=JSONResponse, responses=WHOLE)
async def session_response(
    request: Request, context: ContextDep, principal: PrincipalDep, session_id: SessionPath, body: ResponsesRequest
) -> Response:
    """The same, as OpenAI's Responses API has it."""
    return await answered(EpisodeCompletion(context, principal, request, body.chat()), body)


@calls_router.post("/messages", response_class=JSONResponse, responses=WHOLE)
async def session_message(
    request: Request, context: ContextDep, principal: PrincipalDep, session_id: SessionPath, body: MessagesRequest
) -> Response:
    """The same, as Anthropic's Messages API has it."""
    return await answered(EpisodeCompletion(context, principal, request, body.chat()), body)


def standing_of(request: Request) -> Standing:
    """The session that a path of its own names, and its counts: as they were read when the caller showed its key."""
    found: Standing = request.state.agent_session
    return found


class EpisodeCompletion(ServedCompletion):
    """A call of a session: the tokens that it has been answered are fed again as they are."""

    def __init__(
        self,
        context: AppContext,
        principal: Principal,
        request: Request,
        body: ChatRequest,
    ) -> None:
        super().__init__(context, principal, request, body)
        self.chat = body
        self.session, self.counts = standing_of(request)
        self.tree = context.agent_sessions.tree(self.session)
        self.turns = body.shown
        # The samples of a group have their first prompt in common.
        self.near = self.session.group_id or self.session.id
        self.continued = Continuation(None, 0, (), "")
        # Whether the template is to write all of the prompt, as it does for whoever knows texts alone.
        self.anew = False
        said = body.model_dump_json(exclude={"stream", "stream_options"})
        self.began_unix_ms = now_ms()
        self.body_digest = sha256(said.encode()).hexdigest()

    async def respond(self) -> Response:
        """The answer; a request that is tried again gets the one that it got."""
        if self.chat.n > 1:
            raise refused("/n", "a session samples one answer a call")
        if self._tries_again() and (node := await run_in_threadpool(self.tree.retried, self.body_digest)):
            return self._again(node)
        self.context.agent_sessions.require_room(self.session, self.counts)
        try:
            return await super().respond()
        except NotReady as error:
            if error.code != "caller_gone":
                await run_in_threadpool(self.tree.note_unserved)
            raise

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count it among the session's. Raises ResourceExhausted (code "rate_limited")."""
        if _AT_ONCE[self.session.id] >= MOST_AT_ONCE:
            raise ResourceExhausted(f"{MOST_AT_ONCE} calls of the session are under way", code="rate_limited")
        _AT_ONCE[self.session.id] += 1
        try:
            yield
        finally:
            _AT_ONCE[self.session.id] -= 1
            if not _AT_ONCE[self.session.id]:
                del _AT_ONCE[self.session.id]

    def target(self) -> tuple[Target, int]:
        """The session's job, whose newest version is asked for unless the session has one of its own."""
        shown = [] if self.chat.tool_choice == "none" else [tool.document for tool in self.chat.tools]
        # Read together: what the call goes on from, and the newest version.
        self.continued = self.tree.find(self.turns, shown)
        asked = any(turn["role"] == "user" for turn in self.turns[self.continued.turns :])
        self.anew = asked and self.session.reasoning == "as_template" and self.continued.number is not None
        own = self.session.version
        return Target(self.session.job_id, own), self.continued.version if own is None else own

    def prepare(self, wanted: ServeRequest) -> None:
        """The tokens that the messages go on from; how it is sampled is the session's, not its agent's."""
        session = self.session
        wanted.temperature, wanted.top_p = session.temperature, session.top_p
        wanted.frequency_penalty = wanted.presence_penalty = 0.0
        wanted.ignore_eos = False
        wanted.seed = (session.seed + 1_000_003 * int(self.counts["calls"])) % 2**62
        wanted.logprobs = True
        wanted.loaded_version = session.version is None
        goes_on = Continuation(None, 0, (), "") if self.anew else self.continued
        wanted.context_token_ids.extend(goes_on.token_ids)
        wanted.context_turns = goes_on.turns
        if session.max_response_tokens is not None:
            begins = session.max_prompt_tokens or 0 if goes_on.number is None else goes_on.begins
            wanted.path_tokens = begins + session.max_response_tokens
            if (room := self.tree.room(goes_on, self.counts)) is not None:
                wanted.path_tokens = min(wanted.path_tokens, room)
            # A prompt that is shorter than it may be leaves the answer no more room.
            wanted.max_tokens = min(wanted.max_tokens or session.max_response_tokens, session.max_response_tokens)

    def keep(self, answer: OpenAiAnswer) -> None:
        """Store the call, before its end is told."""
        (choice,), found = answer.choices, self.continued
        prompt, known = tuple(answer.prompt_token_ids), found.token_ids
        extends = prompt[: len(known)] == known
        broken = "reasoning_dropped" if self.anew else "template_rewrites"
        parent, reason = (found.number, found.reason) if extends else (None, broken)
        most = self.session.max_prompt_tokens
        if parent is None and most is not None and len(prompt) > most:
            message = f"the agent's first prompt has {len(prompt)} tokens, more than model.max_prompt_tokens {most}"
            raise InvalidInput(message, code="prompt_too_long")
        (answered,) = conversation([ChatMessage.model_validate({"role": "assistant", "tool_calls": choice.calls})])
        chat = self.context.agent_sessions.chat_format(self.session.job_id)
        stored = CallNode(
            number=0,
            parent=parent,
            state=found.state,
            messages=tuple(self.turns[0 if parent is None else found.turns :]),
            text=choice.text,
            calls=tuple(cast("list[Turn]", answered.get("tool_calls", []))),
            finish_reason=choice.finish_reason,
            version_first=choice.version_first,
            version_last=choice.version_last,
            prompt_tokens=len(prompt),
            cached_tokens=len(known) if extends else 0,
            sampler=answer.sampler,
            model_hash=answer.model_hash,
            at_unix_ms=now_ms(),
            began_unix_ms=self.began_unix_ms,
            first_unix_ms=answer.first_unix_ms,
            reason=reason,
            constrained=answer.constrained,
            label=next((self.request.headers[name][:200] for name in LABELS if name in self.request.headers), ""),
            model=self.chat.model[:200],
            reasoning_characters=chat.reasoning_length(choice.text),
            read=prompt[len(known) :] if extends else prompt,
            sampled=tuple(choice.token_ids),
            logprobs=tuple(token.logprob for token in choice.tokens),
        )
        self.tree.append(stored, self.body_digest, () if parent is None else found.above)
        note_call(self.form.dialect, stored, 0 if extends else len(known))

    def _tries_again(self) -> bool:
        headers: Mapping[str, str] = self.request.headers
        return headers.get("x-stainless-retry-count", "0") != "0" or "idempotency-key" in headers

    def _again(self, node: CallNode) -> Response:
        answer = self.answer_of(Target(self.session.job_id, self.session.version))
        answer.prompt_token_ids = (0,) * node.prompt_tokens
        (choice,) = answer.choices
        choice.texts, choice.token_ids = [node.text], list(node.sampled)
        choice.finish_reason, choice.calls = node.finish_reason, [_as_sent(call) for call in node.calls]
        choice.version_first, choice.version_last = node.version_first, node.version_last
        if not self.body.stream:
            return JSONResponse(answer.document())
        part = ServedPart(index=0, text=node.text, finish_reason=node.finish_reason)
        closing = answer.closing(include_usage=self.body.stream_options.include_usage)
        return StreamingResponse(iter([answer.opening(), answer.chunk(part), closing]), media_type=EVENT_STREAM)


def _as_sent(call: Mapping[str, Any]) -> dict[str, object]:
    function = call["function"]
    return {**call, "function": {"name": function["name"], "arguments": json.dumps(function["arguments"])}}
