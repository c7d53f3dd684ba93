"""`python -m spo.healthcheck ADDRESS...`: exit status 0 when all say SERVING; the health check of containers."""

from __future__ import annotations

import sys

# Not spo.rpc: this starts in every container again and again, and the rest of the library takes thrice as long.
import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

DEADLINE_SECONDS = 3.0


def serves(address: str) -> bool:
    """Whether the service at address says SERVING to the standard health check."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        except grpc.RpcError:
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


def main(addresses: list[str]) -> int:
    """Ask each address by the standard gRPC health check and name those that do not serve."""
    silent = [address for address in addresses if not serves(address)]
    if silent or not addresses:
        print(f"not serving: {', '.join(silent) or 'no address given'}", file=sys.stderr)
    return 1 if silent or not addresses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
