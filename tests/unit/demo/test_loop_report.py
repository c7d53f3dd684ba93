"""The report of the demo of the loop: its claims follow from what was seen, also where they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from spo.client.models import ContinualRound, Job
from spo.demo.loop import Course, CourseOutcome, CrowdCount, Phase, TrafficCount, claims, write_report

JOB = Job.model_construct(id="job_1")
BACK = {"is_what_was_served_before": True, "answers_as_at_first": True, "call_seconds": 0.1, "to": ["job_1", 1]}


def phase(number: int, state: str, rates: tuple[float, float], lies: int, suspect: str) -> Phase:
    served, candidate = rates
    gain = candidate - served
    comparison = {"served": served, "candidate": candidate, "gain": gain, "low": gain - 0.05, "high": gain + 0.05}
    sources = [
        {"source": name, "residual": 0.3, "excess": 0.0, "excess_error": 0.01, "suspect": name == suspect}
        for name in ("north", "west")
    ]
    found = ContinualRound.model_validate(
        {
            "number": number,
            "state": state,
            "parent_job": "job_1",
            "parent_version": 1,
            "job_id": "job_2",
            "version": 1,
            "learned_from": {"traffic": 100},
            "evaluations": [],
            "comparison": {**comparison, "problems": 80},
            "reason": "as it was",
            "began_at": "",
            "ended_at": "",
            "sources": sources,
        }
    )
    traffic = TrafficCount({"north": CrowdCount(50, 20, 5), "west": CrowdCount(50, 20, lies)})
    return Phase(f"phase {number}", traffic, found, 1.0)


def outcome(second: Phase, **changes: object) -> CourseOutcome:
    seen: dict[str, object] = {"rolled_back": BACK, "canaries": 3, "captured_canary_is_found": True, **changes}
    made = CourseOutcome(Course(), JOB, [phase(1, "served", (0.3, 0.5), 5, ""), second])
    for name, value in seen.items():
        setattr(made, name, value)
    return made


def test_a_course_as_it_should_be_is_told_with_its_figures(tmp_path: Path) -> None:
    used = {"seconds": 300.0, "cpu_seconds": {"trainer": 60.0}}

    document = write_report(outcome(phase(2, "kept", (0.5, 0.46), 50, "west")), used, tmp_path)

    assert all(document["claims"].values())
    told = (tmp_path / "report.md").read_text()
    assert "| 1: phase 1 | 100 | 10% | 0.300 | 0.500 | +0.200 (+0.150 to +0.250) | served |" in told
    assert "| 2 | west | 50 | 50 | 0.300 | +0.000 | yes |" in told
    assert (tmp_path / "report.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("made", "claim"),
    [
        (outcome(phase(2, "served", (0.5, 0.46), 50, "west")), "poisoned feedback cost less than 2 points"),
        (outcome(phase(2, "kept", (0.5, 0.46), 50, "north")), "the bad source is named"),
        (outcome(phase(2, "kept", (0.5, 0.46), 50, "west"), canary_places=["redis key x"]), "what nobody agreed to"),
        (outcome(phase(2, "kept", (0.5, 0.46), 50, "west"), captured_canary_is_found=False), "what nobody agreed to"),
        (outcome(phase(2, "kept", (0.5, 0.46), 50, "west"), rolled_back={}), "one call rolled back"),
        (
            outcome(phase(2, "kept", (0.5, 0.46), 50, "west"), rolled_back={**BACK, "logprobs_as_at_first": False}),
            "one call rolled back",
        ),
    ],
)
def test_what_did_not_hold_is_said(made: CourseOutcome, claim: str) -> None:
    assert next(name for name, held in claims(made).items() if not held).startswith(claim)
