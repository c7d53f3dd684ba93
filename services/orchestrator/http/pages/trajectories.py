"""Trajectories: filtered, one with every hop, its tokens by advantage, its tests one by one."""

from __future__ import annotations

from typing import Annotated, Any, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from services.orchestrator import schemas
from services.orchestrator.container import AppContext
from services.orchestrator.evaluation.scorer import upload_tests
from services.orchestrator.http import views
from services.orchestrator.http.api.experience import TrajectoryId
from services.orchestrator.http.api.values import PolicyVersion, token_values
from services.orchestrator.http.dependencies import ContextOf, JobId
from services.orchestrator.http.pages.rendering import is_part, show
from services.orchestrator.http.pages.tokens import coloured
from spo.errors import NotFound
from spo.spec.job_spec import SourceName
from spo.tasks.problem import extract_program
from spo.v1.judge_service_pb2 import PRIORITY_EVALUATION, JudgeRequest, JudgeResponse
from spo.v1.replay_service_pb2 import GetTrajectoryRequest, GetTrajectoryResponse
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import Outcome

router = APIRouter(prefix="/jobs/{job_id}/trajectories")

PAGE_LENGTH = 25
PIECE = 200
# A filter that matches next to nothing looks at so many trajectories before it offers to go on.
MOST_PIECES = 10
JUDGE_SECONDS = 60.0
OUTCOMES = [name.removeprefix("OUTCOME_").lower() for name in Outcome.keys()[1:]]


@router.get("")
def show_trajectories(
    request: Request,
    context: ContextOf,
    job_id: JobId,
    prompt_id: Annotated[str, Query(pattern=r"^[0-9a-f]{0,128}$")] = "",
    source: Annotated[str, Query(pattern=f"^({'|'.join(get_args(SourceName))})?$")] = "",
    verdict: Annotated[str, Query(pattern=f"^({'|'.join(OUTCOMES)})?$")] = "",
    policy_version: Annotated[str, Query(pattern=r"^\d{0,15}$")] = "",
    cursor: Annotated[str, Query(pattern=r"^\d{0,16}$")] = "",
) -> Response:
    """Trajectories, newest first, by prompt, source, verdict and weights."""
    chosen = {"prompt_id": prompt_id, "source": source, "verdict": verdict, "policy_version": policy_version}
    version = int(policy_version) if policy_version else None
    found, after = _matching(context, job_id, prompt_id, source, verdict, version, cursor)
    kept = {name: value for name, value in chosen.items() if value}
    facts = {
        "job": views.job(context, job_id),
        "trajectories": found,
        "chosen": chosen,
        "cursor": cursor,
        "older": urlencode({**kept, "cursor": after}) if after else "",
        "newest": urlencode(kept),
        "sources": get_args(SourceName),
        "outcomes": OUTCOMES,
    }
    if is_part(request):
        return show(request, "trajectories/table.html", **facts)
    return show(request, "trajectories/list.html", tab="trajectories", **facts)


def _matching(
    context: AppContext, job_id: str, prompt_id: str, source: str, verdict: str, version: int | None, cursor: str
) -> tuple[list[schemas.Trajectory], str]:
    """A page of those wanted, in bounded pieces, and the cursor of the next page ("" at the end)."""
    found: list[schemas.Trajectory] = []
    piece = PAGE_LENGTH if not verdict and version is None else PIECE
    for _ in range(MOST_PIECES):
        page = views.trajectories(context, job_id, prompt_id=prompt_id, source=source, limit=piece, cursor=cursor)
        found += [
            each
            for each in page.items
            if (not verdict or (each.verdict is not None and each.verdict.outcome == verdict))
            and (version is None or each.policy_version_first <= version <= each.policy_version_last)
        ]
        cursor = page.next_cursor or ""
        if not cursor or len(found) >= PAGE_LENGTH:
            break
    return found, cursor


@router.get("/{trajectory_id}")
def show_trajectory(request: Request, context: ContextOf, job_id: JobId, trajectory_id: TrajectoryId) -> Response:
    """One trajectory; its tokens and tests come as parts of their own, since they have to be computed."""
    job = views.job(context, job_id)
    reply = _trajectory(context, job_id, trajectory_id)
    facts = {
        "job": job,
        "trajectory": views.trajectory_detail(reply),
        "verdict": reply.trajectory.verdict,
        "parents": list(reply.trajectory.parents),
        "hops": _hops(reply.trajectory),
        "versions": [each["version"] for each in context.weights.versions(job_id)][::-1],
    }
    return show(request, "trajectories/trajectory.html", tab="trajectories", **facts)


@router.get("/{trajectory_id}/tokens")
def show_tokens(
    request: Request,
    context: ContextOf,
    job_id: JobId,
    trajectory_id: TrajectoryId,
    policy_version: PolicyVersion = None,
) -> Response:
    """The response token by token, coloured by advantage."""
    values = token_values(context, job_id, trajectory_id, policy_version)
    pivotal = context.jobs.spec(job_id).value
    threshold = pivotal.pivotal.threshold if pivotal and pivotal.pivotal else None
    annotations = _trajectory(context, job_id, trajectory_id).trajectory.annotations if threshold is not None else ()
    return show(
        request, "trajectories/tokens.html", values=values, tokens=coloured(values, annotations, threshold or 1.0)
    )


@router.get("/{trajectory_id}/tests")
def show_tests(request: Request, context: ContextOf, job_id: JobId, trajectory_id: TrajectoryId) -> Response:
    """The program judged once more, each test by itself; hidden ones are hidden from the policy, not from people."""
    found = _trajectory(context, job_id, trajectory_id).trajectory
    tasks = context.library.load(context.jobs.spec(job_id).tasks)
    problem = next((each for each in (*tasks.train, *tasks.evaluation) if each.problem_id == found.prompt_id), None)
    if problem is None:
        raise NotFound(f"job {job_id} has no prompt {found.prompt_id}", code="prompt_not_found")
    upload_tests(context.judge, [problem])
    requested = JudgeRequest(
        programs=[extract_program(found.response_text, problem.response_format)],
        language=problem.language,
        tests_digest=problem.tests_digest,
        priority=PRIORITY_EVALUATION,
        want_details=True,
    )
    reply: JudgeResponse = context.judge.call("Judge", requested, JUDGE_SECONDS)
    rows: list[dict[str, Any]] = [
        {
            "outcome": Outcome.Name(result.outcome).removeprefix("OUTCOME_").lower(),
            "result": result,
            "public": test.public,
            "stdin": test.stdin.decode(errors="replace"),
            "expected": test.stdout.decode(errors="replace"),
        }
        for result, test in zip(reply.verdicts[0].tests, problem.tests.tests, strict=False)
    ]
    return show(request, "trajectories/tests.html", rows=rows, judge_version=reply.verdicts[0].judge_version)


def _trajectory(context: AppContext, job_id: str, trajectory_id: str) -> GetTrajectoryResponse:
    request = GetTrajectoryRequest(run_id=job_id, trajectory_id=trajectory_id)
    reply: GetTrajectoryResponse = context.replay.call("GetTrajectory", request, views.REPLAY_SECONDS)
    return reply


def _hops(found: Trajectory) -> list[dict[str, Any]]:
    """Every service that had it, when, and how many seconds after the one before."""
    rows = []
    before = found.hops[0].at_unix_ms if found.hops else 0
    for hop in found.hops:
        rows.append({"service": hop.service, "at": hop.at_unix_ms, "seconds": (hop.at_unix_ms - before) / 1000})
        before = hop.at_unix_ms
    return rows
