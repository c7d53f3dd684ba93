"""One short job per kind of verifier, on one whole platform: each is sampled, scored, stored and learned from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spo.client import Client
from spo.reproduce.plan import merged
from spo.tasks.toy import toy_tasks
from tests.e2e.conftest import SHORT, demo_spec
from tests.support.platform import check_ledgers

STEPS = 2
QUICK: dict[str, dict[str, Any]] = {
    "value": {"samples": 4, "unsolved": "keep"},
    "offline": {"human_solutions": False},
    "replay": {"mix": [{"source": "online", "share": 1.0}], "min_online": 8, "error_buffer": 32},
    "trainer": {"steps": STEPS, "batch_size": 8, "micro_batch_size": 8, "update_interval": 1, "checkpoint_interval": 2},
    "evaluation": {"interval_steps": STEPS, "samples": 2, "ks": [1]},
}
SCORING = """
def score(response, statement, **others):
    assert statement
    return {"prints": float("print" in response), "short": 1.0 if len(response) < 40 else 0.5}
"""
PRINTS = {"expected": ["(?s).*print.*"], "comparison": "regular_expression", "extraction": "whole"}
# Right is every program that runs to its end.
RUNS = {"style": "module", "before": "def input(): return '1'", "code": "assert True", "entry_point": ""}

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(400), pytest.mark.timeout(1800)]


def task_file(path: Path, **decides: Any) -> dict[str, Any]:
    """Statements of the toy contest, which its model knows, decided otherwise."""
    problems = toy_tasks(8, 0, 0).train
    path.write_text("\n".join(json.dumps({"statement": problem.statement, **decides}) for problem in problems))
    return {"kind": "jsonl", "path": str(path), "train_problems": 6, "evaluation_problems": 2}


def test_a_job_of_each_kind_is_scored_and_learned_from(
    live: Any, client: Client, tmp_path: Path, reference_model: Path, outside: str
) -> None:
    function = tmp_path / "score.py"
    function.write_text(SCORING)
    told = task_file(tmp_path / "told.jsonl", arguments={"level": 1}, response_format="raw")
    python = {"kind": "python", "path": str(function)}
    parts = [
        {"name": "right", "weight": 0.5, "verifier": {"kind": "program"}},
        {"name": "form", "weight": 0.5, "verifier": python},
        {"name": "length", "weight": 0.2, "length": {"free_characters": 10, "most_characters": 200}},
    ]
    judge = {"kind": "model", "address": f"http://{outside}", "model": "m", "rubric": "Does it run?", "votes": 2}
    kinds: dict[str, dict[str, Any]] = {
        "answer": task_file(tmp_path / "answers.jsonl", answer=PRINTS),
        "code_tests": task_file(tmp_path / "code.jsonl", code_tests=RUNS, response_format="raw"),
        "python": {**told, "verifier": python},
        "http": {**told, "verifier": {"kind": "http", "url": f"http://{outside}/score"}},
        "model": {**told, "verifier": judge},
        "composition": {"kind": "toy", "verifier": {"kind": "composition", "parts": parts, "pass_score": 0.5}},
    }
    short = merged(SHORT, QUICK)
    jobs = {}
    for kind, tasks in kinds.items():
        spec = demo_spec(reference_model, short)
        own = {"train_problems": 6, "evaluation_problems": 2, "reward": spec["tasks"].get("reward", {})}
        jobs[kind] = client.submit({**spec, "name": kind, "tasks": {**own, **tasks}}).id
    ended = {kind: client.wait(job_id, 1200) for kind, job_id in jobs.items()}
    assert {kind: (job.state, job.failure) for kind, job in ended.items()} == dict.fromkeys(kinds, ("succeeded", None))
    check_ledgers(live.platform, *jobs.values())

    last = {kind: client.evaluations(job_id)[-1] for kind, job_id in jobs.items()}
    assert last["answer"].pass_at_k["1"].value > 0
    assert {kind: sorted(found.scores) for kind, found in last.items()} == {
        "answer": [],
        "code_tests": [],
        "python": ["prints", "score", "short"],
        "http": ["prints", "score"],
        "model": ["score"],
        "composition": ["form", "form.prints", "form.short", "length", "right", "score"],
    }
    assert last["model"].scores["score"] == pytest.approx(0.7)
