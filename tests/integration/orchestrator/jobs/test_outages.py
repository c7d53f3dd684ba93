"""After an outage of the orchestrator or of Redis nobody has lost anything yet; clocks of machines decide nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import now_ms
from services.orchestrator.container import AppContext
from spo import redis_keys
from spo.errors import LeaseLost
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1 import orchestrator_service_pb2 as wire

LEASE = 1.0
OUTAGE = 2.0
SILENCE = 1.0


@pytest.fixture
def before(open_context: Callable[..., AppContext]) -> AppContext:
    """The orchestrator before the outage."""
    return open_context(lease_seconds=LEASE, replica_silence_seconds=SILENCE)


def running_job(context: AppContext, document: dict[str, Any]) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(job_id, state, "test")
    return job_id


def next_leader(open_context: Callable[..., AppContext], client: redis.Redis) -> AppContext:
    """Another process takes the lead over, as of now."""
    client.hset(own_keys.leader(), mapping={"holder": "the one before", "expires_unix_ms": 0})
    return open_context(lease_seconds=LEASE, replica_silence_seconds=SILENCE)


def renewal(grant: wire.LeaseJobResponse) -> wire.RenewLeaseRequest:
    return wire.RenewLeaseRequest(run_id=grant.run_id, trainer_id="healthy", epoch=grant.epoch)


def pass_time(client: redis.Redis, seconds: float) -> None:
    """Wait, by the server's clock."""
    began: Any = client.time()
    end = began[0] + began[1] / 1e6 + seconds
    wait_until(lambda: (now := client.time())[0] + now[1] / 1e6 > end, f"{seconds} s pass", seconds + 10)


def test_a_trainer_keeps_its_job_over_an_outage_longer_than_its_lease(
    before: AppContext, open_context: Callable[..., AppContext], redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    job_id = running_job(before, document)
    grant = before.leases.wait_for_job("healthy", 0)
    pass_time(redis_client, OUTAGE)

    after = next_leader(open_context, redis_client)
    assert after.leases.wait_for_job("spare", 0.1).run_id == "", "the healthy one has had no chance to renew"
    after.leases.renew(renewal(grant))

    pass_time(redis_client, LEASE / 2)
    assert after.leases.wait_for_job("spare", 0.1).run_id == ""
    wait_until(lambda: after.leases.wait_for_job("spare", 0).run_id == job_id, "its lease ends without renewals", 10)
    with pytest.raises(LeaseLost):
        after.leases.renew(renewal(grant))


def test_a_trainer_that_died_during_the_outage_keeps_its_job_for_one_lease_more(
    before: AppContext, open_context: Callable[..., AppContext], redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    job_id = running_job(before, document)
    before.leases.wait_for_job("healthy", 0)
    pass_time(redis_client, OUTAGE)
    after = next_leader(open_context, redis_client)
    began = time.monotonic()

    wait_until(lambda: after.leases.wait_for_job("spare", 0).run_id == job_id, "the spare has the job", 10)

    assert LEASE * 0.8 < time.monotonic() - began < LEASE + 3


def test_a_lease_that_was_over_before_the_outage_is_given_away_at_once(
    before: AppContext, open_context: Callable[..., AppContext], redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    job_id = running_job(before, document)
    before.leases.wait_for_job("healthy", 0)
    pass_time(redis_client, OUTAGE)
    assert before.leadership.take(), "the leader was there all the time"

    after = next_leader(open_context, redis_client)

    assert after.leases.wait_for_job("spare", 0).run_id == job_id


def test_redis_away_for_longer_than_a_lease_is_an_outage_too(
    before: AppContext, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    running_job(before, document)
    before.leases.wait_for_job("healthy", 0)
    pass_time(redis_client, OUTAGE)
    # What its last renewal says after a Redis that did not answer for ten seconds.
    renewed = int(redis_client.hget(own_keys.leader(), "renewed_unix_ms") or 0)
    redis_client.hset(own_keys.leader(), "renewed_unix_ms", renewed - 10_000)

    assert before.leadership.take()

    assert before.leadership.fence.epoch == 1, "it leads on"
    assert before.leases.wait_for_job("spare", 0).run_id == ""


def test_an_hour_back_on_the_clock_of_redis_keeps_a_dead_trainers_job_for_one_lease_at_most(
    before: AppContext, redis_client: redis.Redis, document: dict[str, Any]
) -> None:
    job_id = running_job(before, document)
    before.leases.wait_for_job("dead", 0)
    expiry = before.leases.lease(job_id).expires_unix_ms + 3_600_000
    redis_client.hset(own_keys.job_lease(job_id), "expires_unix_ms", expiry)

    assert before.leases.lease(job_id).expires_unix_ms == expiry
    assert before.leases.lease(job_id).expires_unix_ms < expiry - 3_500_000, "reading it made it one lease from now"
    wait_until(lambda: before.leases.wait_for_job("spare", 0).run_id == job_id, "the spare has the job", 10)


def test_the_orchestrators_own_clock_gives_no_lease_and_drops_no_replica(
    before: AppContext, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running_job(before, document)
    before.leases.wait_for_job("healthy", 0)
    before.replicas.beat(wire.HeartbeatRequest(replica_id="judge-1", pool="sandbox-judge"))
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert now_ms() == 4_000_000_000_000

    before.replicas.drop_silent()

    assert [replica.replica_id for replica in before.replicas.live()] == ["judge-1"]
    assert before.leases.wait_for_job("spare", 0).run_id == ""


def test_nobody_is_silent_right_after_an_outage_and_who_stays_silent_is_dropped(
    before: AppContext, open_context: Callable[..., AppContext], redis_client: redis.Redis
) -> None:
    for replica_id in ("judge-1", "judge-2"):
        before.replicas.beat(wire.HeartbeatRequest(replica_id=replica_id, pool="sandbox-judge"))
    pass_time(redis_client, OUTAGE)

    after = next_leader(open_context, redis_client)
    after.replicas.drop_silent()
    assert redis_client.hlen(redis_keys.replicas()) == 2
    pass_time(redis_client, SILENCE * 0.7)
    after.replicas.beat(wire.HeartbeatRequest(replica_id="judge-1", pool="sandbox-judge"))
    pass_time(redis_client, SILENCE * 0.7)
    after.replicas.drop_silent()

    assert redis_client.hkeys(redis_keys.replicas()) == [b"judge-1"]
