"""The pages: they show a job, and nothing a model or a person wrote becomes markup."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from services.orchestrator.desk import Desk
from services.orchestrator.states import JobState
from services.orchestrator.web.pages import STATIC
from spo.job_spec import parse_job_spec
from spo.rpc import Client
from spo.testing_peers import Peers
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_RUNTIME_ERROR, Verdict

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


@pytest.fixture
def job_id(desk: Desk, peers: Peers, document: dict[str, Any]) -> str:
    document |= {"name": HOSTILE[:190], "labels": {"team": HOSTILE, HOSTILE: "y"}}
    peers.replay.trajectories = [
        Trajectory(
            trajectory_id="traj_1",
            source=SOURCE_ONLINE,
            response_text=HOSTILE,
            verdict=Verdict(outcome=OUTCOME_RUNTIME_ERROR, detail=HOSTILE),
        )
    ]
    found = desk.jobs.submit(parse_job_spec(document))
    desk.jobs.transition(found, JobState.VALIDATING, HOSTILE)
    desk.jobs.fail(found, "x", HOSTILE)
    return found


@pytest.mark.parametrize("path", ["/", "/jobs/{job_id}", "/jobs/{job_id}/live"])
def test_nothing_people_or_models_wrote_becomes_markup(api: httpx.Client, job_id: str, path: str) -> None:
    page = api.get(path.format(job_id=job_id))

    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert "<img" not in page.text
    assert "&lt;script&gt;alert" in page.text


def test_pages_may_load_nothing_from_elsewhere_and_run_nothing_inline(api: httpx.Client, job_id: str) -> None:
    page = api.get(f"/jobs/{job_id}")

    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert " style=" not in page.text
    assert "onclick" not in page.text


def test_everything_a_page_refers_to_is_served(api: httpx.Client, job_id: str) -> None:
    references = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', api.get(f"/jobs/{job_id}").text))

    assert len(references) >= 4
    assert {api.get(reference).status_code for reference in references} == {200}


def test_the_page_shows_the_judges_word_on_the_latest_trajectories(api: httpx.Client, job_id: str) -> None:
    assert "runtime error" in api.get(f"/jobs/{job_id}").text


def test_a_page_is_shown_without_the_replay_buffer(desk: Desk, api: httpx.Client, job_id: str) -> None:
    away = Client("replay-buffer", "127.0.0.1:1", ReplayServiceStub)
    desk.replay.close()
    desk.replay = away

    page = api.get(f"/jobs/{job_id}")

    assert page.status_code == 200
    assert "replay-buffer at 127.0.0.1:1 did not answer" in page.text


def test_the_vendored_plot_library_keeps_its_licence() -> None:
    assert "MIT" in (STATIC / "vendor" / "uPlot-LICENSE.txt").read_text()
