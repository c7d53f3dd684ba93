"""Whose program a judge's free worker takes next, played through without a sandbox."""

from __future__ import annotations

import threading
from collections import Counter

from services.sandbox_judge.program_judge import JudgeOptions
from services.sandbox_judge.stage import KEPT_SECONDS, JudgeQueue, JudgeTask
from spo.v1 import verdict_pb2

TRAINING, EVALUATION = 1, 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def task(tenant: str, name: str = "", shares: str = "") -> JudgeTask:
    return JudgeTask((name,), "python", verdict_pb2.TestSet(), JudgeOptions(), False, (), shares, tenant)


def queue_of(workers: int, *tasks: JudgeTask) -> tuple[JudgeQueue, Clock]:
    clock = Clock()
    waiting = JudgeQueue(workers, clock)
    for each in tasks:
        waiting.put(TRAINING, each)
    return waiting, clock


def test_a_tenant_by_itself_has_every_worker() -> None:
    waiting, _ = queue_of(4, *[task("a")] * 9)

    assert [waiting.take()[0].tenant for _ in range(4)] == ["a"] * 4


def test_where_two_are_there_each_has_half_of_the_workers_however_much_one_has_waiting() -> None:
    waiting, _ = queue_of(4, *[task("a")] * 900, *[task("b")] * 3)

    assert Counter(waiting.take()[0].tenant for _ in range(4)) == {"a": 2, "b": 2}


def test_a_tenant_that_was_there_just_now_finds_its_part_of_the_workers_free() -> None:
    waiting, clock = queue_of(2, *[task("a")] * 900, task("b"))
    assert {waiting.take()[0].tenant for _ in range(2)} == {"a", "b"}
    waiting.done("b")
    taken: list[str] = []
    worker = threading.Thread(target=lambda: taken.append(waiting.take()[0].tenant), daemon=True)
    worker.start()

    worker.join(1.0)
    assert taken == [], "the second worker is kept for the second tenant"
    waiting.put(TRAINING, task("b"))
    worker.join(10)
    assert taken == ["b"]

    waiting.done("b")
    clock.now += KEPT_SECONDS
    assert waiting.take()[0].tenant == "a", "who has gone keeps nothing"


def test_a_single_worker_goes_to_who_has_used_it_less_in_seconds_and_not_in_programs() -> None:
    waiting, clock = queue_of(1, *[task("slow")] * 20, *[task("quick")] * 20)
    used: Counter[str] = Counter()
    for _ in range(22):
        tenant = waiting.take()[0].tenant
        clock.now += 10.0 if tenant == "slow" else 1.0
        used[tenant] += 1
        waiting.done(tenant)

    assert used == {"slow": 2, "quick": 20}


def test_who_comes_late_is_owed_nothing_for_the_time_before() -> None:
    waiting, clock = queue_of(1, *[task("a")] * 20)
    for _ in range(10):
        waiting.take()
        clock.now += 10.0
        waiting.done("a")
    for _ in range(10):
        waiting.put(TRAINING, task("b"))
    turns = []
    for _ in range(4):
        turns.append(waiting.take()[0].tenant)
        clock.now += 10.0
        waiting.done(turns[-1])

    assert Counter(turns) == {"a": 2, "b": 2}


def test_evaluations_go_first_within_the_share_of_their_tenant_alone() -> None:
    waiting, _ = queue_of(2, task("b", "rollout"))
    for number in range(5):
        waiting.put(EVALUATION, task("a", f"problem {number}"))
    waiting.put(TRAINING, task("a", "rollout"))

    assert {waiting.take()[0].tenant for _ in range(2)} == {"a", "b"}


def test_the_room_of_the_queue_is_divided_among_those_who_have_something_in_it() -> None:
    waiting, _ = queue_of(1, *[task("a")] * 100)

    assert waiting.room("a", 100) == 0
    assert waiting.room("b", 100) == 50, "whoever comes finds room, however full it is of another's"
    waiting.put(TRAINING, task("b"))
    assert waiting.room("b", 100) == 49
    assert waiting.room("a", 100) < 0


def test_every_task_is_taken_once_by_workers_that_race_for_groups_that_share_a_fork() -> None:
    names = [f"{tenant}{number}" for number in range(400) for tenant in "ab"]
    waiting, _ = queue_of(4, *[task(name[0], name, shares=name[0]) for name in names])
    found: list[str] = []

    def work() -> None:
        while taken := waiting.take():
            assert len({each.tenant for each in taken}) == 1
            found.extend(each.programs[0] for each in taken)
            waiting.done(taken[0].tenant)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()
    waiting.end()
    for worker in workers:
        worker.join(20)

    assert sorted(found) == sorted(names)
    assert len(waiting) == 0
