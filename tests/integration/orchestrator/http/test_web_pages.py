"""The pages: they show a job, and nothing a model or a person wrote becomes markup."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.http.app import STATIC
from spo.rpc.client import RpcClient
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.trajectory_pb2 import SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION, Segment, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_RUNTIME_ERROR, PartScore, Verdict

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


def train_prompts(context: AppContext, document: dict[str, Any]) -> list[str]:
    return [each.problem_id for each in context.library.load(parse_job_spec(document).tasks).train]


def _spoken(prompt_id: str) -> Trajectory:
    """A conversation whose texts, labels and parts are all hostile."""
    kinds = (SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION)
    return Trajectory(
        trajectory_id="traj_2",
        prompt_id=prompt_id,
        source=SOURCE_ONLINE,
        response_text=HOSTILE * 2,
        response_token_ids=[1, 2],
        segments=[Segment(kind=kind, tokens=1, characters=len(HOSTILE), label=HOSTILE, score=0.5) for kind in kinds],
        verdict=Verdict(
            outcome=OUTCOME_RUNTIME_ERROR, parts=[PartScore(name=HOSTILE, score=0.5, detail=HOSTILE)], score=0.5
        ),
    )


@pytest.fixture
def job_id(context: AppContext, peers: ServiceDoubles, document: dict[str, Any]) -> str:
    document |= {"name": HOSTILE[:190], "labels": {"team": HOSTILE, HOSTILE: "y"}}
    prompt_id = train_prompts(context, document)[0]
    peers.replay.trajectories = [
        Trajectory(
            trajectory_id="traj_1",
            prompt_id=prompt_id,
            source=SOURCE_ONLINE,
            response_text=HOSTILE,
            verdict=Verdict(outcome=OUTCOME_RUNTIME_ERROR, detail=HOSTILE),
        ),
        _spoken(prompt_id),
    ]
    found = context.jobs.submit(parse_job_spec(document))
    context.jobs.transition(found, JobState.VALIDATING, HOSTILE)
    context.jobs.fail(found, "x", HOSTILE)
    return found


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?q=%3Cscript%3Ealert",
        "/jobs/{job_id}",
        "/jobs/{job_id}/live",
        "/jobs/{job_id}/trajectories",
        "/jobs/{job_id}/trajectories/traj_1",
        "/jobs/{job_id}/trajectories/traj_1/tests",
        "/jobs/{job_id}/trajectories/traj_2",
        "/jobs/{job_id}/prompts",
        "/jobs/{job_id}/prompts/{prompt_id}",
        "/jobs/{job_id}/evaluations",
        "/jobs/{job_id}/logs",
    ],
)
def test_nothing_people_or_models_wrote_becomes_markup(
    context: AppContext, api: httpx.Client, document: dict[str, Any], job_id: str, path: str
) -> None:
    logged = {"service": "trainer", "replica_id": "t", "level": "info", "at_unix_ms": 1, "line": HOSTILE}
    context.redis.xadd(own_keys.job_logs(job_id), logged)
    page = api.get(path.format(job_id=job_id, prompt_id=train_prompts(context, document)[0]))

    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert "<img" not in page.text
    assert "&lt;script&gt;alert" in page.text or path.endswith("/tests")


def test_pages_may_load_nothing_from_elsewhere_and_run_nothing_inline(api: httpx.Client, job_id: str) -> None:
    page = api.get(f"/jobs/{job_id}")

    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert " style=" not in page.text
    assert "onclick" not in page.text
    assert '"allowEval":false' in page.text
    assert page.headers["cache-control"] == "no-store"


def test_everything_a_page_refers_to_is_served(api: httpx.Client, job_id: str) -> None:
    references = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', api.get(f"/jobs/{job_id}").text))

    assert len(references) >= 4
    assert {api.get(reference).status_code for reference in references} == {200}


def test_the_page_shows_the_judges_word_on_the_latest_trajectories(api: httpx.Client, job_id: str) -> None:
    assert "runtime error" in api.get(f"/jobs/{job_id}").text


def test_a_page_is_shown_without_the_replay_buffer(context: AppContext, api: httpx.Client, job_id: str) -> None:
    away = RpcClient("replay-buffer", "127.0.0.1:1", ReplayServiceStub)
    context.replay.close()
    context.replay = away

    page = api.get(f"/jobs/{job_id}")

    assert page.status_code == 200
    assert "replay-buffer at 127.0.0.1:1 did not answer" in page.text


@pytest.mark.parametrize(("library", "licence"), [("uPlot", "MIT"), ("htmx", "Zero-Clause BSD")])
def test_vendored_libraries_keep_their_licences(library: str, licence: str) -> None:
    assert licence in (STATIC / "vendor" / f"{library}-LICENSE.txt").read_text()


def test_vendored_files_are_those_that_were_published() -> None:
    noted = dict(re.findall(r"\| `([\w.]+)` .*?`([0-9a-f]{64})`", (STATIC / "vendor" / "README.md").read_text()))
    code = [file for file in (STATIC / "vendor").iterdir() if file.suffix in (".js", ".css")]

    assert noted == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in code}


def test_an_error_is_a_page_for_a_browser_and_a_problem_for_a_program(api: httpx.Client) -> None:
    nothing = "/jobs/job_01ARZ3NDEKTSV4RRFFQ69G5FAV"
    page = api.get(nothing, headers={"Accept": "text/html"})
    problem = api.get(nothing)

    assert (page.status_code, problem.status_code) == (404, 404)
    assert page.headers["content-type"].startswith("text/html")
    assert "It may have been deleted" in page.text
    assert problem.json()["code"] == "job_not_found"
    assert api.get(f"/v1{nothing}", headers={"Accept": "text/html"}).json()["code"] == "job_not_found"


def test_stored_runs_are_browsed_and_filtered(context: AppContext, api: httpx.Client, document: dict[str, Any]) -> None:
    assert "Nothing is stored yet" in api.get("/experience").text
    prompts = train_prompts(context, document)
    answers = [("right", prompts[0]), (f"wrong {HOSTILE}", prompts[1])]
    rows = "\n".join(json.dumps({"prompt_id": prompt, "response_text": text}) for text, prompt in answers)
    asked = {"name": "imported", "tasks": json.dumps(document["tasks"]), "licence": "CC0"}
    kind = {"Content-Type": "application/x-ndjson"}
    assert api.post("/v1/experience/import", params=asked, content=rows, headers=kind).status_code == 201

    assert 'href="/experience/imported"' in api.get("/experience").text
    run = api.get("/experience/imported").text
    assert "&lt;script&gt;alert" in run
    assert "<script>alert" not in run
    only_right = api.get("/experience/imported", params={"right": "true"}, headers={"HX-Request": "true"}).text
    assert (only_right.count('class="card"'), only_right.count("<html")) == (1, 0)


@pytest.mark.parametrize("run", ["unknown", "..%2f..%2fetc", "%00"])
def test_a_run_that_is_not_stored_is_not_found(api: httpx.Client, run: str) -> None:
    assert api.get(f"/experience/{run}").status_code in (404, 422)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("name: [", "neither YAML nor JSON: line 1"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("[" * 100, "nested deeper than 32"),
        ("just words", "a mapping of fields"),
        ("when: 2020-01-01", "text, numbers, lists and mappings"),
        ("!!python/object/apply:os.system [id]", "neither YAML nor JSON"),
        ("when: !!timestamp x", "neither YAML nor JSON"),
        ("when: !!bool x", "neither YAML nor JSON"),
        ("seed: .nan", "text, numbers, lists and mappings"),
        ("name: x\nmodel:\n  path: p\n  dtype: <b>", "line 4"),
        ("name: " + "x" * 100_000, "at most 100000 characters"),
        # The lines are looked for once: once for each fault took minutes of a thread that checks everybody's specs.
        ("\n".join(f"field-{number}: 1" for number in range(150)), "and 5"),
    ],
    ids=lambda given: given[:20],
)
def test_what_cannot_be_a_spec_is_refused_with_a_reason(api: httpx.Client, typed: str, said: str) -> None:
    answer = api.post("/submit", content=urlencode({"spec": typed, "check": "1"}))

    assert answer.status_code == 200
    assert said in answer.text
    assert "nothing was submitted" in answer.text
    assert "<b>" not in answer.text


QUERIES = {
    "/": ("q", "label", "status", "cursor"),
    "/submit": ("recipe",),
    "/keys": ("cursor",),
    "/jobs/{job_id}/trajectories": ("prompt_id", "source", "verdict", "policy_version", "cursor"),
    "/jobs/{job_id}/trajectories/traj_1/tokens": ("policy_version",),
    "/jobs/{job_id}/prompts": ("q", "cursor"),
    "/jobs/{job_id}/logs": ("service", "level", "cursor"),
}


@pytest.mark.parametrize("path", QUERIES)
def test_no_query_breaks_a_page(api: httpx.Client, job_id: str, path: str) -> None:
    hostile = ["", "9" * 15, "9" * 40, "-1", "\0", "../../etc/passwd", "1-1", "[", "%", "\u202e", "x" * 5000, HOSTILE]
    statuses = {
        (name, value[:20], api.get(path.format(job_id=job_id), params={name: value}).status_code)
        for name in QUERIES[path]
        for value in hostile
    }

    # 503: value-estimation is not there to answer.
    assert {status for _, _, status in statuses} <= {200, 404, 422, 503}, statuses
