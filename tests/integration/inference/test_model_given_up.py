"""A replica whose engine cannot be built ends a few times, then stays and says which run it has given up on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import redis

from services.inference import replica as subject
from services.inference.replica import ServingReplica
from services.inference.settings import Settings
from spo import redis_keys
from spo.messaging.streams.recovery import WORK_DEATHS
from spo.spec.job_spec import spec_to_json
from spo.testing.peers import wait_until
from spo.testing.runs import toy_spec
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest, HeartbeatResponse

RUN = "job_01"


def refuse(*_: object) -> None:
    raise ValueError("No available memory for the cache blocks")


def test_a_model_that_no_engine_is_built_for_is_given_up_on_and_another_run_is_looked_at(
    redis_client: redis.Redis, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "Engine", refuse)
    monkeypatch.setattr(subject, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(subject, "FOLLOW_SECONDS", 0.02)
    redis_client.set(redis_keys.run_spec(RUN), spec_to_json(toy_spec({"model": {"path": str(tiny_model_path)}})))
    settings = Settings(state_path=tmp_path, port=51)
    said: list[str] = []

    def process() -> ServingReplica:
        found = ServingReplica(settings, redis_client, lambda serves, why: said.append(why), lambda: None)
        found.on_heartbeat(HeartbeatResponse(run_id=RUN))
        return found

    for _ in range(1 + WORK_DEATHS.alone):
        with pytest.raises(ValueError, match="No available memory"):
            process().follow(threading.Event())
    stays, stop = process(), threading.Event()
    thread = threading.Thread(target=stays.follow, args=(stop,))
    thread.start()

    def reported() -> HeartbeatRequest:
        request = HeartbeatRequest()
        stays.report(request)
        return request

    wait_until(lambda: reported().refused_run_id == RUN, "it says what it has given up on", 20)
    assert "died of it 3 times with nothing else to do; last: ValueError: No available memory" in reported().problem
    assert ":51 is given up on" in said[-1]
    assert len(reported().device_memory_bytes) == 1
    assert thread.is_alive()
    # Told to idle it forgets, and does so at once.
    stays.on_heartbeat(HeartbeatResponse())
    wait_until(lambda: not reported().refused_run_id and not reported().problem, "it is ready for others", 5)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
