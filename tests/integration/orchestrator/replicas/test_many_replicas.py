"""Heartbeats of very many replicas: those without news cost little, those with news are answered at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.orchestrator import replicas, service
from services.orchestrator.container import AppContext
from services.orchestrator.replicas import HEARTBEAT_SECONDS
from services.orchestrator.service import OrchestratorService
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1 import orchestrator_service_pb2 as wire

REPLICAS = 100


def running(context: AppContext, document: dict[str, Any]) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    return job_id


def beat(orchestrator: OrchestratorService, replica_id: str, **fields: Any) -> wire.HeartbeatResponse:
    """As the service answers, by way of the wire."""
    request = wire.HeartbeatRequest(**{"replica_id": replica_id, "pool": "inference", **fields})
    orchestrator.context.replicas.beat(request)
    return wire.HeartbeatResponse.FromString(orchestrator.heartbeats.answer(request))


def commands(context: AppContext) -> int:
    return int(context.redis.info("stats")["total_commands_processed"])


def test_heartbeats_without_news_hardly_reach_redis(
    open_context: Callable[..., AppContext], document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LOOK_SECONDS", 60)
    monkeypatch.setattr(replicas, "WRITE_SECONDS", 60)
    context = open_context(replica_silence_seconds=600)
    orchestrator = OrchestratorService(context)
    job_id = running(context, document)
    names = [f"r{number}" for number in range(REPLICAS)]
    for run_id in ("", job_id):
        for name in names:
            beat(orchestrator, name, run_id=run_id)
    # What the first of them writes and looks up.
    beat(orchestrator, names[0], run_id=job_id)
    before = commands(context)

    answers = [beat(orchestrator, name, run_id=job_id) for name in names]

    assert {answer.run_id for answer in answers} == {job_id}
    assert commands(context) - before == 1, "that of counting"
    assert len(context.replicas.live()) == REPLICAS


def test_a_replica_with_news_is_registered_with_them_at_once(context: AppContext, document: dict[str, Any]) -> None:
    orchestrator = OrchestratorService(context)
    job_id = running(context, document)
    for version in (0, 0, 3):
        beat(orchestrator, "r1", run_id=job_id, policy_version=version)

    assert [each.policy_version for each in context.replicas.live()] == [3]
    assert [event.kind for event in context.jobs.events(job_id)].count("weights_applied") == 1


def test_a_replica_that_was_forgotten_joins_again(
    open_context: Callable[..., AppContext], document: dict[str, Any]
) -> None:
    context = open_context(replica_silence_seconds=1)
    orchestrator = OrchestratorService(context)
    job_id = running(context, document)
    beat(orchestrator, "r1", run_id=job_id)
    wait_until(lambda: context.replicas.live() == [], "the replica is silent for too long")
    context.replicas.drop_silent()

    beat(orchestrator, "r1", run_id=job_id)

    assert [each.replica_id for each in context.replicas.live()] == ["r1"]
    assert [event.kind for event in context.jobs.events(job_id)].count("replica_joined") == 2


def test_the_more_replicas_there_are_the_less_often_each_is_asked_for(
    context: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BEATS_PER_SECOND", 1)
    monkeypatch.setattr(service, "LOOK_SECONDS", 0)
    orchestrator = OrchestratorService(context)
    job_id = running(context, document)
    pauses = []
    for number in range(8):
        beat(orchestrator, f"r{number}")
        pauses.append(beat(orchestrator, f"r{number}", run_id=job_id).next_heartbeat_seconds)

    assert pauses[:3] == [HEARTBEAT_SECONDS, HEARTBEAT_SECONDS, 3]
    # Two lost heartbeats make nobody silent.
    assert max(pauses) == pytest.approx(context.settings.replica_silence_seconds / 3)
