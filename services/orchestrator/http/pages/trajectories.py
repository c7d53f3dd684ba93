"""Pages on trajectories, prompts and agents' episodes: every hop, tokens by advantage, tests one by one; an episode's
tree of calls, its times and its reward.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from services.orchestrator.agents import AgentSession, CallNode, trained_leaves
from services.orchestrator.commit import now_ms
from services.orchestrator.container import (
    AppContext,
    ContextDep,
    JobId,
    PolicyVersion,
    PromptId,
    SessionId,
    TrajectoryId,
    lasting,
)
from services.orchestrator.http.errors import is_part, show
from services.orchestrator.http.jobs import job_document
from services.orchestrator.http.training import (
    REPLAY_SECONDS,
    TrajectoryFilter,
    prompt_document,
    prompt_page,
    stored_trajectory,
    trajectory_detail,
    trajectory_page,
    valued_tokens,
)
from services.orchestrator.scoring import upload_tests
from services.orchestrator.versions import published_versions
from spo import api, redis_keys
from spo.algorithm.values import PivotalToken, pivotal_tokens
from spo.errors import NotFound, SpoError
from spo.model.chat import action_mask
from spo.rpc.client import judge
from spo.spec.job_spec import JobSpec, SourceName
from spo.spec.reward import qhat_0
from spo.spec.section import wire_name
from spo.tasks.answer import answer_in
from spo.tasks.load import MOST_PROBED, learnability
from spo.tasks.problem import Problem, program_of
from spo.tasks.verifier import deciders, pool_of
from spo.v1.judge_service_pb2 import PRIORITY_EVALUATION, JudgeRequest
from spo.v1.replay_service_pb2 import ListTrajectoriesRequest, ListTrajectoriesResponse
from spo.v1.trajectory_pb2 import Annotation, Trajectory
from spo.v1.value_pb2 import PromptValue
from spo.v1.verdict_pb2 import Outcome

STEPS = 4

router = APIRouter(prefix="/jobs/{job_id}/trajectories")

PAGE_LENGTH = 25
CHUNK = 200
# A filter that matches next to nothing reads so many chunks before the page offers to go on.
MAX_CHUNKS = 10
OUTCOMES = [name.removeprefix("OUTCOME_").lower() for name in Outcome.keys()[1:]]

prompts_router = APIRouter(prefix="/jobs/{job_id}/prompts")

PROMPTS_ON_A_PAGE = 50
# Pivotal tokens are searched in a few correct trajectories of pi0 and people only.
SEARCHED = 200
SHOWN_TURNS = 30

episodes_router = APIRouter(prefix="/jobs/{job_id}/episodes")

EPISODES_ON_A_PAGE = 50
# Of an episode's calls and of each text; the tree over REST has all of both.
MOST_CALLS = 300
MOST_CHARACTERS = 10_000
MOST_IDS = 2000
# Branches of branches of branches are indented no further: a telephone is narrow.
DEEPEST = 3


@dataclass(frozen=True)
class ColouredToken:
    """shade is from -4 (the most harmful token of this response) to 4 (the most helpful one).

    is_said: an environment wrote it, so that it is neither.
    """

    text: str
    q: float
    advantage: float
    shade: int
    pivotal: PivotalToken | None
    is_said: bool


def coloured(values: api.TokenValues, trajectory: Trajectory, threshold: float | None) -> list[ColouredToken]:
    """Each token with its shade, relative to the largest advantage in this response; threshold None: none is pivotal.

    values are of this trajectory.
    """
    largest = max((abs(advantage) for advantage in values.advantages), default=0.0)
    found = pivotal_of(trajectory.annotations, threshold) if threshold is not None else ()
    pivotal = {token.index: token for token in found}
    trained = action_mask(trajectory.segments, len(values.tokens))
    return [
        ColouredToken(
            text,
            q,
            advantage,
            round(STEPS * advantage / largest) if largest else 0,
            pivotal.get(index),
            is_said=not trained[index],
        )
        for index, (text, q, advantage) in enumerate(zip(values.tokens, values.q, values.advantages, strict=True))
    ]


def pivotal_of(annotations: Iterable[Annotation], threshold: float) -> tuple[PivotalToken, ...]:
    """The tokens that moved pi0's success rate by more than the threshold, from the rollouts of their prefixes."""
    rates = {prefix.position: prefix.successes / prefix.rollouts for prefix in annotations if prefix.rollouts}
    return pivotal_tokens(rates, threshold=threshold)


class TrajectoriesForm(BaseModel):
    """What the list is filtered by; empty fields ask nothing."""

    prompt_id: str = Field("", pattern=r"^[0-9a-f]{0,128}$")
    source: str = Field("", pattern=f"^({'|'.join(get_args(SourceName))})?$")
    verdict: str = Field("", pattern=f"^({'|'.join(OUTCOMES)})?$")
    policy_version: str = Field("", pattern=r"^[0-9]{0,15}$")
    live: str = Field("", pattern="^1?$")
    cursor: str = Field("", pattern=r"^[0-9]{0,16}$")

    @property
    def filter(self) -> TrajectoryFilter:
        version = int(self.policy_version) if self.policy_version else None
        return TrajectoryFilter(self.prompt_id, self.source, self.verdict, version)


@router.get("")
def show_trajectories(
    request: Request, context: ContextDep, job_id: JobId, query: Annotated[TrajectoriesForm, Query()]
) -> Response:
    """Trajectories, newest first, by prompt, source, verdict and weights."""
    found, after = _page(context, job_id, query.filter, query.cursor)
    chosen = query.model_dump(exclude={"cursor"})
    kept = {name: value for name, value in chosen.items() if value}
    facts = {
        "job": job_document(context, job_id),
        "trajectories": found,
        "chosen": chosen,
        "cursor": query.cursor,
        "older": urlencode({**kept, "cursor": after}) if after else "",
        "newest": urlencode(kept),
        "sources": get_args(SourceName),
        "outcomes": OUTCOMES,
    }
    if is_part(request):
        return show(request, "trajectories/table.html", **facts)
    return show(request, "trajectories/list.html", tab="trajectories", **facts)


def _page(context: AppContext, job_id: str, wanted: TrajectoryFilter, cursor: str) -> tuple[list[api.Trajectory], str]:
    """A page of those wanted, read in bounded chunks, and the cursor of the next page ("" at the end)."""
    found: list[api.Trajectory] = []
    chunk = PAGE_LENGTH if not wanted.verdict and wanted.policy_version is None else CHUNK
    for _ in range(MAX_CHUNKS):
        page = trajectory_page(context, job_id, wanted, limit=chunk, cursor=cursor)
        found += page.items
        cursor = page.next_cursor or ""
        if not cursor or len(found) >= PAGE_LENGTH:
            break
    return found, cursor


@router.get("/{trajectory_id}")
def show_trajectory(request: Request, context: ContextDep, job_id: JobId, trajectory_id: TrajectoryId) -> Response:
    """One trajectory; its tokens and tests come as parts of their own, since they have to be computed."""
    job = job_document(context, job_id)
    reply = stored_trajectory(context, job_id, trajectory_id)
    problem = _known_problem(context, job_id, reply.trajectory.prompt_id)
    facts = {
        "job": job,
        "trajectory": trajectory_detail(reply),
        "verdict": reply.trajectory.verdict,
        "parents": list(reply.trajectory.parents),
        "prompt": problem.statement if problem else "",
        "decided_by": deciders(problem.tests) if problem else "",
        "hops": _hops(reply.trajectory),
        "versions": [published["version"] for published in published_versions(context.jobs, job_id)][::-1],
    }
    return show(request, "trajectories/trajectory.html", tab="trajectories", **facts)


@router.get("/{trajectory_id}/tokens")
@lasting
def show_tokens(
    request: Request,
    context: ContextDep,
    job_id: JobId,
    trajectory_id: TrajectoryId,
    policy_version: PolicyVersion = None,
) -> Response:
    """The response token by token, coloured by advantage."""
    values = valued_tokens(context, job_id, trajectory_id, policy_version)
    value = context.jobs.spec(job_id).value
    threshold = value.pivotal.threshold if value and value.pivotal else None
    trajectory = stored_trajectory(context, job_id, trajectory_id).trajectory
    return show(request, "trajectories/tokens.html", values=values, tokens=coloured(values, trajectory, threshold))


@router.get("/{trajectory_id}/tests")
@lasting
def show_tests(request: Request, context: ContextDep, job_id: JobId, trajectory_id: TrajectoryId) -> Response:
    """The program judged once more, each test by itself; hidden ones are hidden from the policy, not from people."""
    found = stored_trajectory(context, job_id, trajectory_id).trajectory
    problem = _problem(context, job_id, found.prompt_id)
    if problem is None:
        raise NotFound(f"job {job_id} has no prompt {found.prompt_id}", code="prompt_not_found")
    upload_tests(context.judges, [problem])
    judge_request = JudgeRequest(
        programs=[program_of(found, problem.response_format, problem.language)],
        language=problem.language,
        tests_digest=problem.tests_digest,
        priority=PRIORITY_EVALUATION,
        want_details=True,
        run_id=job_id,
    )
    verdict = judge(context.judges.of(pool_of(problem.tests)), judge_request).verdicts[0]
    answer = answer_in(problem.tests.answer, judge_request.programs[0]) if problem.tests.HasField("answer") else None
    rows: list[dict[str, object]] = [
        {
            "outcome": wire_name(Outcome, result.outcome),
            "result": result,
            "public": test.public,
            "stdin": test.stdin.decode(errors="replace"),
            "expected": test.stdout.decode(errors="replace"),
        }
        for result, test in zip(verdict.tests, problem.tests.tests, strict=False)
    ]
    facts = {
        "rows": rows,
        "answer": answer,
        "rule": problem.tests.answer,
        "outcome": wire_name(Outcome, verdict.outcome),
        "judge_version": verdict.judge_version,
    }
    return show(request, "trajectories/tests.html", **facts)


def _problem(context: AppContext, job_id: str, prompt_id: str) -> Problem | None:
    tasks = context.library.load(context.jobs.spec(job_id).tasks)
    return next((known for known in (*tasks.train, *tasks.evaluation) if known.problem_id == prompt_id), None)


def _known_problem(context: AppContext, job_id: str, prompt_id: str) -> Problem | None:
    """The problem of a prompt; None where the tasks cannot be read any more."""
    try:
        return _problem(context, job_id, prompt_id)
    except (SpoError, OSError):
        return None


def _hops(found: Trajectory) -> list[dict[str, object]]:
    """Every service that had it, when, and how many seconds after the one before."""
    rows = []
    before = found.hops[0].at_unix_ms if found.hops else 0
    for hop in found.hops:
        rows.append({"service": hop.service, "at": hop.at_unix_ms, "seconds": (hop.at_unix_ms - before) / 1000})
        before = hop.at_unix_ms
    return rows


@prompts_router.get("")
def show_prompts(
    request: Request,
    context: ContextDep,
    job_id: JobId,
    q: Annotated[str, Query(max_length=200)] = "",
    cursor: Annotated[str, Query(pattern=r"^[0-9]{0,9}$")] = "",
) -> Response:
    """The training problems in their order, with their values."""
    spec = context.jobs.spec(job_id)
    train = context.library.load(spec.tasks).train
    words = q.strip().casefold()
    wanted = [
        problem for problem in train if words in problem.statement.casefold() or problem.problem_id.startswith(words)
    ]
    start = int(cursor or 0)
    shown = wanted[start : start + PROMPTS_ON_A_PAGE]
    more = start + PROMPTS_ON_A_PAGE < len(wanted)
    facts = {
        "job": job_document(context, job_id),
        "prompts": _with_values(context, job_id, spec, shown),
        "total": len(wanted),
        "start": start,
        "q": q,
        "reward": spec.tasks.reward,
        "following": urlencode({"q": q, "cursor": start + PROMPTS_ON_A_PAGE}) if more else "",
        "preceding": urlencode({"q": q, "cursor": max(0, start - PROMPTS_ON_A_PAGE)}) if start else "",
    }
    if is_part(request):
        return show(request, "prompts/table.html", **facts)
    probed = learnability(prompt_page(context, job_id, 0, MOST_PROBED).items)
    return show(request, "prompts/list.html", tab="prompts", probed=probed, **facts)


@prompts_router.get("/{prompt_id}")
def show_prompt(request: Request, context: ContextDep, job_id: JobId, prompt_id: PromptId) -> Response:
    """One prompt: its value with the interval, its latest responses side by side, its pivotal tokens."""
    job = job_document(context, job_id)
    spec = context.jobs.spec(job_id)
    found = prompt_document(context, job_id, prompt_id)
    facts = {
        "job": job,
        "prompt": found,
        "reward": spec.tasks.reward,
        "groups": _groups(found.trajectories),
        "pivotal": _pivotal(context, job_id, prompt_id, spec),
    }
    return show(request, "prompts/prompt.html", tab="prompts", **facts)


def _with_values(
    context: AppContext, job_id: str, spec: JobSpec, problems: Sequence[Problem]
) -> list[Mapping[str, object]]:
    ids = [problem.problem_id for problem in problems]
    stored = context.redis.hmget(redis_keys.run_values(job_id), ids) if ids else []
    rows: list[Mapping[str, object]] = []
    for problem, raw in zip(problems, stored, strict=True):
        value = PromptValue.FromString(raw) if raw else None
        rows.append({"problem": problem, "value": value, "estimate": qhat_0(value, spec) if value else None})
    return rows


def _groups(trajectories: Sequence[api.Trajectory]) -> list[tuple[str, list[api.Trajectory]]]:
    """Responses by the group they were sampled in, latest group first."""
    groups: dict[str, list[api.Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return list(groups.items())


def _pivotal(context: AppContext, job_id: str, prompt_id: str, spec: JobSpec) -> list[Mapping[str, object]]:
    """The turning points that Pivotal Token Search found in this prompt's trajectories."""
    search = spec.value.pivotal if spec.value else None
    if search is None:
        return []
    request = ListTrajectoriesRequest(run_id=job_id, prompt_id=prompt_id, limit=SEARCHED)
    try:
        reply: ListTrajectoriesResponse = context.replay.call("ListTrajectories", request, REPLAY_SECONDS)
    except SpoError:
        # Said once already: the page has no trajectories then either.
        return []
    found: list[Mapping[str, object]] = [
        {"trajectory_id": trajectory.trajectory_id, "turn": turn}
        for trajectory in reply.trajectories
        for turn in pivotal_of(trajectory.annotations, search.threshold)
    ]
    return found[:SHOWN_TURNS]


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


@episodes_router.get("")
def show_episodes(
    request: Request, context: ContextDep, job_id: JobId, skip: Annotated[int, Query(ge=0, le=10**6)] = 0
) -> Response:
    """The sessions of a job's agents, newest first."""
    job = job_document(context, job_id)
    sessions = context.agent_sessions.of_job(job_id, EPISODES_ON_A_PAGE + 1, skip)
    rows = [{"session": each, "state": _state(each, seen), **seen} for each, seen in sessions[:EPISODES_ON_A_PAGE]]
    facts = {
        "job": job,
        "rows": rows,
        "skip": skip,
        "older": urlencode({"skip": skip + EPISODES_ON_A_PAGE}) if len(sessions) > EPISODES_ON_A_PAGE else "",
    }
    return show(request, "episodes/list.html", tab="episodes", **facts)


@episodes_router.get("/{session_id}")
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
