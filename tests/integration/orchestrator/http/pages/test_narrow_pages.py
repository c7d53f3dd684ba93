"""Pages as narrow as a telephone, full of long things: nothing scrolls sideways, what is long is folded or cut."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo import redis_keys
from spo.messaging.streams.entries import counted_append_words
from spo.messaging.streams.recovery import StreamHolder
from spo.messaging.streams.stage import Consumer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1.value_pb2 import PromptValue

if TYPE_CHECKING:
    from conftest import Trainer

pytestmark = pytest.mark.slow

TRACEBACK = "Traceback (most recent call last):\n" + "  File x.py, line 1, in x\n" * 800 + "ValueError: the last line"
FAILURE = "Traceback (most recent call last):\n" + "  File x.py, line 1, in x\n" * 20 + "ValueError: the last line"
TELEPHONE = {"width": 390, "height": 844}
EDGES = "all => all.map(each => each.getBoundingClientRect()).map(box => [box.left, box.right, box.width])"


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
        if path == "/attention":
            assert (
                page.locator("#attention td").evaluate_all(f"all => Math.max(...({EDGES})(all).map(box => box[1]))")
                <= 390
            )
    page.goto(f"/jobs/{full}/logs")
    page.locator("summary", has_text="ValueError: the last line").click()
    page.locator("pre", has_text="in x").wait_for()

    assert heights["/evaluations"] < 2500
    assert heights["/logs"] < 2500
    assert complaints == []


def test_the_navigation_of_a_telephone_is_one_row_that_shows_where_one_is(page: Any, full: str) -> None:
    page.set_viewport_size(TELEPHONE)
    for path, name in (("/", "Jobs"), ("/replicas", "Replicas"), ("/docs", "Docs")):
        page.goto(path)
        here = page.locator(".top nav a[aria-current]")
        assert here.inner_text() == name
        page.wait_for_function(
            "document.querySelector('.top nav a[aria-current]').getBoundingClientRect().right <= 390"
        )
        assert here.bounding_box()["x"] >= 0
        assert page.locator(".top nav").bounding_box()["height"] < 50
        assert page.locator(".top").bounding_box()["height"] < 110
        assert widest(page) <= TELEPHONE["width"]


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


@pytest.fixture
def in_every_state(context: AppContext, page: Any, job_id: str, trainer: Trainer, document: dict[str, Any]) -> str:
    """A list with jobs that run, are estimated, wait, were cancelled, and failed; the id of the one that failed."""
    trainer.report(1, 2, 3)
    found = {}
    for name in ("waiting", "estimated", "cancelled", "failed"):
        found[name] = context.jobs.submit(parse_job_spec({**document, "name": f"a job that is {name}"}))
    for state in (JobState.VALIDATING, JobState.ESTIMATING):
        context.jobs.transition(found["estimated"], state, "test")
    record = redis_keys.job_record(found["estimated"])
    context.redis.hset(record, "prompts_total", 12)
    for number in range(3):
        value = PromptValue(prompt_id=str(number), samples=10, successes=number)
        context.redis.hset(redis_keys.run_values(found["estimated"]), str(number), value.SerializeToString())
    context.jobs.transition(found["cancelled"], JobState.CANCELLED, "test")
    context.jobs.transition(found["failed"], JobState.VALIDATING, "test")
    context.jobs.fail(found["failed"], "source_empty", FAILURE)
    return found["failed"]


@pytest.mark.parametrize("width", [390, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_list_shows_all_of_each_job_and_why_one_failed(
    page: Any, in_every_state: str, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto("/")
    page.get_by_text("a job that is failed").wait_for()
    assert widest(page) <= width
    for what in ("tbody code", "tbody progress", "tbody .state", "tbody .strong"):
        boxes = page.locator(f"#jobs {what}").evaluate_all(EDGES)
        assert len(boxes) >= 4, what
        assert [box for box in boxes if box[2] < 20 or box[0] < 0] == [], what
        if width != 768:
            # In between the table may be scrolled.
            assert [box for box in boxes if box[1] > width] == [], what
    choose_by = page.locator("#jobs tbody td:first-child").evaluate_all(EDGES)
    assert [box for box in choose_by if box[2] >= 60] == []

    failed = page.locator("#jobs tr", has_text="a job that is failed").inner_text()
    assert "source empty: ValueError: the last line" in failed
    assert "value 3 / 12" in page.locator("#jobs tr", has_text="a job that is estimated").inner_text()
    colour = "state => getComputedStyle(state).color"
    colours = {
        name: page.locator(f"#jobs .state.{name}").evaluate(colour) for name in ("failed", "cancelled", "queued")
    }
    assert colours["cancelled"] == colours["queued"] != colours["failed"]


def test_a_job_page_says_before_and_after_and_how_long_it_takes(page: Any, full: str) -> None:
    page.goto(f"/jobs/{full}")
    status = page.locator("#status")
    status.get_by_text("pass@1 0.10 → 0.40").wait_for()
    text = status.inner_text()
    assert "[0.35, 0.45], better" in text
    # Two seconds a step, and 17 steps to go.
    assert "so far, about 34 s to go" in text


def test_curves_without_values_are_folded_and_an_ended_job_says_what_was_slow(
    context: AppContext, page: Any, full: str
) -> None:
    page.goto(f"/jobs/{full}")
    page.locator("#curve-loss canvas").wait_for()
    visible = page.locator(".curves figure:visible").evaluate_all("all => all.map(each => each.id)")
    assert "curve-loss" in visible
    assert "curve-score" not in visible
    context.jobs.fail(full, "source_empty", FAILURE)
    page.goto(f"/jobs/{full}")
    page.get_by_role("heading", name="What was slow?").wait_for()
    page.locator("#slow tr", has_text="a batch from the replay buffer").wait_for()
    assert "in all" in page.locator("#status").inner_text()
