"""One problem of each broken kind among good ones: the job trains, evaluates the others, and names the broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.reproduce.plan import merged
from spo.tasks.toy import toy_tasks
from tests.e2e.conftest import SHORT, demo_spec
from tests.e2e.live.test_verifiers import QUICK
from tests.support.platform import check_ledgers

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.cpu_seconds(200),
    pytest.mark.timeout(900),
]

# Above 5 % of dead letters a job stops.
GOOD = 150
SCORING = """
import json
import os
import time


def score(response, fault="", **others):
    if fault == "throws":
        raise LookupError("the table of this row is missing")
    if fault == "sleeps":
        time.sleep(3600)
    if fault == "nan":
        return float("nan")
    if fault == "text":
        return "good"
    if fault == "beyond":
        return 2.0
    if fault == "leaves":
        os._exit(0)
    if fault == "memory":
        return len(bytearray(1 << 36))
    return {"prints": float("print" in response), "short": 1.0 if len(response) < 40 else 0.5}
"""
# What the judge says of some of them.
REASONS = ("the table of this row is missing", "nan", "2.0")
FAULTS = ("throws", "sleeps", "nan", "text", "beyond", "leaves", "memory")


def rows(statements: list[str], faults: list[str]) -> str:
    """Good rows first, then a broken one of each kind."""
    broken = [""] * (len(statements) - len(faults)) + faults
    return "\n".join(
        json.dumps({"statement": text, "response_format": "raw", "arguments": {"fault": fault}})
        for text, fault in zip(statements, broken, strict=True)
    )


def test_a_job_trains_and_evaluates_beside_broken_problems_and_names_them(
    live: Any, client: Client, tmp_path: Path, reference_model: Path
) -> None:
    (tmp_path / "score.py").write_text(SCORING)
    statements = [problem.statement for problem in toy_tasks(GOOD + len(FAULTS) + 6 + len(FAULTS), 0, 0).train]
    (tmp_path / "train.jsonl").write_text(rows(statements[: GOOD + len(FAULTS)], list(FAULTS)))
    (tmp_path / "held_out.jsonl").write_text(rows(statements[GOOD + len(FAULTS) :], list(FAULTS)))
    tasks = {
        "kind": "jsonl",
        "path": str(tmp_path / "train.jsonl"),
        "evaluation_path": str(tmp_path / "held_out.jsonl"),
        "train_problems": GOOD + len(FAULTS),
        "evaluation_problems": 6 + len(FAULTS),
        "verifier": {"kind": "python", "path": str(tmp_path / "score.py")},
    }
    spec = demo_spec(reference_model, merged(SHORT, QUICK, {"value": {"samples": 2}}))
    reward = spec["tasks"].get("reward", {})
    job = client.submit({**spec, "name": "broken", "tasks": {**tasks, "reward": reward}})
    beside = client.submit({**demo_spec(reference_model, merged(SHORT, QUICK)), "name": "honest neighbour"})

    ended = client.wait(job.id, 800)

    assert (ended.state, ended.failure) == ("succeeded", None)
    assert client.wait(beside.id, 300).state == "succeeded"
    last = client.evaluations(job.id)[-1]
    assert (last.decided, last.problems) == (6, 6 + len(FAULTS))
    assert last.scores["score"] > 0
    assert len({each.prompt_id for each in last.undecided}) == len(FAULTS)
    assert all(any(word in each.reason for each in last.undecided) for word in REASONS), last.undecided
    assert client.evaluations(beside.id)[-1].decided in (None, 4)

    letters = client.dead_letters.newest(job.id)
    # Which have been tried often enough when the job is done is the machine's pace; the evaluation named all of them.
    assert any(word in each.reason for each in letters for word in REASONS), letters
    assert any(event.kind == "dead_letters" for event in client.events(job.id))
    assert client.dead_letters.newest(beside.id) == []
    for letter in letters:
        client.dead_letters.drop(letter.id, job.id)
    check_ledgers(live.platform, job.id, beside.id)
