"""Pages on agents' episodes: those of a job, and one with its tree of calls, its times and its reward."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from services.orchestrator.agents import AgentSession, CallNode, trained_leaves
from services.orchestrator.commit import now_ms
from services.orchestrator.container import ContextDep, JobId, SessionId
from services.orchestrator.http.errors import show
from services.orchestrator.http.jobs import job_document
from spo import redis_keys
from spo.errors import NotFound

router = APIRouter(prefix="/jobs/{job_id}/episodes")

PAGE_LENGTH = 50
# Of an episode's calls and of each text; the tree over REST has all of both.
MOST_CALLS = 300
MOST_CHARACTERS = 10_000
MOST_IDS = 2000
# Branches of branches of branches are indented no further: a telephone is narrow.
DEEPEST = 3


@dataclass(frozen=True)
class Times:
    """Where an episode's seconds went.

    waiting: of all calls, until the first of their answers came: for a replica, and while it read the prompt.
    sampling: of all calls, from there to their ends. agent: while no call was under way: in the agent's program and
    its tools. Calls that were under way together count one by one.
    """

    waiting: float
    sampling: float
    agent: float


@dataclass(frozen=True)
class ShownText:
    """A text as far as it is shown, and how many characters are left out."""

    text: str
    left_out: int


@dataclass(frozen=True)
class AskedTool:
    """A call of a tool that the policy has asked for."""

    name: str
    arguments: ShownText


@dataclass(frozen=True)
class ShownTurn:
    """A message that a call reads, such as what a tool has answered."""

    role: str
    content: ShownText
    asked: Sequence[AskedTool]


@dataclass(frozen=True)
class ShownCall:
    """A call in its place. depth: how many times its branch has left another.

    before: seconds in the agent since the call that it goes on from; None: of a root. is_trained: whether the episode
    is learned from with it, once it has a reward.
    """

    node: CallNode
    depth: int
    turns: Sequence[ShownTurn]
    text: ShownText
    asked: Sequence[AskedTool]
    before: float | None
    waiting: float
    sampling: float
    is_trained: bool

    @property
    def read_ids(self) -> str:
        return _ids(self.node.read)

    @property
    def sampled_ids(self) -> str:
        return _ids(self.node.sampled)


@router.get("")
def show_episodes(
    request: Request, context: ContextDep, job_id: JobId, skip: Annotated[int, Query(ge=0, le=10**6)] = 0
) -> Response:
    """The sessions of a job's agents, newest first."""
    job = job_document(context, job_id)
    sessions = context.agent_sessions.of_job(job_id, PAGE_LENGTH + 1, skip)
    rows = [
        {"session": each, "state": _state(each, seen), **seen}
        for each in sessions[:PAGE_LENGTH]
        for seen in [context.agent_sessions.seen(each)]
    ]
    facts = {
        "job": job,
        "rows": rows,
        "skip": skip,
        "older": urlencode({"skip": skip + PAGE_LENGTH}) if len(sessions) > PAGE_LENGTH else "",
    }
    return show(request, "episodes/list.html", tab="episodes", **facts)


@router.get("/{session_id}")
def show_episode(request: Request, context: ContextDep, job_id: JobId, session_id: SessionId) -> Response:
    """One episode: its calls as a tree, what each read and answered, where the time went, and its reward."""
    job = job_document(context, job_id)
    session = context.agent_sessions.get(session_id)
    if session.job_id != job_id:
        raise NotFound(f"job {job_id} has no session {session_id}", code="session_not_found")
    nodes = context.agent_sessions.tree(session).nodes(MOST_CALLS)
    counts = context.agent_sessions.counts(session)
    seen = context.agent_sessions.seen(session)
    ended = int(counts.get("ended", 0))
    until = ended or min(now_ms(), session.deadline_unix_ms)
    facts = {
        "job": job,
        "session": session,
        "state": _state(session, seen),
        "outcome": seen["outcome"],
        "used": seen,
        "ended_unix_ms": ended,
        "times": times_of(session.created_unix_ms, until, nodes),
        "calls": list(shown_calls(session, nodes)),
        "left_out": max(0, int(counts.get("calls", 0)) - len(nodes)),
        "sampled": sum(len(node.sampled) for node in nodes),
        "trajectory_id": _trajectory_id(session, nodes, seen["outcome"]),
    }
    return show(request, "episodes/episode.html", tab="episodes", **facts)


def _state(session: AgentSession, seen: Mapping[str, object]) -> str:
    """Why it is closed, or that it is open still, or that its time is over."""
    if seen["closed"]:
        return str(seen["closed"])
    return "open" if now_ms() <= session.deadline_unix_ms else "its time is over"


def times_of(created_unix_ms: int, ended_unix_ms: int, nodes: Sequence[CallNode]) -> Times:
    """Add up where the time between the two went; a call that nobody timed counts for nothing."""
    waiting = sampling = busy = 0
    until = created_unix_ms
    for node in sorted(nodes, key=_began):
        waiting += _first(node) - _began(node)
        sampling += node.at_unix_ms - _first(node)
        busy += max(0, node.at_unix_ms - max(_began(node), until))
        until = max(until, node.at_unix_ms)
    agent = max(ended_unix_ms, until) - created_unix_ms - busy
    return Times(waiting / 1000, sampling / 1000, max(0, agent) / 1000)


def in_branches(nodes: Sequence[CallNode]) -> Iterator[tuple[CallNode, int]]:
    """Each call after the one it goes on from, branch by branch, with how many branches it is away from its root."""
    children: dict[int | None, list[CallNode]] = defaultdict(list)
    for node in nodes:
        children[node.parent].append(node)
    waiting = [(node, 0) for node in reversed(children[None])]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        later = [(each, depth + 1) for each in children[node.number][1:]]
        waiting += [*reversed(later), *((each, depth) for each in children[node.number][:1])]


def shown_calls(session: AgentSession, nodes: Sequence[CallNode]) -> Iterator[ShownCall]:
    """The calls as the page has them, in branches."""
    known = {node.number: node for node in nodes}
    trained = _trained(session, nodes)
    for node, depth in in_branches(nodes):
        parent = known.get(node.parent) if node.parent is not None else None
        yield ShownCall(
            node=node,
            depth=min(depth, DEEPEST),
            turns=[_turn(turn) for turn in node.messages],
            text=_shown(node.text),
            asked=_asked(node.calls),
            before=max(0, _began(node) - parent.at_unix_ms) / 1000 if parent else None,
            waiting=(_first(node) - _began(node)) / 1000,
            sampling=(node.at_unix_ms - _first(node)) / 1000,
            is_trained=node.number in trained,
        )


def _trained(session: AgentSession, nodes: Sequence[CallNode]) -> set[int]:
    """Numbers of the calls that the episode is learned from with; none of a session that is no sample of a job."""
    if not session.group_id or not nodes:
        return set()
    known = {node.number: node for node in nodes}
    found: set[int] = set()
    for leaf in _ends(session, nodes):
        number: int | None = leaf.number
        while number is not None and number not in found:
            found.add(number)
            number = known[number].parent
    return found


def _ends(session: AgentSession, nodes: Sequence[CallNode]) -> Sequence[CallNode]:
    return trained_leaves(nodes) if session.max_episode_tokens is not None else nodes[-1:]


def _trajectory_id(session: AgentSession, nodes: Sequence[CallNode], outcome: object) -> str:
    """What the episode became; "" where it became none: no call, no reward, or no sample of a group."""
    if not session.group_id or not nodes or not isinstance(outcome, dict):
        return ""
    if outcome.get("status") not in ("finished", "cut"):
        return ""
    known = {node.number: node for node in nodes}
    root = _ends(session, nodes)[0]
    while root.parent is not None:
        root = known[root.parent]
    return redis_keys.trajectory_id(
        session.job_id, session.group_id, session.sample, session.attempt, root.version_first
    )


def _turn(turn: Mapping[str, object]) -> ShownTurn:
    calls = turn.get("tool_calls")
    asked = _asked(calls) if isinstance(calls, list) else []
    return ShownTurn(str(turn.get("role", "")), _shown(str(turn.get("content") or "")), asked)


def _asked(calls: Iterable[Mapping[str, Any]]) -> list[AskedTool]:
    functions = [call["function"] for call in calls]
    return [
        AskedTool(str(each["name"])[:200], _shown(json.dumps(each["arguments"], indent=2, ensure_ascii=False)))
        for each in functions
    ]


def _shown(text: str) -> ShownText:
    return ShownText(text[:MOST_CHARACTERS], max(0, len(text) - MOST_CHARACTERS))


def _ids(token_ids: Sequence[int]) -> str:
    more = f" … and {len(token_ids) - MOST_IDS} more" if len(token_ids) > MOST_IDS else ""
    return " ".join(map(str, token_ids[:MOST_IDS])) + more


def _began(node: CallNode) -> int:
    return node.began_unix_ms or node.at_unix_ms


def _first(node: CallNode) -> int:
    """When the first of the answer came, within the call whatever the clock did meanwhile."""
    return min(max(node.first_unix_ms or node.at_unix_ms, _began(node)), max(node.at_unix_ms, _began(node)))
