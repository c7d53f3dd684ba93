"""The job page in a real browser: curves move, controls work, nothing is refused by the page's own policy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from services.orchestrator.desk import Desk
from services.orchestrator.states import JobState
from spo import redis_keys
from spo.job_spec import parse_job_spec
from spo.testing_peers import Peers
from spo.v1 import orchestrator_service_pb2 as wire
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import OUTCOME_WRONG_ANSWER, Verdict

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; the extra `dev` has it")

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
PATIENCE_MS = 30_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium is not installed; `make system-deps` installs it")
        pytest.skip("chromium is not installed; `make system-deps` installs it")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--no-proxy-server"])
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def page(chromium: Any, api: httpx.Client, complaints: list[str]) -> Iterator[Any]:
    context = chromium.new_context(base_url=str(api.base_url), viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    # A refused resource, a script error and a dialog of injected markup all end up here.
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
    yield page
    context.close()


@pytest.fixture
def job_id(desk: Desk, peers: Peers, document: dict[str, Any]) -> str:
    document["labels"] = {"note": HOSTILE}
    verdict = Verdict(outcome=OUTCOME_WRONG_ANSWER, tests_passed=3, tests_total=12, detail=HOSTILE)
    peers.replay.trajectories = [
        Trajectory(trajectory_id="traj_1", source=SOURCE_ONLINE, response_text=HOSTILE, verdict=verdict)
    ]
    found = desk.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        desk.jobs.transition(found, state, "test")
    return found


def report(desk: Desk, owner: dict[str, Any], *steps: int) -> None:
    metrics = {"loss": 0.5, "reward_mean": -0.5, "kl_to_reference": 0.1}
    reports = [wire.StepReport(step=step, metrics=metrics) for step in steps]
    desk.leases.renew(wire.RenewLeaseRequest(**owner, reports=reports))


def points(page: Any) -> int:
    """Canvases drawn: one per curve."""
    return int(page.locator("figure canvas").count())


def test_a_running_job_is_live_and_obeys_its_buttons(
    desk: Desk,
    page: Any,
    job_id: str,
    complaints: list[str],
    until: Callable[[Callable[[], Any], str], Any],
) -> None:
    grant = desk.leases.wait_for_job("trainer", 5)
    owner = {"run_id": job_id, "trainer_id": "trainer", "epoch": grant.epoch}
    report(desk, owner, *range(1, 6))
    page.goto(f"/jobs/{job_id}")
    page.get_by_text("step 5 / 20").wait_for()
    page.locator("#curve-loss canvas").wait_for()
    page.locator("#stream-state", has_text="live").wait_for()

    for step in range(6, 11):
        report(desk, owner, step)
    page.get_by_text("step 10 / 20").wait_for()
    page.get_by_role("button", name="pause").click()
    until(lambda: desk.jobs.state(job_id) is JobState.PAUSING, "the pause arrives")
    desk.leases.checkpoint(wire.ReportCheckpointRequest(**owner, step=10, path="p", manifest_digest="d"))
    page.locator("#state", has_text="paused").wait_for()
    page.get_by_role("button", name="resume").click()
    page.locator("#state", has_text="running").wait_for()
    page.get_by_role("button", name="cancel").click()
    page.locator("#state", has_text="cancelling").wait_for()

    assert points(page) >= 3
    assert page.locator(".trajectory pre").first.inner_text() == HOSTILE
    assert complaints == []


def test_evaluations_are_drawn_with_their_intervals(desk: Desk, page: Any, job_id: str, complaints: list[str]) -> None:
    for step, value in ((0, 0.1), (10, 0.4)):
        interval = {"value": value, "low": value - 0.05, "high": value + 0.05}
        result = {"step": step, "version": step // 10, "pass_at_k": {"1": interval, "10": interval}}
        desk.redis.hset(redis_keys.evaluations(job_id), str(step), json.dumps(result))
    page.goto(f"/jobs/{job_id}")
    page.locator("#curve-pass canvas").wait_for()

    assert "pass@10" in page.locator("#curve-pass .u-legend").inner_text()
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_have_readable_text(page: Any, job_id: str, complaints: list[str], scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto("/")
    page.get_by_role("link", name=job_id).wait_for()
    style = "getComputedStyle(document.body)"
    ink, ground = (page.evaluate(f"{style}.{name}") for name in ("color", "backgroundColor"))

    def brightness(colour: str) -> float:
        return sum(float(part) for part in colour.strip("rgba()").split(",")[:3]) / 3

    assert abs(brightness(ink) - brightness(ground)) > 150
    assert (brightness(ground) < 100) == (scheme == "dark")
    assert complaints == []
