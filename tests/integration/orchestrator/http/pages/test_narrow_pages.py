"""Pages as narrow as a telephone, full of long things: nothing scrolls sideways, what is long is folded or cut."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo import redis_keys
from spo.messaging.streams import Consumer, counted_append_words
from spo.messaging.streams.recovery import StreamHolder
from spo.spec.job_spec import parse_job_spec

if TYPE_CHECKING:
    from conftest import Trainer

pytestmark = pytest.mark.slow

TRACEBACK = "Traceback (most recent call last):\n" + "  File x.py, line 1, in x\n" * 800 + "ValueError: the last line"
FAILURE = "Traceback (most recent call last):\n" + "  File x.py, line 1, in x\n" * 20 + "ValueError: the last line"
TELEPHONE = {"width": 390, "height": 844}


@pytest.fixture
def full(context: AppContext, job_id: str, trainer: Trainer, evaluated: None) -> str:
    """A job whose pages hold what is long: progress, waits, logs, names, and an evaluation that failed."""
    trainer.report(1, 2, 3)
    trainer.publish(1)
    for done in range(160):
        context.jobs.append(job_id, "progress", {"stage": "running", "done": done, "total": 160})
    context.jobs.append(job_id, "trainer_died", {"deaths": 1, "most": 3, "message": TRACEBACK})
    fields = {"event": "it failed", "level": "error", "exception": TRACEBACK}
    line = {"service": "value-estimation", "replica_id": "t", "level": "error", "at_unix_ms": 1}
    context.redis.xadd(own_keys.job_logs(job_id), {**line, "line": json.dumps(fields)})
    return job_id


def widest(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth"))


def test_nothing_is_wider_or_much_higher_than_a_telephone(page: Any, full: str, complaints: list[str]) -> None:
    page.set_viewport_size(TELEPHONE)
    heights = {}
    for part in ("", "/evaluations", "/logs"):
        page.goto(f"/jobs/{full}{part}")
        if not part:
            page.locator("#slow table").wait_for()
            page.locator("#events .trainer_died").wait_for()
        assert widest(page) <= TELEPHONE["width"], part
        heights[part] = page.evaluate("document.documentElement.scrollHeight")
        times = page.locator("main time:visible").evaluate_all("all => all.map(each => each.getClientRects().length)")
        assert set(times) <= {1}, "a time is broken"
    for path in ("/", "/attention", "/datasets", "/models", "/docs", "/docs/glossary.md", "/api"):
        page.goto(path)
        page.get_by_role("heading", level=1).first.wait_for()
        assert widest(page) <= TELEPHONE["width"], path
    page.goto(f"/jobs/{full}/logs")
    page.locator("summary", has_text="ValueError: the last line").click()
    page.locator("pre", has_text="in x").wait_for()

    assert heights["/evaluations"] < 2500
    assert heights["/logs"] < 2500
    assert complaints == []


def test_reports_of_progress_are_one_line_and_a_traceback_is_folded(page: Any, full: str) -> None:
    page.goto(f"/jobs/{full}")
    page.locator("#events .progress", has_text="running: 159 of 160").wait_for()
    page.locator("#events .trainer_died summary", has_text="trainer died, 1 of at most 3 times").wait_for()

    assert page.locator("#events .progress").count() <= 3
    assert not page.locator("#events .trainer_died pre").is_visible()


def test_a_long_name_is_cut_and_said_in_full(
    context: AppContext, page: Any, document: dict[str, Any], complaints: list[str]
) -> None:
    name, label = "n" * 200, "v" * 60
    job_id = context.jobs.submit(parse_job_spec(document | {"name": name, "labels": {"k": label}}))
    page.goto("/")
    link = page.locator(f"#link-{job_id}")

    assert link.get_attribute("title") == name
    assert link.bounding_box()["height"] < 40
    assert page.locator("#jobs progress").bounding_box()["x"] < 800
    page.set_viewport_size(TELEPHONE)
    assert widest(page) <= TELEPHONE["width"]
    assert complaints == []


def test_too_many_dead_letters_lead_to_them(context: AppContext, page: Any, full: str, complaints: list[str]) -> None:
    stream = redis_keys.verdicts()
    for command in counted_append_words(stream, b"\xff malformed", full):
        context.redis.execute_command(*command)
    consumer = Consumer(context.redis, stream, redis_keys.INGEST_GROUP, "i", holder=StreamHolder())
    for entry in consumer.read(1, 0.1):
        consumer.dead_letter(entry, FAILURE)
    context.jobs.fail(full, "too_many_dead_letters", FAILURE)
    page.set_viewport_size(TELEPHONE)
    page.goto(f"/jobs/{full}")
    page.locator("#status summary", has_text="ValueError: the last line").wait_for()
    page.get_by_role("link", name="Look at them").click()
    page.locator("td", has_text="ValueError: the last line").wait_for()
    assert widest(page) <= TELEPHONE["width"]
    page.get_by_role("button", name="drop").click()
    page.get_by_text("None is kept").wait_for()

    assert complaints == []
