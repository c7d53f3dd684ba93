"""An agent's episode in a real browser: its tree, tools and times, accessible on a telephone, and harmless markup."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.orchestrator.agents import AgentSession, CallNode
from services.orchestrator.commit import now_ms
from services.orchestrator.container import AppContext
from services.orchestrator.http.pages.trajectories import EPISODES_ON_A_PAGE, in_branches, times_of
from spo.spec.job_spec import parse_job_spec

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra `dev` has it")

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
BEGAN = 1_790_000_000_000


def call(number: int, parent: int | None, began_ms: int, **fields: Any) -> CallNode:
    """A call that waited 1 s and sampled for 2 s, begun so long after the episode."""
    known: dict[str, Any] = {
        "state": f"s{number}",
        "messages": ({"role": "user", "content": f"asked {number}"},),
        "text": f"said {number}",
        "calls": (),
        "finish_reason": "stop",
        "version_first": number,
        "version_last": number,
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "sampler": "vllm",
        "model_hash": "h",
        "at_unix_ms": BEGAN + began_ms + 3000,
        "began_unix_ms": BEGAN + began_ms,
        "first_unix_ms": BEGAN + began_ms + 1000,
        "read": (1, 2),
        "sampled": (3, 4, 5),
        "logprobs": (-0.1, -0.2, -0.3),
    }
    return CallNode(number=number, parent=parent, **{**known, **fields})


def session_of(context: AppContext, job_id: str, **fields: Any) -> AgentSession:
    made = AgentSession(
        id="",
        job_id=job_id,
        tenant="",
        key_digest="",
        token_digest="",
        created_unix_ms=BEGAN,
        deadline_unix_ms=now_ms() + 60_000,
        **fields,
    )
    return context.agent_sessions.open(made)[0]


def play(context: AppContext, job_id: str) -> AgentSession:
    """A call of a tool, what goes on from its hostile answer, a sibling that nothing went on from, and a title."""
    session = session_of(context, job_id, group_id="g-0", max_episode_tokens=500, problem_id="ab")
    tree = context.agent_sessions.tree(session)
    tool = {"id": "c0", "type": "function", "function": {"name": HOSTILE, "arguments": {"path": HOSTILE}}}
    tree.append(call(0, None, 0, text=HOSTILE, calls=(tool,), finish_reason="tool_calls"), "b0")
    answered = ({"role": "tool", "content": "x" * 300 + HOSTILE, "tool_call_id": "c0"},)
    tree.append(call(1, 0, 5000, messages=answered, reason="edited", label=HOSTILE), "b1")
    tree.append(call(2, 0, 5000, messages=answered), "b2")
    tree.append(call(3, 2, 9000), "b3")
    return session


def test_seconds_are_told_apart_and_branches_follow_what_they_left() -> None:
    nodes = [call(0, None, 0), call(1, 0, 5000), call(2, 0, 5000), call(3, 2, 9000), call(4, 1, 20_000)]
    assert [(node.number, depth) for node, depth in in_branches(nodes)] == [(0, 0), (1, 0), (4, 0), (2, 1), (3, 1)]

    times = times_of(BEGAN, BEGAN + 30_000, nodes)
    # Two of the five calls were under way together: 12 s of the episode's 30 had one.
    assert (times.waiting, times.sampling, times.agent) == (5.0, 10.0, 18.0)
    untimed = [call(0, None, 0, began_unix_ms=0, first_unix_ms=0)]
    assert times_of(BEGAN, BEGAN + 4000, untimed).agent == 4.0


def test_an_episode_is_read_call_by_call_on_a_telephone(
    context: AppContext, page: Any, job_id: str, complaints: list[str]
) -> None:
    session = play(context, job_id)
    outcome = {"status": "finished", "reward": 0.25, "answer": HOSTILE, "metrics": {HOSTILE: 2.0}}
    context.agent_sessions.close(session, outcome, "finished")
    page.set_viewport_size({"width": 390, "height": 800})
    axe = axe_playwright.Axe()
    page.goto(f"/jobs/{job_id}/episodes")
    page.get_by_role("link", name=session.id).click()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.get_by_role("list", name="Calls").wait_for()
        found = axe.run(page, options={"resultTypes": ["violations"]})
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"wider than the window in {scheme}"

    calls = page.get_by_role("list", name="Calls").get_by_role("listitem")
    assert [each.get_attribute("aria-label") for each in calls.all()] == [f"Call {number}" for number in range(4)]
    first, thrown_away, other = calls.nth(0).inner_text(), calls.nth(1).inner_text(), calls.nth(2).inner_text()
    assert f'"path": "{HOSTILE}"' in first
    assert HOSTILE in thrown_away
    assert "edited" in thrown_away
    assert "not learned from" in thrown_away
    assert "not learned from" not in other
    assert "2.0 s in the agent before" in other
    assert "2 tokens read, 1 known, 3 sampled" in other
    assert "weights 2" in other
    facts = page.get_by_label("Facts").inner_text()
    assert "0.250, from its runner" in facts
    assert f"{HOSTILE} 2.0" in facts
    assert page.get_by_role("link", name="a trajectory").get_attribute("href").startswith(f"/jobs/{job_id}/traj")
    assert page.locator("main img, main script").count() == 0
    assert complaints == []


def test_empty_open_and_foreign_episodes_are_told_as_what_they_are(
    context: AppContext, api: httpx.Client, job_id: str, document: dict[str, Any]
) -> None:
    here = f"/jobs/{job_id}/episodes"
    assert "No agent has opened a session" in api.get(here).text
    assert "There are no older ones" in api.get(here, params={"skip": 50}).text

    session = session_of(context, job_id)
    assert "No call has been answered yet" in api.get(f"{here}/{session.id}").text
    context.agent_sessions.close(session, {"status": "lost"}, "its runner fell silent")
    lost = api.get(f"{here}/{session.id}").text
    assert "its runner fell silent" in lost
    assert "No call has been answered." in lost

    for _ in range(EPISODES_ON_A_PAGE):
        session_of(context, job_id)
    assert api.get(here).text.count("ses_") == 2 * EPISODES_ON_A_PAGE
    assert session.id in api.get(here, params={"skip": EPISODES_ON_A_PAGE}).text

    other = context.jobs.submit(parse_job_spec({**document, "name": "another"}))
    foreign = api.get(f"/jobs/{other}/episodes/{session.id}", headers={"Accept": "text/html"})
    assert foreign.status_code == 404
    assert api.get(f"{here}/ses_x").status_code in (404, 422)
