"""The table of answers written by hand at the real judge: mathematics in the sandbox, all else beside it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import redis

from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.tasks.records import Record, jsonl_problem
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import Outcome

TABLE = Path(__file__).parents[2] / "unit" / "tasks" / "answers.jsonl"


@pytest.mark.slow
def test_every_answer_of_the_table_gets_its_verdict(redis_client: redis.Redis) -> None:
    rows = [json.loads(line) for line in TABLE.read_text().splitlines()]
    by_rule: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for row in rows:
        by_rule[json.dumps(row["rule"])].append((row["response"], row["right"]))
    settings = Settings().model_copy(update={"recheck_rate": 0.0})
    scheduler = JudgeScheduler(redis_client, settings, choose_tier(settings), workers=1)

    waiting = []
    for rule, answers in by_rule.items():
        problem = jsonl_problem(Record("table, line 1", {"statement": "?", "answer": json.loads(rule)}))
        digest = scheduler.test_sets.upload(problem.tests)
        responses = [response for response, _ in answers]
        waiting.append(scheduler.submit(responses, problem.language, digest, Priority.PRIORITY_TRAINING))
    differing = [
        (rule, response, verdict.detail)
        for (rule, answers), batch in zip(by_rule.items(), waiting, strict=True)
        for (response, right), verdict in zip(answers, batch.verdicts(120), strict=True)
        if verdict.outcome != (Outcome.OUTCOME_ACCEPTED if right else Outcome.OUTCOME_WRONG_ANSWER)
    ]
    scheduler.close(5)

    assert len(rows) >= 200
    assert differing == []
