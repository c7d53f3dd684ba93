"""The judges by pool: who is called by gRPC about a problem's responses, and the environments beside them."""

from __future__ import annotations

from spo.errors import InvalidInput
from spo.rpc.client import RpcClient
from spo.tasks.verifier_pool import SANDBOX_JUDGE, VERIFIER
from spo.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub


class JudgePools:
    """A client of each pool of judges, at its address; environments: of those that the pool of verifiers has."""

    def __init__(self, sandbox_judge_address: str, verifier_address: str) -> None:
        self._clients = {
            "": RpcClient(SANDBOX_JUDGE, sandbox_judge_address, JudgeServiceStub),
            VERIFIER: RpcClient(VERIFIER, verifier_address, JudgeServiceStub),
        }
        self.environments = RpcClient(VERIFIER, verifier_address, EnvironmentServiceStub)

    def of(self, pool: str) -> RpcClient:
        """The client of a `Prompt.verifier_pool`. Raises InvalidInput on one that this release does not know."""
        if pool not in self._clients:
            raise InvalidInput(f"there is no pool of judges {pool!r}; bring the services' versions in line")
        return self._clients[pool]

    def close(self) -> None:
        """End the connections; calls under way fail with Unreachable."""
        for client in (*self._clients.values(), self.environments):
            client.close()
