"""A client of inference that asks a replica which serves the run in question, as the registry of replicas says."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import redis
from google.protobuf.message import Message

from spo import redis_keys
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS, SILENT_SECONDS, Reply, RpcClient
from spo.v1.inference_service_pb2 import GenerateRequest
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest

log = get_logger("inference")

REMEMBER_SECONDS = 1.0
# The heartbeat stands behind its time of arrival.
TIME_BYTES = 8
SILENT_MS = 10_000


class InferenceClient(RpcClient):
    """Calls about a group go to the replicas of its run in turn; the address of the settings is asked where none is."""

    def __init__(self, address: str, registry: RedisClient) -> None:
        super().__init__("inference", address, InferenceServiceStub)
        self._registry = registry
        self._lock = threading.Lock()
        self._turn = itertools.count()
        self._clients: dict[str, RpcClient] = {}
        self._addresses: dict[str, list[str]] = {}
        self._read_at = float("-inf")

    def call(
        self,
        method: str,
        request: Message,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
        *,
        stop: threading.Event | None = None,
    ) -> Any:
        """As RpcClient.call."""
        replica = self._replica(request.group.run_id) if isinstance(request, GenerateRequest) else None
        if replica is None:
            return super().call(method, request, deadline_seconds, stop=stop)
        return replica.call(method, request, deadline_seconds, stop=stop)

    def call_while(self, method: str, request: Message, wanted: Callable[[], bool], kind: type[Reply]) -> Reply:
        """As RpcClient.call_while."""
        replica = self._replica(request.group.run_id) if isinstance(request, GenerateRequest) else None
        if replica is None:
            return super().call_while(method, request, wanted, kind)
        return replica.call_while(method, request, wanted, kind)

    def parts(
        self,
        method: str,
        request: Message,
        wanted: Callable[[], bool] = lambda: True,
        silent_seconds: float = SILENT_SECONDS,
    ) -> Iterator[Any]:
        """As RpcClient.parts."""
        replica = self._replica(request.group.run_id) if isinstance(request, GenerateRequest) else None
        if replica is None:
            return super().parts(method, request, wanted, silent_seconds)
        return replica.parts(method, request, wanted, silent_seconds)

    def close(self) -> None:
        super().close()
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _replica(self, run_id: str) -> RpcClient | None:
        with self._lock:
            if time.monotonic() - self._read_at > REMEMBER_SECONDS:
                self._read()
            addresses = self._addresses.get(run_id)
            if not addresses or self._closed:
                return None
            address = addresses[next(self._turn) % len(addresses)]
            if address not in self._clients:
                self._clients[address] = RpcClient("inference", address, InferenceServiceStub)
            return self._clients[address]

    def _read(self) -> None:
        """Note who serves what; without an answer of Redis what was known stays."""
        # Also when Redis is away: else every call would wait for it in turn.
        self._read_at = time.monotonic()
        try:
            stored = self._registry.hvals(redis_keys.replicas())
        except redis.RedisError as error:
            log.warning("the registry of replicas cannot be read", reason=str(error))
            return
        # Against the newest heartbeat of all: no clock of ours counts, and while the orchestrator is away nobody ages.
        beaten = [int.from_bytes(raw[:TIME_BYTES], "big") for raw in stored]
        newest = max(beaten, default=0)
        heard = [raw for raw, at in zip(stored, beaten, strict=True) if at >= newest - SILENT_MS]
        beats = [HeartbeatRequest.FromString(raw[TIME_BYTES:]) for raw in heard]
        found: dict[str, list[str]] = {}
        for beat in beats:
            if beat.pool == "inference" and beat.run_id and beat.address and not beat.draining:
                found.setdefault(beat.run_id, []).append(beat.address)
        self._addresses = found
        for address in set(self._clients) - {beat.address for beat in beats}:
            self._clients.pop(address).close()
