"""Groups of one run and one function share a fork of the sandbox; what one of them spoils harms no other."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from services.sandbox_judge.embedded import MemoryStore
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.program_judge import JudgeOptions
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import Batch, JudgeQueue, JudgeScheduler, JudgeTask
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import Limits, Outcome, ScoringFunction

# The score is how many the process has scored before, in 64ths: what shares a process counts on.
COUNTS = """
seen = [0]
def score(response, **others):
    if response == "wait":
        import time
        time.sleep(1.1)
    if response == "throws":
        raise ValueError("no")
    if response == "exits":
        import os
        os._exit(0)
    if response == "hangs":
        while True:
            pass
    if response == "grows":
        held = [bytearray(1 << 24) for _ in range(64)]
    seen[0] += 1
    return (seen[0] - 1) / 64
"""


@pytest.fixture
def judge() -> Iterator[JudgeScheduler]:
    settings = Settings().model_copy(update={"recheck_rate": 0.0, "cache_seconds": 0})
    scheduler = JudgeScheduler(MemoryStore(), settings, choose_tier(settings), workers=1)
    yield scheduler
    scheduler.close(30)


def submitted(judge: JudgeScheduler, *responses: str, run_id: str = "a", source: str = COUNTS, group: int = 0) -> Batch:
    function = ScoringFunction(source=source, function="score", arguments_json=json.dumps({"group": group}))
    limits = Limits(cpu_seconds=0.2, wall_seconds=0.5)
    tests = verdict_pb2.TestSet(scoring_function=function, limits=limits, pass_score=0.5)
    digest = judge.test_sets.upload(tests)
    return judge.submit(responses, "text", digest, Priority.PRIORITY_TRAINING, run_id=run_id)


def queued(judge: JudgeScheduler, *groups: dict[str, object]) -> list[list[float | str]]:
    """What comes of groups that wait together behind one that takes its time, each as scores or names of outcomes."""
    first = submitted(judge, "wait", run_id="another")
    batches = [submitted(judge, *each.pop("responses"), **each) for each in groups]  # type: ignore[arg-type, misc]
    first.verdicts(60)
    return [
        [
            one.score * 64 if one.HasField("score") else Outcome.Name(one.outcome).removeprefix("OUTCOME_").lower()
            for one in batch.verdicts(120)
        ]
        for batch in batches
    ]


def test_groups_of_one_run_and_function_are_scored_in_one_process(judge: JudgeScheduler) -> None:
    assert queued(
        judge,
        {"responses": ("a", "b")},
        {"responses": ("c",), "group": 1},
        {"responses": ("a", "b"), "run_id": "b"},
        {"responses": ("d",), "source": COUNTS + "\n# another"},
        {"responses": ("e",), "group": 2},
        {"responses": ("f",), "run_id": ""},
        {"responses": ("g",), "run_id": ""},
    ) == [[0, 1], [2], [0, 1], [0], [3], [0], [0]]


@pytest.mark.parametrize("spoils", ["throws", "exits", "hangs", "grows"])
def test_a_group_that_spoils_its_process_harms_no_other(judge: JudgeScheduler, spoils: str) -> None:
    found = queued(
        judge,
        {"responses": ("a", "b")},
        {"responses": ("c", spoils, "d"), "group": 1},
        {"responses": ("e",), "group": 2},
    )

    assert found[0] == [0, 1], "judged again, alone"
    assert found[2] == [0]
    assert found[1][1] == "internal_error"


def test_a_process_that_has_lived_takes_no_further_group(judge: JudgeScheduler) -> None:
    found = queued(
        judge,
        {"responses": ("a", "wait")},
        {"responses": ("b",), "group": 1},
        {"responses": ("c",), "group": 2},
    )

    assert found == [[0, 1], [0], [1]]


def test_a_source_that_replaces_its_module_is_loaded_anew(judge: JudgeScheduler) -> None:
    source = "import sys\nsys.modules['scoring'] = None\n" + COUNTS

    found = queued(judge, {"responses": ("a",), "source": source}, {"responses": ("b",), "source": source, "group": 1})

    assert found == [[0], [0]]


def task(shares: str, program: str = "") -> JudgeTask:
    return JudgeTask((program,), "text", verdict_pb2.TestSet(), JudgeOptions(), False, (), shares)


def test_no_more_are_taken_than_leave_every_worker_some() -> None:
    waiting = JudgeQueue(workers=2)
    for _ in range(5):
        waiting.put(1, task("a"))
    waiting.put(1, task(""))
    waiting.put(0, task("a"))

    assert [len(waiting.take()) for _ in range(2)] == [1, 3]
    waiting.keep_apart("a")
    assert [len(waiting.take()) for _ in range(3)] == [1, 1, 1]
    waiting.end()
    assert waiting.take() == []
