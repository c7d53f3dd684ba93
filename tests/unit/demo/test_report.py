"""The report says what happened, also when little did."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from spo.client.models import Event, Job, MetricSeries, StepEvaluation
from spo.demo.demo import Demo, DemoOutcome, ProgressView, report_of, write_report
from tests.support.evaluations import step_evaluation
from tests.support.openapi_documents import SCHEMAS, example


def evaluation(step: int, pass_at_1: float, pass_at_10: float) -> StepEvaluation:
    return step_evaluation(step, {"1": pass_at_1, "10": pass_at_10}, distinct=1.0 + step)


def job(state: str, step: int = 0) -> Job:
    document = example(SCHEMAS["Job"]) | {"id": "job_1", "state": state, "spec": {"seed": 0}}
    return Job.model_validate(document | {"progress": {**document["progress"], "step": step, "steps": 20}})


def moved(seq: int, second: int, to: str) -> Event:
    return Event(seq=seq, at=f"2026-01-01T00:00:{second:02d}Z", actor="trainer", kind="state", body={"to": to})


def outcome(**changes: Any) -> DemoOutcome:
    facts: dict[str, Any] = {
        "job": job("succeeded", step=20),
        "events": [
            moved(1, 0, "queued"),
            moved(2, 3, "estimating"),
            moved(3, 10, "running"),
            moved(4, 31, "succeeded"),
        ],
        "evaluations": [evaluation(0, 0.1, 0.3), evaluation(10, 0.4, 0.6), evaluation(20, 0.5, 0.8)],
        "series": MetricSeries(steps=[1, 2], series={"loss": [0.5, None], "reward": [-0.9, -0.8]}),
        "trajectories": {"online": 64, "offline": 300},
        "weight_versions": 2,
        "services": [{"name": "trainer", "pid": 7, "restarts": 1, "address": "127.0.0.1:1"}],
        "peak_memory_bytes": 3 << 30,
        "cpu_seconds": {"trainer": 12.34},
        "setup_seconds": 40.04,
        "total_seconds": 71.0,
        "first_point_seconds": 45.0,
    }
    return DemoOutcome(**facts | changes)


def test_the_report_holds_every_promised_figure(tmp_path: Path) -> None:
    report = write_report(outcome(), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (report["pass_at_1"]["before"], report["pass_at_1"]["after"]) == (0.1, 0.5)
    assert (report["pass_at_10"]["before"], report["pass_at_10"]["after"]) == (0.3, 0.8)
    low, high = report["pass_at_10"]["intervals"]["after"]
    assert low <= 0.8 <= high
    assert report["cpu_seconds"] == {"trainer": 12.3}
    assert report["distinct_solutions"] == {"before": 1.0, "after": 21.0}
    assert report["steps"] == 20
    assert report["wall_seconds"] == {"setup": 40.0, "estimate": 7.0, "train": 21.0, "total": 71.0, "first_point": 45.0}
    assert report["trajectories"] == {"online": 64, "offline": 300}
    assert report["weight_versions"] == 2
    assert report["services"] == [{"name": "trainer", "pid": 7, "restarts": 1}]
    assert report["spec"] == {"seed": 0}


def test_a_job_that_failed_before_its_first_evaluation_still_gets_a_report(tmp_path: Path) -> None:
    failed = job("failed")
    report = write_report(
        outcome(job=failed, events=[], evaluations=[], series=MetricSeries(), first_point_seconds=None), tmp_path
    )
    assert report["state"] == "failed"
    assert report["pass_at_10"] == {"before": None, "after": None, "intervals": {"before": None, "after": None}}
    assert report["wall_seconds"]["train"] is None
    assert (tmp_path / "report.png").exists()


def test_a_paused_job_counts_from_its_first_start_to_its_end() -> None:
    paused = [moved(1, 3, "estimating"), moved(2, 10, "running"), moved(3, 20, "paused"), moved(4, 30, "running")]
    report = report_of(outcome(events=[*paused, moved(5, 50, "succeeded")]))
    assert report["wall_seconds"]["train"] == 40.0


@pytest.mark.parametrize("is_terminal", [True, False])
def test_curves_are_asked_for_where_they_are_drawn(is_terminal: bool) -> None:
    platform = Mock(memory_bytes=lambda: 1 << 30, services=list)
    client = Mock(evaluations=lambda _: [evaluation(0, 0.1, 0.5)], get=lambda _: job("succeeded", 2))
    client.metrics.return_value = MetricSeries()
    shown = StringIO()

    with ProgressView(Console(file=shown, force_terminal=is_terminal, width=200)) as view:
        demo = Demo(platform, Mock(done=1, total=1), view)
        assert demo._follow(client, job("running")).state == "succeeded"

    assert "0.50" in shown.getvalue()
    assert client.metrics.called == is_terminal
