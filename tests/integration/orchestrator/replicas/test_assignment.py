"""Several jobs at once: who waits, who runs, and whose the inference replicas are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.http.jobs import job_document
from services.orchestrator.job_records import CANCEL, PAUSE, RESUME, equal_for_tenants, in_turns
from services.orchestrator.replicas import ReplicaAssigner, assign, fair_counts
from services.orchestrator.steps import act_on
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1 import orchestrator_service_pb2 as wire

Document = dict[str, Any]


def submitted(context: AppContext, document: Document, priority: int = 1) -> str:
    return context.jobs.submit(parse_job_spec(document | {"priority": priority}))


def running(context: AppContext, document: Document, priority: int = 1) -> str:
    job_id = submitted(context, document, priority)
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(job_id, state, "test")
    return job_id


def alive(context: AppContext, pool: str, *replica_ids: str) -> None:
    for replica_id in replica_ids:
        context.replicas.beat(wire.HeartbeatRequest(replica_id=replica_id, pool=pool))


def states(context: AppContext, *job_ids: str) -> list[str]:
    return [context.jobs.state(job_id).value for job_id in job_ids]


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
    assert fair_counts(replicas, weights) == expected


@pytest.mark.parametrize(
    ("priorities", "replicas", "expected"),
    [
        # A tenant of one job beside one of five.
        ({"a1": 1, "a2": 1, "a3": 1, "a4": 1, "a5": 1, "b1": 1}, 12, {"a": 6, "b": 6}),
        # Priorities count within the tenant's share alone.
        ({"a1": 100, "b1": 1}, 8, {"a": 4, "b": 4}),
        ({"a1": 3, "a2": 1, "b1": 1}, 8, {"a": 4, "b": 4}),
        ({"a1": 5, "b1": 1, "c1": 2, "c2": 7}, 9, {"a": 3, "b": 3, "c": 3}),
        # Too few for all: everybody has one before anybody has two.
        ({"a1": 9, "a2": 9, "a3": 9, "b1": 1}, 2, {"a": 1, "b": 1}),
        ({"a1": 2, "a2": 1}, 6, {"a": 6}),
    ],
)
def test_tenants_have_equal_shares_of_the_replicas_however_many_jobs_they_have(
    priorities: dict[str, int], replicas: int, expected: dict[str, int]
) -> None:
    tenants = {job_id: job_id[0] for job_id in priorities}
    counts = fair_counts(replicas, equal_for_tenants(priorities, tenants))
    found = {tenant: sum(counts[job_id] for job_id in counts if job_id[0] == tenant) for tenant in expected}
    # Replicas are whole, and every job has one where there are enough.
    assert found == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("ranked", "held", "expected"),
    [
        ("a1 a2 a3 b1", "", "a1 b1 a2 a3"),
        ("a1 a2 b1 b2", "a", "b1 a1 b2 a2"),
        ("a1 a2 a3 b1 c1", "b c", "a1 a2 b1 c1 a3"),
        ("a2 a1", "a a a", "a2 a1"),
        ("", "a", ""),
    ],
)
def test_scarce_things_go_to_the_tenant_that_has_the_fewest(ranked: str, held: str, expected: str) -> None:
    assert in_turns(ranked.split(), {each: each[0] for each in ranked.split()}, held.split()) == expected.split()


def test_a_tenant_with_many_jobs_leaves_the_next_slot_to_another(
    open_context: Callable[..., AppContext], document: Document
) -> None:
    context = open_context(max_running_jobs=2)
    many = [context.jobs.submit(parse_job_spec(document | {"priority": 9}), tenant="a") for _ in range(5)]
    only = context.jobs.submit(parse_job_spec(document), tenant="b")

    context.queue.fill()

    assert states(context, *many, only) == ["validating", *["queued"] * 4, "validating"]


def test_one_more_replica_takes_none_away() -> None:
    weights = {"a": 7, "b": 3, "c": 2, "d": 1}
    for replicas in range(1, 60):
        before, after = fair_counts(replicas, weights), fair_counts(replicas + 1, weights)
        assert sum(after.values()) == replicas + 1
        assert all(after[run_id] >= before[run_id] for run_id in weights)


def test_as_few_replicas_move_as_must() -> None:
    ids = [f"r{number}" for number in range(8)]
    alone = assign(ids, {}, {"a": 1})
    beside = assign(ids, alone, {"a": 1, "b": 1})
    left = assign(ids, beside, {"b": 1})

    assert sum(alone[each] != beside[each] for each in ids) == 4
    assert sum(beside[each] != left[each] for each in ids) == 4
    assert assign(ids, beside, {"a": 1, "b": 1}) == beside


def test_a_replica_is_taken_from_a_run_only_when_the_need_lasts(context: AppContext, document: Document) -> None:
    clock = Clock()
    assigner = ReplicaAssigner(context.jobs, context.replicas, settle_seconds=5, clock=clock)
    alive(context, "inference", "r1", "r2")
    first = running(context, document)
    assert set(assigner.balance().values()) == {first}

    second = running(context, document)
    assert set(assigner.balance().values()) == {first}, "too early to move one"
    assert assigner.left_out(second)
    assert "no inference replica is assigned" in job_document(context, second).waits[0]
    clock.now += 4
    context.jobs.fail(second, "test", "it was a short one")
    assert set(assigner.balance().values()) == {first}, "nobody moved for a job that went again"

    third = running(context, document)
    assigner.balance()
    clock.now += 5
    assert sorted(assigner.balance().values()) == sorted([first, third])
    context.jobs.fail(first, "test", "it ended")
    assert set(assigner.balance().values()) == {third}, "an idle replica waits for nothing"


def test_a_restarted_orchestrator_moves_no_replica(open_context: Callable[..., AppContext], document: Document) -> None:
    before = open_context()
    alive(before, "inference", *(f"r{number}" for number in range(6)))
    for priority in (1, 2):
        running(before, document, priority)
    assigned = before.assigner.balance()

    assert open_context().assigner.balance() == assigned


def test_places_go_to_the_highest_priority_and_then_to_the_oldest(
    open_context: Callable[..., AppContext], document: Document
) -> None:
    context = open_context(max_running_jobs=2)
    old, urgent, young = (submitted(context, document, priority) for priority in (1, 5, 1))

    context.queue.fill()

    assert states(context, old, urgent, young) == ["validating", "validating", "queued"]
    assert job_document(context, young).waits == [
        "the job waits for a slot: 2 of 2 are taken; higher priorities go first"
    ]


def test_as_many_jobs_run_as_there_are_trainers_with_replicas(context: AppContext, document: Document) -> None:
    assert context.queue.capacity() == 1
    alive(context, "trainer", "t1", "t2", "t3")
    assert context.queue.capacity() == 1
    alive(context, "inference", "r1", "r2")
    assert context.queue.capacity() == 2
    jobs = [submitted(context, document) for _ in range(3)]

    context.queue.fill()

    assert states(context, *jobs) == ["validating", "validating", "queued"]


def test_a_paused_job_gives_its_place_back_and_waits_for_one_to_go_on(context: AppContext, document: Document) -> None:
    paused = running(context, document)
    other = submitted(context, document)
    context.queue.fill()
    assert states(context, other) == ["queued"]

    act_on(context.jobs, paused, PAUSE)
    context.jobs.transition(paused, JobState.PAUSED, "test")
    context.queue.fill()
    assert states(context, paused, other) == ["paused", "validating"]

    assert [act_on(context.jobs, paused, RESUME) for _ in range(2)] == [JobState.PAUSED] * 2
    context.queue.fill()
    assert states(context, paused) == ["paused"]
    assert job_document(context, paused).waits[0].startswith("the job waits for a slot: 1 of 1")
    context.jobs.fail(other, "test", "it ended")
    context.queue.fill()
    assert states(context, paused) == ["running"]
    assert [event.kind for event in context.jobs.events(paused)].count("resume_asked") == 1
    assert context.jobs.refold(paused) is JobState.RUNNING


def test_who_is_paused_again_or_cancelled_no_longer_waits_for_a_place(context: AppContext, document: Document) -> None:
    again, gone = running(context, document), running(context, document)
    for job_id in (again, gone):
        act_on(context.jobs, job_id, PAUSE)
        context.jobs.transition(job_id, JobState.PAUSED, "test")
        act_on(context.jobs, job_id, RESUME)
    act_on(context.jobs, again, PAUSE)
    act_on(context.jobs, gone, CANCEL)
    context.jobs.transition(gone, JobState.CANCELLED, "test")

    for _ in range(3):
        context.queue.fill()

    assert states(context, again, gone) == ["paused", "cancelled"]
    assert context.queue.waiting() == []
