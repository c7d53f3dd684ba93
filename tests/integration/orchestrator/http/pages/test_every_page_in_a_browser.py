"""Every page in a real browser, light and dark: accessible by axe's rules, silent in the console, harmless."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until

if TYPE_CHECKING:
    from conftest import Trainer

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra `dev` has it")

pytestmark = pytest.mark.slow

PAGES = {
    "/": "Jobs",
    "/submit": "Submit a job",
    "/replicas": "Replicas",
    "/experience": "Experience store",
    "/keys": "API keys",
    "/jobs/{job_id}": "browsed",
    "/jobs/{job_id}/trajectories": "browsed",
    "/jobs/{job_id}/trajectories/traj_1": "browsed",
    "/jobs/{job_id}/prompts": "browsed",
    "/jobs/{job_id}/evaluations": "browsed",
    "/jobs/{job_id}/logs": "browsed",
    "/attention": "What is wrong now",
    "/compare?job={job_id}": "Compare runs",
    "/datasets": "Datasets",
    "/models": "Models",
    "/api": "REST API",
    "/docs": "Documentation",
    "/docs/glossary.md": "Glossary",
    "/errors": "Error codes",
    "/nowhere": "Not found",
}


@pytest.fixture
def lived_in(context: AppContext, job_id: str, trainer: Trainer, evaluated: None) -> str:
    """A job with something on every page."""
    trainer.report(*range(1, 8), alarm="the entropy fell")
    trainer.publish(1)
    trainer.checkpoint(10)
    context.authenticator.keys.create("ci", "red", ("jobs:read",))
    return job_id


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_and_silent_and_keep_markup_harmless(
    page: Any, lived_in: str, complaints: list[str], scheme: str
) -> None:
    axe = axe_playwright.Axe()
    page.emulate_media(color_scheme=scheme)
    faults = {}
    for path, heading in PAGES.items():
        page.goto(path.format(job_id=lived_in))
        page.get_by_role("heading", level=1, name=heading).wait_for()
        _wait_for_what_comes_later(page, path)
        found = axe.run(page, options={"resultTypes": ["violations"]})
        if found.violations_count:
            faults[path] = found.generate_report()
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than the window"

    assert faults == {}
    # The browser itself says that /nowhere is a 404.
    assert [said for said in complaints if "404" not in said] == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (768, "light"), (1440, "dark")])
def test_a_jobs_page_is_accessible_in_every_state_and_at_every_width(
    context: AppContext,
    page: Any,
    lived_in: str,
    document: dict[str, Any],
    complaints: list[str],
    width: int,
    scheme: str,
) -> None:
    """SPO_SCREENSHOTS names a folder that pictures of what is looked at go into."""
    states = {"running": lived_in} | {
        name: context.jobs.submit(parse_job_spec(document | {"name": f"a job that is {name}"}))
        for name in ("queued", "estimating", "failed", "never right", "succeeded")
    }
    for name, *more in (
        ("estimating", JobState.ESTIMATING),
        ("never right", JobState.ESTIMATING, JobState.RUNNING),
        ("succeeded", JobState.ESTIMATING, JobState.RUNNING, JobState.SUCCEEDED),
    ):
        for state in (JobState.VALIDATING, *more):
            assert context.jobs.transition(states[name], state, "test")
    context.jobs.fail(states["failed"], "source_empty", "the source human has nothing to give")
    for step in range(1, 21):
        point = json.dumps({"step": step, "loss": 0.0, "reward": -1.0, "reward/online": -1.0, "preference_margin": 0.1})
        for name in ("never right", "succeeded"):
            context.redis.zadd(own_keys.job_metrics(states[name]), {point: step})
    axe, faults = axe_playwright.Axe(), {}
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    for name, job_id in states.items():
        page.goto(f"/jobs/{job_id}")
        page.locator("#stream-state", has_text=re.compile("live|ended")).wait_for()
        if name in ("running", "never right", "succeeded"):
            page.locator("#curve-loss canvas").wait_for()
        found = axe.run(page, options={"resultTypes": ["violations"]})
        if found.violations_count:
            faults[name] = found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the window"
        assert ("earned more" in page.locator("#status").inner_text()) == (name in ("never right", "succeeded"))
        if folder := os.environ.get("SPO_SCREENSHOTS"):
            page.screenshot(path=Path(folder) / f"{name.replace(' ', '_')}-{width}-{scheme}.png", full_page=True)

    assert faults == {}
    assert complaints == []


def _wait_for_what_comes_later(page: Any, path: str) -> None:
    if path == "/jobs/{job_id}":
        page.locator("#curve-loss canvas").wait_for()
    if path.endswith("traj_1"):
        page.locator("#curve-q canvas").wait_for()


def test_everything_can_be_reached_by_keyboard(page: Any, lived_in: str) -> None:
    page.goto(f"/jobs/{lived_in}")
    page.locator("#curve-loss canvas").wait_for()
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))

    assert {
        "Skip to the content",
        "Submit a job",
        "action-pause",
        "action-cancel",
        "push-1",
        "Trajectories",
        "Logs",
    } <= reached


def test_the_focus_stays_while_the_page_renews_itself(page: Any, job_id: str, trainer: Trainer) -> None:
    page.goto(f"/jobs/{job_id}")
    page.locator("#action-pause").focus()
    trainer.report(1, 2, 3)
    page.get_by_text("step 3 / 20").wait_for()

    assert page.evaluate("document.activeElement.id") == "action-pause"


def test_jobs_are_searched_as_one_types(
    context: AppContext, page: Any, document: dict[str, Any], complaints: list[str]
) -> None:
    for number in range(60):
        spec = parse_job_spec({**document, "name": f"sweep {number}", "labels": {"half": str(number // 30)}})
        context.jobs.submit(spec)
    page.goto("/")
    wait_until(lambda: page.locator("#jobs tbody tr").count() == 50, "the first page", 20)
    page.get_by_role("link", name="Older jobs").click()
    page.get_by_role("link", name="sweep 9", exact=True).wait_for()
    page.get_by_label("Search").press_sequentially("sweep 41")
    # What was typed before is answered too, and each answer replaces the rows.
    found = page.locator("#jobs tbody tr")
    wait_until(lambda: [text.strip()[:8] for text in found.all_inner_texts()] == ["sweep 41"], "the one job", 20)

    page.goto("/?label=half%3A0")
    assert page.locator("#jobs tbody tr").count() == 30
    page.get_by_label("State").select_option(JobState.FAILED)
    page.get_by_text("No job matches").wait_for()
    assert complaints == []


def test_replicas_are_wished_for_with_the_slider(context: AppContext, page: Any, complaints: list[str]) -> None:
    page.goto("/replicas")
    page.get_by_role("slider", name="inference").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    wait_until(lambda: context.scale.desired()["inference"] == 3, "three replicas are wished for")

    assert complaints == []


def test_a_key_is_made_shown_once_and_revoked(context: AppContext, page: Any, complaints: list[str]) -> None:
    page.goto("/keys")
    page.get_by_label("Name").fill("nightly")
    page.get_by_label("Tenant").fill("red")
    page.get_by_label("trajectories:read").check()
    page.get_by_role("button", name="Make it").click()
    page.locator("#token code").wait_for()
    token = page.locator("#token code").inner_text()
    principal = context.authenticator.keys.principal(token)
    assert principal is not None
    assert principal.scopes == {"jobs:read", "trajectories:read"}
    page.get_by_role("button", name="Revoke nightly").click()
    page.locator("#keys td", has_text="revoked").wait_for()

    assert context.authenticator.keys.principal(token) is None
    assert token not in page.content().replace(f"<code>{token}</code>", "")
    page.reload()
    assert token not in page.content()
    assert complaints == []
