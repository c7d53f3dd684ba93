"""What a run cost: CPU of every process of the platform, memory of the trainer, rollouts of all kinds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import psutil

from spo import redis_keys
from spo.local.launcher import LocalPlatform
from spo.messaging.connection import connect
from spo.rpc.client import RpcClient
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2 import GetReplayStatusRequest, GetReplayStatusResponse
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.value_pb2 import PromptValue

REDIS_WAIT_SECONDS = 10.0


@dataclass
class CpuMeter:
    """CPU of the platform's processes; what one had used when it was last looked at stays when it is replaced."""

    platform: LocalPlatform
    _used: dict[tuple[int, float], float] = field(default_factory=dict)

    def seconds(self) -> float:
        """All CPU so far, with that of ended children; call it often, as every service may be restarted."""
        for process in _processes(service["pid"] for service in self.platform.services()):
            try:
                times = process.cpu_times()
                name = (process.pid, process.create_time())
            except psutil.Error:
                continue
            self._used[name] = times.user + times.system + times.children_user + times.children_system
        return sum(self._used.values())


def trainer_memory_bytes(platform: LocalPlatform) -> int:
    """Proportional set size of the trainer's ranks, 0 while there is none."""
    total = 0
    for process in _processes(child["pid"] for child in platform.services() if child["name"] == "trainer"):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def rollouts(platform: LocalPlatform, job_id: str, spec: dict[str, Any]) -> dict[str, int]:
    """Responses that the run's learning rests on: sampled online, for values, for pivotal tokens.

    Values and labels taken over from an earlier run count here: they were somebody's rollouts.
    """
    replay = RpcClient("replay-buffer", platform.addresses["replay-buffer"], ReplayServiceStub)
    try:
        status: GetReplayStatusResponse = replay.call("GetReplayStatus", GetReplayStatusRequest(run_id=job_id))
    finally:
        replay.close()
    client = connect(platform.redis_url, REDIS_WAIT_SECONDS)
    try:
        stored = client.hvals(redis_keys.run_values(job_id))
        visits = client.scard(redis_keys.pivotal_visits(job_id))
    finally:
        client.close()
    pivotal = ((spec.get("value") or {}).get("pivotal") or {}).get("rollouts", 0)
    return {
        "online": sum(count.inserted for count in status.counts if count.source == SOURCE_ONLINE),
        "values": sum(PromptValue.FromString(raw).samples for raw in stored),
        "pivotal": visits * pivotal,
    }


def _processes(pids: Iterable[int | None]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        try:
            if pid is not None:
                found += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found
