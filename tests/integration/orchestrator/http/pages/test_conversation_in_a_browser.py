"""A conversation in a real browser, on a telephone, light and dark: who spoke, accessible, and harmless markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import SEGMENT_KIND_ACTION, SEGMENT_KIND_OBSERVATION, Segment, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_WRONG_ANSWER, PartScore, Verdict

if TYPE_CHECKING:
    from spo.testing.peers import ServiceDoubles

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra `dev` has it")

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
# What the policy wrote, what the environment answered, and a long line without a space.
TURNS = (
    (SEGMENT_KIND_ACTION, f"first try {HOSTILE}", HOSTILE, 0.25),
    (SEGMENT_KIND_OBSERVATION, "x" * 200 + HOSTILE, "", None),
    (SEGMENT_KIND_ACTION, "second try", "python", None),
)


@pytest.fixture
def conversation(job_id: str, peers: ServiceDoubles) -> str:
    """The address of a conversation of three turns; the double's tokens have four characters each."""
    text = "".join(said for _, said, _, _ in TURNS)
    tokens = -(-len(text) // 4)
    counts = [3, tokens - 5, 2]
    segments = [
        Segment(kind=kind, tokens=count, characters=len(said), label=label, score=score)
        for (kind, said, label, score), count in zip(TURNS, counts, strict=True)
    ]
    verdict = Verdict(outcome=OUTCOME_WRONG_ANSWER, score=0.5)
    verdict.parts.extend([PartScore(name=HOSTILE, score=0.25, detail=HOSTILE), PartScore(name="format", score=1)])
    peers.replay.trajectories.append(
        Trajectory(
            trajectory_id="traj_spoken",
            prompt_id=peers.replay.trajectories[0].prompt_id,
            source=SOURCE_ONLINE,
            response_text=text,
            response_token_ids=range(tokens),
            segments=segments,
            verdict=verdict,
            reward=-0.5,
        )
    )
    return f"/jobs/{job_id}/trajectories/traj_spoken"


def test_a_conversation_is_read_turn_by_turn_on_a_telephone(
    page: Any, conversation: str, complaints: list[str]
) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    axe = axe_playwright.Axe()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(conversation)
        page.locator("#curve-q canvas").wait_for()
        found = axe.run(page, options={"resultTypes": ["violations"]})
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"wider than the window in {scheme}"

    turns = page.get_by_role("list", name="Turns").get_by_role("listitem")
    assert [turn.get_attribute("aria-label") for turn in turns.all()] == [
        "Turn 1, policy",
        "Turn 2, environment",
        "Turn 3, policy",
    ]
    assert [turn.locator("pre").inner_text() for turn in turns.all()] == [said for _, said, _, _ in TURNS]
    assert "score 0.25" in turns.nth(0).inner_text()
    assert "python" in turns.nth(2).inner_text()
    parts = page.get_by_role("region", name="Parts of the score").locator("tbody tr")
    assert [row.locator("td").nth(1).inner_text() for row in parts.all()] == ["0.250", "1.000"]
    said = page.locator(".tokens .token.said")
    assert said.count() == page.locator(".tokens .token").count() - 5
    assert page.locator("#response").count() == 0
    assert page.locator("main img, main script").count() == 0
    assert complaints == []
