"""`spo agents-demo` at reduced length: its figures of exactness hold, and both ways to play it are one game.

Whether the policy has learnt is reported and not asserted: so few steps show nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spo.demo.agents import AgentsRun, summary, together

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.cpu_seconds(600),
    pytest.mark.timeout(1800),
]
pytest.importorskip("openai")

STEPS, TRIALS = 4, 8


def test_a_program_and_an_environment_play_the_demo_and_what_was_sampled_is_what_is_trained_on(tmp_path: Path) -> None:
    sides = {
        side: run.done(tmp_path / side)
        for side, run in {
            "program": AgentsRun(steps=STEPS, trials=TRIALS),
            "environment": AgentsRun(steps=STEPS, trials=TRIALS, played_by="environment"),
        }.items()
    }

    for side, report in sides.items():
        print(f"{side}: {summary(report)}")
        assert report["state"] == "succeeded"
        # Both begin with the same weights, and play whole groups of eight.
        assert report["before"]["version"] == 0 < report["after"]["version"]
        assert report["episodes"] >= 64
        assert report["episodes"] % 8 == 0
        assert json.loads((tmp_path / side / "report.json").read_text()) == report
    played = sides["program"]
    assert (played["breaks"], played["trained_of_sampled"]) == (0, 1.0)
    assert played["calls_looked_at"] > 64, "a game takes more than one call"
    assert sides["environment"]["trained_of_sampled"] is None, "no session plays it"
    # A run with a report is not run again, unless it was to be another one.
    assert AgentsRun(steps=STEPS, trials=TRIALS).stored(tmp_path / "program") == played
    assert AgentsRun(seed=1, steps=STEPS, trials=TRIALS).stored(tmp_path / "program") is None
    assert together([played, played])["after"]["games"] == 2 * TRIALS
