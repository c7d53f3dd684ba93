"""How many replicas are wanted: from heartbeats, steps and deliveries, and what becomes of it on a virtual clock."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from benchmarks import autoscaling as simulation
from services.orchestrator import redis_keys as own_keys
from services.orchestrator.autoscaling import JobFacts, PoolDemand
from services.orchestrator.container import AppContext
from services.orchestrator.http.platform import refresh_gauges
from services.orchestrator.service import OrchestratorService
from services.orchestrator.serving import Change, Target
from spo import redis_keys
from spo.observability import WANTED_REPLICAS
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles
from spo.v1 import orchestrator_service_pb2 as wire


def beat(context: AppContext, replica_id: str, pool: str, load: float, run_id: str = "") -> None:
    context.replicas.beat(wire.HeartbeatRequest(replica_id=replica_id, pool=pool, load=load, run_id=run_id))


def running(context: AppContext, document: dict[str, Any]) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    return job_id


def delivered(context: AppContext, job_id: str, trajectories: int) -> None:
    context.redis.hincrby(redis_keys.replay_counters(job_id), "inserted:online", trajectories)


def stepped(context: AppContext, job_id: str, step: int, waited: float, worked: float) -> None:
    point = {"step": step, "wait_seconds": waited, "step_seconds": worked}
    context.redis.zadd(own_keys.job_metrics(job_id), {json.dumps(point): step})


def test_no_pool_is_wanted_without_jobs_and_one_replica_of_each_as_soon_as_one_is_submitted(
    context: AppContext, document: dict[str, Any]
) -> None:
    assert set(context.autoscaling.observe(0.0).values()) == {0}
    job_id = context.jobs.submit(parse_job_spec(document))
    wanted = context.autoscaling.observe(2.0)
    assert (wanted["inference"], wanted["sandbox-judge"]) == (1, 1)
    context.jobs.transition(job_id, JobState.CANCELLED, "test", expected=(JobState.QUEUED,))
    assert set(context.autoscaling.observe(4.0).values()) == {0}


def test_what_trainers_wait_and_replicas_deliver_says_how_many_are_wanted(
    context: AppContext, document: dict[str, Any]
) -> None:
    """A replica that is always busy delivers half a group a second; the trainer worked a quarter of the time."""
    job_id = running(context, document)
    spec = context.jobs.spec(job_id)
    trajectories = int(spec.replay.online_share * spec.trainer.batch_size / spec.replay.samples_per_insert)
    seconds = 2 * trajectories / spec.rollout.samples_per_prompt
    for number in range(60):
        beat(context, "r0", "inference", 1.0, job_id)
        beat(context, "j0", "sandbox-judge", 0.3)
        delivered(context, job_id, trajectories)
        stepped(context, job_id, number + 1, 0.75 * seconds, 0.25 * seconds)
        context.autoscaling.observe(seconds * number)

    wanted = context.autoscaling.wanted
    assert context.autoscaling.demand.needs()[job_id] == pytest.approx(4, rel=0.15)
    assert wanted == {"inference": 5, "sandbox-judge": 2, "verifier": 0}
    refresh_gauges(context)
    assert WANTED_REPLICAS.labels(pool="inference")._value.get() == 5


def test_the_replicas_of_a_run_set_its_limiter_and_hear_their_share(
    context: AppContext, peers: ServiceDoubles, document: dict[str, Any]
) -> None:
    job_id = running(context, document)
    for number in range(3):
        beat(context, f"r{number}", "inference", 1.0, job_id)
    peers.replay.groups_per_replica = 7
    context.dispatcher.dispatch(job_id)

    assert peers.replay.asked.replicas == 3
    asked = wire.HeartbeatRequest(replica_id="r0", pool="inference", run_id=job_id)
    answer = OrchestratorService(context).heartbeats.answer(asked)
    assert wire.HeartbeatResponse.FromString(answer).groups_in_hand == 7


def ended(context: AppContext, document: dict[str, Any], model: str = "/models/pi0") -> str:
    job_id = context.jobs.submit(parse_job_spec({**document, "model": {"path": model}}))
    assert context.jobs.transition(job_id, JobState.CANCELLED, "test")
    return job_id


def test_whoever_asks_for_an_ended_jobs_policy_wakes_inference_alone(
    context: AppContext, document: dict[str, Any]
) -> None:
    job_id, other = ended(context, document), ended(context, document, "/models/other")
    assert set(context.autoscaling.observe(0.0).values()) == {0}
    context.assigner.note_use(job_id)
    assert context.autoscaling.observe(2.0) == {"inference": 1, "sandbox-judge": 0, "verifier": 0}
    # Another model needs a replica of its own, another job of the same model none.
    context.assigner.note_use(ended(context, document))
    assert context.autoscaling.observe(4.0)["inference"] == 1
    context.assigner.note_use(other)
    assert context.autoscaling.observe(6.0)["inference"] == 2


def test_a_name_keeps_its_replicas_whoever_asks_until_it_is_told_otherwise(
    context: AppContext, document: dict[str, Any]
) -> None:
    job_id, later = ended(context, document), ended(context, document)
    served = context.served_models
    served.publish("", "assistant", Target(job_id, 0), Change("test", min_replicas=2))
    assert context.autoscaling.observe(0.0) == {"inference": 2, "sandbox-judge": 0, "verifier": 0}
    assert context.assigner.wanted() == {job_id: 2}
    # What is published next keeps what the name was given.
    assert served.publish("", "assistant", Target(later, 0), Change("test")).min_replicas == 2
    assert context.assigner.wanted() == {later: 2}
    served.publish("", "assistant", Target(later, 0), Change("test", min_replicas=0))
    assert context.autoscaling.observe(2.0)["inference"] == 0


def test_completions_under_way_want_more_replicas_and_fewer_some_time_after(
    context: AppContext, document: dict[str, Any]
) -> None:
    job_id = ended(context, document)
    context.assigner.note_use(job_id)
    traffic, per_replica = context.autoscaling.traffic, context.settings.serving_streams_per_replica
    with ExitStack() as under_way:
        for _ in range(3 * per_replica):
            under_way.enter_context(traffic.completion(job_id))
        wanted = [context.autoscaling.observe(at)["inference"] for at in (0.0, 2.0)]
    assert wanted == [3, 3]
    wanted = [context.autoscaling.observe(at)["inference"] for at in (4.0, 20.0, 200.0, 400.0)]
    assert (wanted[0], wanted[-1]) == (3, 1)
    assert wanted == sorted(wanted, reverse=True)


def test_replicas_that_have_not_had_time_to_deliver_do_not_change_what_is_wanted() -> None:
    demand = PoolDemand()

    def look(at: float, replicas: int, groups: float) -> int:
        loads = {f"r{number}": 1.0 for number in range(replicas)}
        facts = JobFacts("run", loads, groups, 8.0 * replicas, taken=8, step=int(at / 8), waited_seconds=6,
                         worked_seconds=2)  # fmt: skip
        return demand.observe(at, [facts], {}, {"inference": 1})["inference"]

    before = [look(8.0 * tick, 1, 8.0 * tick) for tick in range(1, 40)][-1]
    assert before == 5
    # Four more have joined at once and are busy; what they make arrives eight seconds later.
    assert [look(320.0 + tick, 5, 320.0 + tick) for tick in range(8)] == [5] * 8


def test_a_jobs_first_groups_are_taken_to_cost_what_the_other_jobs_do() -> None:
    demand = PoolDemand()

    def facts(run_id: str, at: float, delivered: float) -> JobFacts:
        return JobFacts(run_id, {run_id: 1.0}, delivered, 8.0, taken=8, step=int(at / 8), waited_seconds=6,
                        worked_seconds=2)  # fmt: skip

    for tick in range(1, 40):
        at = 8.0 * tick
        before = demand.observe(at, [facts("known", at, at)], {}, {"inference": 1})["inference"]
    # The new one's trainer works as fast; nothing of its own has been delivered.
    both = [
        demand.observe(at, [facts("known", at, at), facts("new", at - 320, 0)], {}, {"inference": 2})["inference"]
        for at in (320.0, 328.0, 336.0)
    ]
    assert (before, both[-1]) == (5, 9)


def test_eight_replicas_make_seven_times_the_rollouts_of_one_through_dispatcher_and_limiter(
    redis_client: redis.Redis,
) -> None:
    one = simulation.rollouts_per_second(redis_client, 1, seconds=60)
    redis_client.flushall()
    assert simulation.rollouts_per_second(redis_client, 8, seconds=60) >= 7 * one


@pytest.mark.slow
def test_pools_follow_a_step_go_to_zero_and_back_and_stay_calm_under_a_constant_load(redis_client: redis.Redis) -> None:
    step = simulation.step(redis_client)
    assert (step.until_enough <= 90, step.until_back <= 300) == (True, True), step
    redis_client.flushall()
    burst = simulation.burst(redis_client)
    assert (burst.until_enough <= 120, burst.until_back <= 300) == (True, True), burst
    redis_client.flushall()
    assert simulation.constant(redis_client, minutes=10).changes_per_10_minutes < 3
