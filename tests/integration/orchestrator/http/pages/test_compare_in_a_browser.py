"""Runs chosen in the list are compared over each other, renamed and deleted, in a real browser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until

if TYPE_CHECKING:
    from conftest import Trainer

pytestmark = pytest.mark.slow


@pytest.fixture
def other(context: AppContext, job_id: str, trainer: Trainer, evaluated: None, document: dict[str, Any]) -> str:
    """A second run with curves of its own, which has ended."""
    trainer.report(1, 2, 3)
    algorithm = {**document.get("algorithm", {}), "beta": 0.125}
    found = context.jobs.submit(parse_job_spec(document | {"name": "other run", "algorithm": algorithm}))
    score = {"value": 0.3, "low": 0.2, "high": 0.4}
    evaluation = {"step": 0, "version": 0, "pass_at_k": {"1": score}}
    context.redis.hset(own_keys.evaluations(found), "0", json.dumps(evaluation))
    context.jobs.transition(found, JobState.CANCELLED, "test")
    return found


def test_chosen_runs_are_compared_renamed_and_deleted(
    context: AppContext, page: Any, job_id: str, other: str, complaints: list[str]
) -> None:
    page.goto("/")
    assert {"reward", "KL"} <= set(page.locator("#jobs thead th").all_text_contents())
    assert "-0.4" in page.locator("#jobs tbody tr", has_text="browsed").inner_text()
    for box in (job_id, other):
        page.locator(f"#chosen-{box}").check()
    with page.expect_response(lambda reply: reply.request.headers.get("hx-request") == "true"):
        page.evaluate("document.body.dispatchEvent(new Event('news'))")
    page.get_by_role("button", name="Compare the chosen").click()
    page.get_by_role("heading", level=1, name="Compare runs").wait_for()
    page.locator("#curve-reward canvas").wait_for()
    page.locator("#curve-pass-1 canvas").wait_for()

    legend = page.locator("#curve-pass-1 .u-legend").inner_text()
    assert "browsed" in legend
    assert "other run" in legend
    row = page.locator("tr", has_text="/algorithm/beta")
    assert "0.125" in row.inner_text()
    assert page.locator("tr", has_text="/trainer/steps").count() == 0

    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    page.locator("#curve-reward canvas").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    page.goto(f"/jobs/{other}")
    page.get_by_text("Rename", exact=True).first.click()
    page.get_by_label("New name").fill("better run")
    page.get_by_role("button", name="Rename", exact=True).click()
    page.get_by_role("heading", level=1, name="better run").wait_for()

    page.goto("/")
    for box in (job_id, other):
        page.locator(f"#chosen-{box}").check()
    page.get_by_role("button", name="Delete the chosen").click()
    page.locator("#toast", has_text="1 deleted").wait_for()
    assert "cancel it" in page.locator("#toast").inner_text()
    wait_until(lambda: page.locator("#jobs tbody tr").count() == 1, "the deleted job leaves the list", 20)
    assert complaints == []
