"""Trajectories: filtered, one with every hop, its tokens by advantage, its tests one by one."""

from __future__ import annotations

from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.evaluation.scorer import upload_tests
from services.orchestrator.http import views
from services.orchestrator.http.dependencies import ContextDep, JobId, PolicyVersion, TrajectoryId
from services.orchestrator.http.pages.rendering import is_part, show
from services.orchestrator.http.pages.tokens import coloured
from services.orchestrator.http.threads import lasting
from spo.errors import NotFound, SpoError
from spo.rpc.long_calls import judge
from spo.spec.job_spec import SourceName
from spo.spec.wire_enums import wire_name
from spo.tasks.answer import answer_in
from spo.tasks.problem import Problem, program_of
from spo.tasks.verifier_pool import deciders, pool_of
from spo.v1.judge_service_pb2 import PRIORITY_EVALUATION, JudgeRequest
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import Outcome

router = APIRouter(prefix="/jobs/{job_id}/trajectories")

PAGE_LENGTH = 25
CHUNK = 200
# A filter that matches next to nothing reads so many chunks before the page offers to go on.
MAX_CHUNKS = 10
OUTCOMES = [name.removeprefix("OUTCOME_").lower() for name in Outcome.keys()[1:]]


class TrajectoriesForm(BaseModel):
    """What the list is filtered by; empty fields ask nothing."""

    prompt_id: str = Field("", pattern=r"^[0-9a-f]{0,128}$")
    source: str = Field("", pattern=f"^({'|'.join(get_args(SourceName))})?$")
    verdict: str = Field("", pattern=f"^({'|'.join(OUTCOMES)})?$")
    policy_version: str = Field("", pattern=r"^[0-9]{0,15}$")
    live: str = Field("", pattern="^1?$")
    cursor: str = Field("", pattern=r"^[0-9]{0,16}$")

    @property
    def filter(self) -> views.TrajectoryFilter:
        version = int(self.policy_version) if self.policy_version else None
        return views.TrajectoryFilter(self.prompt_id, self.source, self.verdict, version)


@router.get("")
def show_trajectories(
    request: Request, context: ContextDep, job_id: JobId, query: Annotated[TrajectoriesForm, Query()]
) -> Response:
    """Trajectories, newest first, by prompt, source, verdict and weights."""
    found, after = _page(context, job_id, query.filter, query.cursor)
    chosen = query.model_dump(exclude={"cursor"})
    kept = {name: value for name, value in chosen.items() if value}
    facts = {
        "job": views.job(context, job_id),
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


def _page(
    context: AppContext, job_id: str, wanted: views.TrajectoryFilter, cursor: str
) -> tuple[list[schemas.Trajectory], str]:
    """A page of those wanted, read in bounded chunks, and the cursor of the next page ("" at the end)."""
    found: list[schemas.Trajectory] = []
    chunk = PAGE_LENGTH if not wanted.verdict and wanted.policy_version is None else CHUNK
    for _ in range(MAX_CHUNKS):
        page = views.trajectories(context, job_id, wanted, limit=chunk, cursor=cursor)
        found += page.items
        cursor = page.next_cursor or ""
        if not cursor or len(found) >= PAGE_LENGTH:
            break
    return found, cursor


@router.get("/{trajectory_id}")
def show_trajectory(request: Request, context: ContextDep, job_id: JobId, trajectory_id: TrajectoryId) -> Response:
    """One trajectory; its tokens and tests come as parts of their own, since they have to be computed."""
    job = views.job(context, job_id)
    reply = views.get_trajectory(context, job_id, trajectory_id)
    problem = _known_problem(context, job_id, reply.trajectory.prompt_id)
    facts = {
        "job": job,
        "trajectory": views.trajectory_detail(reply),
        "verdict": reply.trajectory.verdict,
        "parents": list(reply.trajectory.parents),
        "prompt": problem.statement if problem else "",
        "decided_by": deciders(problem.tests) if problem else "",
        "hops": _hops(reply.trajectory),
        "versions": [published["version"] for published in context.weights.versions(job_id)][::-1],
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
    values = views.token_values(context, job_id, trajectory_id, policy_version)
    value = context.jobs.spec(job_id).value
    threshold = value.pivotal.threshold if value and value.pivotal else None
    trajectory = views.get_trajectory(context, job_id, trajectory_id).trajectory
    return show(request, "trajectories/tokens.html", values=values, tokens=coloured(values, trajectory, threshold))


@router.get("/{trajectory_id}/tests")
@lasting
def show_tests(request: Request, context: ContextDep, job_id: JobId, trajectory_id: TrajectoryId) -> Response:
    """The program judged once more, each test by itself; hidden ones are hidden from the policy, not from people."""
    found = views.get_trajectory(context, job_id, trajectory_id).trajectory
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
