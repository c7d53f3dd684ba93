"""Whom the platform calls: the replica that serves a run, the judges of a pool, and which addresses a job may name.

Whom the platform may call on behalf of a job: hosts that are named, and never the cluster's own inside.
A job's owner chooses the address of a reward service or of a model as judge, so it is checked twice: by its name when
the job is submitted and when it is called, and by the address that the name stands for at that moment.
"""

from __future__ import annotations

import ipaddress
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis
from google.protobuf.message import Message

from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput
from spo.messaging.redis_client import RedisClient
from spo.observability import get_logger
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS, SILENT_SECONDS, Reply, RpcClient
from spo.tasks.verifier import SANDBOX_JUDGE, VERIFIER, judges_named
from spo.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from spo.v1.inference_service_pb2 import GenerateRequest
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest

log = get_logger("inference")

REMEMBER_SECONDS = 1.0
# The heartbeat stands behind its time of arrival.
TIME_BYTES = 8
SILENT_MS = 10_000

# Who could not wait any longer for a pool asks again about once a minute.
NEEDED_SECONDS = 150.0

_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


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


class JudgePools:
    """A client of each pool of judges, at its address; environments: of those that the pool of verifiers has.

    closed: set by `close`, for those who wait for a pool.
    """

    def __init__(self, sandbox_judge_address: str, verifier_address: str) -> None:
        self._clients = {
            "": RpcClient(SANDBOX_JUDGE, sandbox_judge_address, JudgeServiceStub),
            VERIFIER: RpcClient(VERIFIER, verifier_address, JudgeServiceStub),
        }
        self.environments = RpcClient(VERIFIER, verifier_address, EnvironmentServiceStub)
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._needs = Counter[str]()
        self._needed_until: dict[str, float] = {}

    def of(self, pool: str) -> RpcClient:
        """The client of a `Prompt.verifier_pool`. Raises InvalidInput on one that this release does not know."""
        if pool not in self._clients:
            raise InvalidInput(f"there is no pool of judges {pool!r}; bring the services' versions in line")
        return self._clients[pool]

    @contextmanager
    def needed_for(self, pools: Iterable[str]) -> Iterator[None]:
        """Say that work that is no job's is under way for these pools, or waits for them: `needed` names them."""
        names = {judges_named(pool) for pool in pools}
        with self._lock:
            self._needs.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._needs.subtract(names)
                self._needed_until |= dict.fromkeys(names, time.monotonic() + NEEDED_SECONDS)

    @property
    def needed(self) -> set[str]:
        """The services that such work needs now or needed NEEDED_SECONDS ago: whoever scales them to 0 keeps one."""
        now = time.monotonic()
        with self._lock:
            lately = {name for name, until in self._needed_until.items() if until > now}
            return lately | {name for name, count in self._needs.items() if count > 0}

    def close(self) -> None:
        """End the connections; calls under way fail with Unreachable."""
        self.closed.set()
        for client in (*self._clients.values(), self.environments):
            client.close()


def _meant_by(address: Address) -> list[Address]:
    """The address and those that it stands for: IPv4 within IPv6."""
    meant: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            embedded.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        meant += [each for each in embedded if each is not None]
    # What is only a way to write an IPv4 address is as public as that one.
    return meant[1:] if len(meant) > 1 else meant


def _is_public(address: Address) -> bool:
    return address.is_global and not address.is_multicast


def _refusal(pointer: str, message: str) -> InvalidInput:
    return InvalidInput(
        f"this address is not called: {message}",
        code="address_not_allowed",
        violations=(FieldViolation(pointer, message),),
    )


@dataclass(frozen=True)
class AddressRules:
    """hosts: `name` (ports 80 and 443) or `name:port`; networks: those that need not be public, as CIDR."""

    hosts: frozenset[str]
    networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, hosts: Iterable[str], networks: Iterable[str] = ()) -> AddressRules:
        """The rules of two lists. Raises InvalidInput on what is no network."""
        try:
            read = tuple(ipaddress.ip_network(network) for network in networks)
        except ValueError as error:
            raise InvalidInput(f"not a network: {error}", code="address_not_allowed") from None
        return cls(frozenset(host.lower() for host in hosts), read)

    def require_named(self, url: str, pointer: str = "/url") -> None:
        """Raises InvalidInput (code "address_not_allowed") unless the URL is of http or https and its host is named."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            raise _refusal(pointer, "must be a URL") from None
        if parts.scheme not in _PORTS or not host or parts.username is not None or parts.password is not None:
            raise _refusal(pointer, "must be an address of http or https with a host and without a user")
        named = f"[{host}]" if ":" in host else host
        usual = port in _PORTS.values() and named in self.hosts
        if not usual and f"{named}:{port}" not in self.hosts:
            message = f"{named}:{port} is not among the hosts that SPO_VERIFIER_HTTP_HOSTS allows"
            if self._is_inside(host):
                message += "; an address that is not public has to be in SPO_VERIFIER_HTTP_NETWORKS as well"
            raise _refusal(pointer, message)

    def _is_inside(self, host: str) -> bool:
        """Whether a host is written as an address that may not be connected to, or is this machine by name."""
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return host == "localhost"
        return not self.reaches(host)

    def reaches(self, address: str) -> bool:
        """Whether an IP address may be connected to: public, also in what it embeds, or in one of the networks."""
        try:
            own = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        return any(own in network for network in self.networks) or all(map(_is_public, _meant_by(own)))
