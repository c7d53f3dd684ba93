"""Pages on jobs: the list, one with its controls and curves, several side by side, and the form that submits one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlencode

import yaml
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field, StringConstraints

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.auth import Principal
from services.orchestrator.checks import MAX_DEPTH
from services.orchestrator.container import (
    AppContext,
    ContextDep,
    JobId,
    PrincipalDep,
    checks_of,
    require_own_job,
)
from services.orchestrator.http.errors import is_part, show
from services.orchestrator.http.events import DeadLetters, LogFilter, LogLevel, log_page
from services.orchestrator.http.jobs import (
    checked_spec,
    evaluation_brief,
    job_document,
    job_summaries,
    job_waits,
    mean_of_late,
    spec_warnings,
    submit_job,
)
from services.orchestrator.http.platform import replica_documents
from services.orchestrator.http.training import checkpoint_documents, trajectory_page, version_documents
from services.orchestrator.job_records import JobFilter, evaluation_results, training_series
from services.orchestrator.jobs import find_jobs
from services.orchestrator.replicas import POOLS
from services.orchestrator.versions import published_versions
from spo import api, redis_keys
from spo.errors import FieldViolation, InvalidInput, SpoError
from spo.messaging.redis_client import replies_by_key
from spo.spec.job_spec import JobSpec
from spo.spec.section import TERMINAL, JobState
from spo.tasks.load import probe_document
from spo.tasks.toy import newest_model, wanted_difficulty

router = APIRouter()

PAGE_LENGTH = 50
# Characters of why a job failed, in the list.
MOST_OF_A_REASON = 160
# Columns of the list, for the metrics that have no better name.
TITLES = {"reward": "reward", "loss": "loss", "kl_to_reference": "KL"}

job_router = APIRouter(prefix="/jobs/{job_id}")

LATEST_TRAJECTORIES = 6
SHOWN_VERSIONS = 8
SHOWN_ALARMS = 20
LOG_LINES = 200
LETTERS = 100

compare_router = APIRouter()

MOST_RUNS = 8
CURVES = (
    ("reward", "Reward; 0 is solved, -1 is not"),
    ("loss", "Loss"),
    ("kl_to_reference", "KL to π₀, nats"),
    ("entropy", "Entropy, nats per token"),
)
JobIds = Annotated[
    list[Annotated[str, StringConstraints(pattern=api.JOB_ID_PATTERN)]],
    Query(default_factory=list, max_length=MOST_RUNS),
]

submission_router = APIRouter()

# Of a clone, of the image; where there is neither the form begins empty.
RECIPE_FOLDERS = (Path(__file__).parents[4] / "deploy" / "recipes", Path("/usr/share/spo/recipes"))
EXAMPLE = "toy/demo.yaml"
# YAML is read slowly, in the few threads that check everybody's specs.
MOST_CHARACTERS = 100_000
MOST_FAULTS = 100
# What a person pastes into `tasks`, by kind.
VERIFIERS = {
    "program": "verifier: {kind: program}  # what the task file says: tests, functions, answers",
    "python": "verifier: {kind: python, path: /tasks/score.py, function: score}",
    "http": "verifier: {kind: http, url: https://rewards.example.org/score}",
    "model": "verifier: {kind: model, address: https://judge.example.org/v1, model: M, rubric: Is it right, votes: 3}",
    "composition": """verifier:
  kind: composition
  pass_score: 0.9
  parts:
    - {name: form, gate: true, verifier: {kind: format, expression: '(?s).*print.*'}}
    - {name: right, weight: 1.0, verifier: {kind: program}}
    - {name: length, weight: 0.2, length: {free_characters: 2000, most_characters: 8000}}""",
    "per_problem": """verifier:
  kind: per_problem  # a row says which: {"statement": ..., "verifier": "poems"}
  verifiers:
    default: {kind: program}
    poems: {kind: python, path: /tasks/poems.py, function: score}""",
}


class JobsForm(BaseModel):
    """What the list is filtered by; q is words of names."""

    status: str = Field("", pattern=f"^({'|'.join(JobState)})?$")
    label: str = Field("", max_length=800)
    q: str = Field("", max_length=200)
    cursor: str = Field("", pattern=r"^[0-9]{0,15}$")


@router.get("/")
def show_jobs(
    request: Request,
    context: ContextDep,
    principal: PrincipalDep,
    query: Annotated[JobsForm, Query()],
) -> Response:
    """The jobs, newest first."""
    labels = [query.label.strip()] if query.label.strip() else []
    wanted = JobFilter([JobState(query.status)] if query.status else [], labels, tenant=principal.sees_tenant)
    page = find_jobs(context.jobs, wanted, query.q.strip(), query.cursor or None, PAGE_LENGTH)
    chosen = query.model_dump(exclude={"cursor"})
    kept = {name: value for name, value in chosen.items() if value}
    older = urlencode({**kept, "cursor": page.next_cursor}) if page.next_cursor else ""
    lines = _lines(context, page.job_ids)
    facts = {
        "jobs": lines,
        "columns": _columns(lines),
        "older": older,
        "newest": urlencode(kept),
        "cursor": query.cursor,
        "chosen": chosen,
        "states": list(JobState),
        # How many jobs others have is not everybody's business.
        "counts": context.jobs.counts() if principal.sees_tenant is None else {},
    }
    return show(request, "jobs/table.html" if is_part(request) else "jobs/page.html", **facts)


def _columns(lines: Sequence[Mapping[str, object]]) -> list[tuple[str, str]]:
    """The metrics that some job of the page has, by their names and titles."""
    known: set[str] = set()
    for line in lines:
        metrics = line["metrics"]
        assert isinstance(metrics, dict)
        known.update(metrics)
    scores = sorted((name for name in known if name.startswith("pass@")), key=lambda name: (len(name), name))
    return [(name, name) for name in scores] + [each for each in TITLES.items() if each[0] in known]


def _lines(context: AppContext, job_ids: Sequence[str]) -> list[dict[str, object]]:
    """The jobs in one line each, with how far they are: in values while these are estimated, else in steps."""
    summaries = job_summaries(context, job_ids)
    with context.redis.pipeline(transaction=False) as pipe:
        for summary in summaries:
            pipe.get(redis_keys.run_spec(summary.id))
            pipe.hlen(redis_keys.run_values(summary.id))
            pipe.hmget(redis_keys.job_record(summary.id), ["prompts_total", "failure_code", "failure_message"])
        replies = replies_by_key(pipe)
    lines: list[dict[str, object]] = []
    for summary, spec, values, record in zip(summaries, replies[::3], replies[1::3], replies[2::3], strict=True):
        total, code, message = ((field or b"").decode() for field in record or (b"", b"", b""))
        steps = json.loads(spec)["trainer"]["steps"] if spec else 0
        stage, done, most = "step", summary.step, steps
        if total.isdigit() and (summary.state is JobState.ESTIMATING or not steps):
            stage, done, most = "value", min(values or 0, int(total)), int(total)
        # The last line of what was raised says it.
        why = message.strip().rpartition("\n")[2][:MOST_OF_A_REASON]
        line = {"stage": stage, "done": done, "most": most, "failure_code": code, "failure": why or (code and "failed")}
        lines.append({**summary.model_dump(), **line})
    return lines


@job_router.get("")
def show_job(request: Request, context: ContextDep, principal: PrincipalDep, job_id: JobId) -> Response:
    """One job; its script keeps it live."""
    facts = _live_parts(context, job_id, principal)
    return show(request, "job/page.html", tab="overview", **facts)


@job_router.get("/live")
def show_live_parts(request: Request, context: ContextDep, principal: PrincipalDep, job_id: JobId) -> Response:
    """The parts of a job's page that change, rendered again."""
    facts = _live_parts(context, job_id, principal)
    return show(request, "job/live.html", swapped=True, **facts)


@job_router.get("/evaluations")
def show_evaluations(request: Request, context: ContextDep, job_id: JobId) -> Response:
    """pass@k as training went, and what somebody asked for beside."""
    facts = {
        "job": job_document(context, job_id),
        "results": [evaluation_brief(result) for result in evaluation_results(context.redis, job_id)][::-1],
        "asked": [asked for asked in context.evaluations.requests.all() if asked.job_id == job_id],
        "failures": context.evaluations.schedule.failures(job_id),
        "attempts": context.settings.evaluation_attempts,
        "versions": [published["version"] for published in published_versions(context.jobs, job_id)][::-1],
    }
    if is_part(request):
        return show(request, "evaluations/tables.html", **facts)
    return show(request, "evaluations/page.html", tab="evaluations", **facts)


@job_router.get("/logs")
def show_logs(
    request: Request,
    context: ContextDep,
    job_id: JobId,
    service: Annotated[str, Query(pattern=f"^({'|'.join(POOLS)})?$")] = "",
    level: LogLevel = "info",
    cursor: Annotated[str, Query(pattern=r"^([0-9]{1,16}-[0-9]{1,16})?$")] = "",
) -> Response:
    """The latest log lines of every service that worked on the job."""
    page = log_page(context, job_id, LogFilter(service, level), LOG_LINES, cursor)
    facts = {"page": page, "service": service, "level": level, "services": POOLS, "cursor": cursor}
    job = job_document(context, job_id)
    if is_part(request):
        return show(request, "logs/lines.html", job=job, **facts)
    return show(request, "logs/page.html", tab="logs", job=job, **facts)


@job_router.get("/dead-letters")
def show_dead_letters(
    request: Request,
    context: ContextDep,
    job_id: JobId,
    cursor: Annotated[str, Query(pattern=r"^([a-z_]{1,40}-[0-9]{1,16}-[0-9]{1,16})?$")] = "",
) -> Response:
    """Entries of the job that were given up on, and why."""
    job = job_document(context, job_id)
    page = DeadLetters(context.redis, job_id).page("", LETTERS, cursor)
    given_up = sum(total.given_up for total in page.totals.values())
    facts = {"job": job, "ended": job.state in TERMINAL, "page": page, "given_up": given_up}
    return show(request, "dead_letters/page.html", tab="dead letters", **facts)


def _live_parts(context: AppContext, job_id: str, principal: Principal) -> dict[str, object]:
    job = job_document(context, job_id)
    return {
        "job": job,
        "ended": job.state in TERMINAL,
        "slow": job_waits(context, job_id, job.state),
        "clock": _clock(context, job),
        "gains": before_and_after(evaluation_results(context.redis, job_id)),
        "replicas": [
            replica for replica in replica_documents(context, principal.sees_tenant) if replica.run_id in ("", job_id)
        ],
        "weights": version_documents(context, job_id)[-SHOWN_VERSIONS:][::-1],
        "checkpoints": checkpoint_documents(context, job_id)[-SHOWN_VERSIONS:][::-1],
        "alarms": _alarms(context, job_id),
        **_trajectories(context, job_id, principal),
    }


@dataclass(frozen=True)
class Clock:
    """Seconds since a job was submitted, to its end where it has one, and to its last step as it goes now."""

    elapsed: float
    remaining: float | None


def _clock(context: AppContext, job: api.Job) -> Clock:
    begun = datetime.fromisoformat(job.created_at)
    ended = job.state in TERMINAL
    end = datetime.fromisoformat(job.updated_at) if ended else datetime.now(UTC)
    remaining = None
    if job.state is JobState.RUNNING:
        columns = training_series(context.redis, job.id).columns
        each = [mean_of_late(columns.get(name, ())) for name in ("wait_seconds", "step_seconds")]
        if known := [seconds for seconds in each if seconds is not None]:
            remaining = sum(known) * (job.progress.steps - job.progress.step)
    return Clock(max(0.0, (end - begun).total_seconds()), remaining)


@dataclass(frozen=True)
class Gain:
    """pass@k before training and after, with intervals, and what may be said of the difference."""

    k: str
    before: api.PassAtK
    after: api.PassAtK
    verdict: str


def before_and_after(results: Sequence[Mapping[str, Any]]) -> list[Gain]:
    """The first evaluation against the newest, by k; nothing before there are two."""
    if len(results) < 2:
        return []
    by_step = sorted(results, key=lambda result: int(result["step"]))
    first, last = (
        {k: api.PassAtK.model_validate(score) for k, score in by_step[place]["pass_at_k"].items()} for place in (0, -1)
    )
    return [Gain(k, first[k], last[k], last[k].against(first[k])) for k in sorted(first, key=int) if k in last]


def _alarms(context: AppContext, job_id: str) -> list[dict[str, object]]:
    """Collapse alarms and quarantined batches, latest step first."""
    found = context.redis.hgetall(own_keys.job_alarms(job_id))
    bodies = [json.loads(raw) for raw in found.values() if raw.startswith(b"{")]
    return sorted(bodies, key=lambda body: -int(body["step"]))[:SHOWN_ALARMS]


def _trajectories(context: AppContext, job_id: str, principal: Principal) -> dict[str, object]:
    if not principal.may("trajectories:read"):
        return {"trajectories": [], "trajectories_missing": "this key lacks the scope trajectories:read"}
    try:
        page = trajectory_page(context, job_id, limit=LATEST_TRAJECTORIES)
    except SpoError as error:
        # The page is worth showing without them.
        return {"trajectories": [], "trajectories_missing": error.message}
    return {"trajectories": page.items, "trajectories_missing": ""}


@compare_router.get("/compare")
def compare_jobs(request: Request, context: ContextDep, principal: PrincipalDep, job: JobIds) -> Response:
    """The runs named by `job`, at most MOST_RUNS."""
    chosen = list(dict.fromkeys(job))
    for job_id in chosen:
        require_own_job(context, principal, job_id)
    found = [job_document(context, job_id) for job_id in chosen]
    ks = {k for run in found for k in context.jobs.spec(run.id).evaluation.ks}
    facts = {
        "jobs": found,
        "metrics": list(dict.fromkeys(name for run in found for name in run.metrics)),
        "ks": sorted(ks),
        "curves": CURVES,
        "differences": differences([run.spec for run in found]),
    }
    return show(request, "compare/page.html", **facts)


def differences(specs: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str | None]]]:
    """JSON pointers whose values are not the same in all specs, with the value in each as JSON; None: not there."""
    fields = [dict(_leaves(spec, "")) for spec in specs]
    pointers = dict.fromkeys(pointer for each in fields for pointer in each)
    values = {pointer: [each.get(pointer) for each in fields] for pointer in pointers}
    return [(pointer, found) for pointer, found in values.items() if len(set(found)) > 1]


def _leaves(node: object, pointer: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from _leaves(child, f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}")
    elif isinstance(node, list) and any(isinstance(child, dict) for child in node):
        for place, child in enumerate(node):
            yield from _leaves(child, f"{pointer}/{place}")
    else:
        yield pointer, json.dumps(node)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a field, and on which line (from 1; 0 where it is not written) of what was typed."""

    pointer: str
    message: str
    line: int


@submission_router.get("/submit")
def show_form(request: Request, context: ContextDep, recipe: str = EXAMPLE) -> Response:
    """The form, with a recipe to begin from."""
    folder = next((recipes for recipes in RECIPE_FOLDERS if recipes.is_dir()), RECIPE_FOLDERS[0])
    known = sorted(path.relative_to(folder).as_posix() for path in folder.glob("**/*.yaml"))
    text = (folder / recipe).read_text() if recipe in known else ""
    models = context.settings.state_path.absolute() / "cache" / "models"
    filled = with_toy_model(text, models)
    return show(
        request,
        "submission/form.html",
        recipes=known,
        recipe=recipe,
        spec=filled or text,
        verifiers=VERIFIERS,
        lacks_toy_model=filled is None,
    )


def with_toy_model(text: str, models: Path) -> str | None:
    """A recipe with the newest pi0 of its contest where it names no model; None where none has been made."""
    difficulty = wanted_difficulty(yaml.safe_load(text) or {})
    if difficulty is None:
        return text
    newest = newest_model(models, difficulty)
    return text.replace("\nmodel:\n", f"\nmodel:\n  path: {json.dumps(str(newest))}\n", 1) if newest else None


@submission_router.post("/submit")
async def take_form(request: Request, context: ContextDep, principal: PrincipalDep) -> Response:
    """Check what was typed, and submit it, or its probe, unless it was only to be checked."""
    form = parse_qs((await request.body()).decode("utf-8", errors="replace"), max_num_fields=10)
    typed = form.get("spec", [""])[0].replace("\r\n", "\n")
    only_check, only_probe = "check" in form, "probe" in form
    idempotency_key = form.get("idempotency_key", [""])[0][:255] or None

    def answer() -> Response:
        try:
            document = {str(name): value for name, value in parse_typed(typed).items()}
            if only_probe:
                document = probe_document(document)
            spec = checked_spec(context, principal, json.dumps(document).encode())
            if only_check:
                resolved = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
                return show(
                    request, "submission/answer.html", resolved=resolved, warnings=warnings_of(context, spec, typed)
                )
            job_id = submit_job(context, principal, spec, idempotency_key)
        except SpoError as error:
            return show(request, "submission/answer.html", error=error, faults=faults_in(typed, error.violations))
        response = show(request, "submission/answer.html", job_id=job_id, warnings=warnings_of(context, spec, typed))
        response.headers["HX-Redirect"] = f"/jobs/{job_id}/prompts" if only_probe else f"/jobs/{job_id}"
        return response

    return await checks_of(request).run(answer, principal.tenant)


def warnings_of(context: AppContext, spec: JobSpec, typed: str) -> list[Fault]:
    """What the plan says against a spec, at the lines of what was typed."""
    return faults_in(typed, [FieldViolation(each.pointer, each.message) for each in spec_warnings(context, spec)])


def faults_in(text: str, violations: Sequence[FieldViolation]) -> list[Fault]:
    """The first MOST_FAULTS at their lines, and how many there are besides."""
    tree = _tree(text) if violations else None
    found = [Fault(each.pointer, each.message, line_of(tree, each.pointer)) for each in violations[:MOST_FAULTS]]
    left_out = len(violations) - len(found)
    return [*found, Fault("…", f"and {left_out} more", 0)] if left_out else found


def parse_typed(text: str) -> dict[object, object]:
    """Decode YAML, of which JSON is a part. Raises InvalidInput; refuses aliases, which could unfold without bound."""
    if len(text) > MOST_CHARACTERS:
        message = f"at most {MOST_CHARACTERS} characters are read here; send a longer spec to POST /v1/jobs"
        raise InvalidInput(message, code="invalid_job_spec")
    try:
        _check_tokens(text)
        document = yaml.safe_load(text)
    except (yaml.YAMLError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # PyYAML raises what its constructors stumble over, as at `!!timestamp x` and `!!bool x`.
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or str(error) or "nested too deep"
        raise InvalidInput(f"this is neither YAML nor JSON: {place}{reason}"[:300], code="invalid_job_spec") from None
    if not isinstance(document, dict):
        raise InvalidInput("a job spec is a mapping of fields, such as `name: my job`", code="invalid_job_spec")
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        message = f"a job spec holds text, numbers, lists and mappings: {error}"
        raise InvalidInput(message, code="invalid_job_spec") from None
    return document


def _check_tokens(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("YAML aliases (*name) are not taken here; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _tree(text: str) -> yaml.Node | None:
    """What was typed, with the place of each part; reading it takes seconds where it is long."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None


def line_of(node: yaml.Node | None, pointer: str) -> int:
    """The line (from 1) of the field that a JSON pointer names, of the nearest parent that is written, else 0."""
    line = 0
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = _child(node, name)
        if found is None:
            break
        key, node = found
        line = key.start_mark.line + 1
    return line


def _child(node: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == name), None)
    if isinstance(node, yaml.SequenceNode) and name.isdigit() and int(name) < len(node.value):
        return node.value[int(name)], node.value[int(name)]
    return None
