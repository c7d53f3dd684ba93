"""Several jobs at once: who waits, who runs, and whose the inference replicas are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.orchestrator import views
from services.orchestrator.desk import Desk
from services.orchestrator.queueing import waiting
from services.orchestrator.sharing import Sharing, seats, share
from services.orchestrator.states import CANCEL, PAUSE, RESUME, JobState
from spo.job_spec import parse_job_spec
from spo.v1 import orchestrator_service_pb2 as wire

Document = dict[str, Any]


def submitted(desk: Desk, document: Document, priority: int = 1) -> str:
    return desk.jobs.submit(parse_job_spec(document | {"priority": priority}))


def running(desk: Desk, document: Document, priority: int = 1) -> str:
    job_id = submitted(desk, document, priority)
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert desk.jobs.transition(job_id, state, "test")
    return job_id


def alive(desk: Desk, pool: str, *replica_ids: str) -> None:
    for replica_id in replica_ids:
        desk.replicas.beat(wire.HeartbeatRequest(replica_id=replica_id, pool=pool))


def states(desk: Desk, *job_ids: str) -> list[str]:
    return [desk.jobs.state(job_id).value for job_id in job_ids]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("replicas", "weights", "expected"),
    [
        (4, {"a": 3, "b": 1}, {"a": 3, "b": 1}),
        (2, {"a": 100, "b": 1}, {"a": 1, "b": 1}),
        (1, {"a": 1, "b": 1}, {"a": 1, "b": 0}),
        (9, {"a": 2, "b": 1}, {"a": 6, "b": 3}),
        (3, {}, {}),
    ],
)
def test_replicas_are_shared_by_priority_with_one_each_where_possible(
    replicas: int, weights: dict[str, int], expected: dict[str, int]
) -> None:
    assert seats(replicas, weights) == expected


def test_one_more_replica_takes_none_away() -> None:
    weights = {"a": 7, "b": 3, "c": 2, "d": 1}
    for replicas in range(1, 60):
        before, after = seats(replicas, weights), seats(replicas + 1, weights)
        assert sum(after.values()) == replicas + 1
        assert all(after[run_id] >= before[run_id] for run_id in weights)


def test_as_few_replicas_move_as_must() -> None:
    ids = [f"r{number}" for number in range(8)]
    alone = share(ids, {}, {"a": 1})
    beside = share(ids, alone, {"a": 1, "b": 1})
    left = share(ids, beside, {"b": 1})

    assert sum(alone[each] != beside[each] for each in ids) == 4
    assert sum(beside[each] != left[each] for each in ids) == 4
    assert share(ids, beside, {"a": 1, "b": 1}) == beside


def test_a_replica_is_taken_from_a_run_only_when_the_need_lasts(desk: Desk, document: Document) -> None:
    clock = Clock()
    sharing = Sharing(desk.jobs, desk.replicas, settle_seconds=5, clock=clock)
    alive(desk, "inference", "r1", "r2")
    first = running(desk, document)
    assert set(sharing.balance().values()) == {first}

    second = running(desk, document)
    assert set(sharing.balance().values()) == {first}, "too early to move one"
    assert sharing.left_out(second)
    assert "no inference replica is assigned" in views.job(desk, second).waits[0]
    clock.now += 4
    desk.jobs.fail(second, "test", "it was a short one")
    assert set(sharing.balance().values()) == {first}, "nobody moved for a job that went again"

    third = running(desk, document)
    sharing.balance()
    clock.now += 5
    assert sorted(sharing.balance().values()) == sorted([first, third])
    desk.jobs.fail(first, "test", "it ended")
    assert set(sharing.balance().values()) == {third}, "an idle replica waits for nothing"


def test_a_restarted_orchestrator_moves_no_replica(open_desk: Callable[..., Desk], document: Document) -> None:
    before = open_desk()
    alive(before, "inference", *(f"r{number}" for number in range(6)))
    for priority in (1, 2):
        running(before, document, priority)
    assigned = before.sharing.balance()

    assert open_desk().sharing.balance() == assigned


def test_places_go_to_the_highest_priority_and_then_to_the_oldest(
    open_desk: Callable[..., Desk], document: Document
) -> None:
    desk = open_desk(max_running_jobs=2)
    old, urgent, young = (submitted(desk, document, priority) for priority in (1, 5, 1))

    desk.places.fill()

    assert states(desk, old, urgent, young) == ["validating", "validating", "queued"]
    assert views.job(desk, young).waits == ["the job waits for a place: 2 of 2 are taken; higher priorities go first"]


def test_as_many_jobs_run_as_there_are_trainers_with_replicas(desk: Desk, document: Document) -> None:
    assert desk.places.capacity() == 1
    alive(desk, "trainer", "t1", "t2", "t3")
    assert desk.places.capacity() == 1
    alive(desk, "inference", "r1", "r2")
    assert desk.places.capacity() == 2
    jobs = [submitted(desk, document) for _ in range(3)]

    desk.places.fill()

    assert states(desk, *jobs) == ["validating", "validating", "queued"]


def test_a_paused_job_gives_its_place_back_and_waits_for_one_to_go_on(desk: Desk, document: Document) -> None:
    paused = running(desk, document)
    other = submitted(desk, document)
    desk.places.fill()
    assert states(desk, other) == ["queued"]

    desk.jobs.act(paused, PAUSE)
    desk.jobs.transition(paused, JobState.PAUSED, "test")
    desk.places.fill()
    assert states(desk, paused, other) == ["paused", "validating"]

    assert [desk.jobs.act(paused, RESUME) for _ in range(2)] == [JobState.PAUSED] * 2
    desk.places.fill()
    assert states(desk, paused) == ["paused"]
    assert views.job(desk, paused).waits[0].startswith("the job waits for a place: 1 of 1")
    desk.jobs.fail(other, "test", "it ended")
    desk.places.fill()
    assert states(desk, paused) == ["running"]
    assert [event.kind for event in desk.jobs.events(paused)].count("resume_asked") == 1
    assert desk.jobs.refold(paused) is JobState.RUNNING


def test_who_is_paused_again_or_cancelled_no_longer_waits_for_a_place(desk: Desk, document: Document) -> None:
    again, gone = running(desk, document), running(desk, document)
    for job_id in (again, gone):
        desk.jobs.act(job_id, PAUSE)
        desk.jobs.transition(job_id, JobState.PAUSED, "test")
        desk.jobs.act(job_id, RESUME)
    desk.jobs.act(again, PAUSE)
    desk.jobs.act(gone, CANCEL)
    desk.jobs.transition(gone, JobState.CANCELLED, "test")

    for _ in range(3):
        desk.places.fill()

    assert states(desk, again, gone) == ["paused", "cancelled"]
    assert waiting(desk.redis) == []
