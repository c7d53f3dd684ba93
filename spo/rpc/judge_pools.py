"""The judges by pool: who is called by gRPC about a problem's responses, and the environments beside them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from spo.errors import InvalidInput
from spo.rpc.client import RpcClient
from spo.tasks.verifier_pool import SANDBOX_JUDGE, VERIFIER, judges_named
from spo.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub

# Who could not wait any longer for a pool asks again about once a minute.
NEEDED_SECONDS = 150.0


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
