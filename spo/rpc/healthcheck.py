"""`python -m spo.rpc.healthcheck ADDRESS...`: exit status 0 when all say SERVING; the health check of containers."""

from __future__ import annotations

import sys

# Not spo.rpc: this starts in every container again and again, and the rest of the library takes thrice as long.
import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

DEADLINE_SECONDS = 3.0
# In the trailing metadata of the answer: why a service is not ready.
REASON = "spo-reason"


def why_not_serving(address: str) -> str:
    """ "" when the service at address says SERVING to the standard health check, else its reason or ours."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer, call = HealthStub(channel).Check.with_call(HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        except grpc.RpcError:
            return "it does not answer"
    if answer.status == HealthCheckResponse.SERVING:
        return ""
    return str(dict(call.trailing_metadata()).get(REASON, "it starts, loads or drains"))


def main(addresses: list[str]) -> int:
    """Ask each address by the standard gRPC health check and name those that do not serve."""
    silent = {address: reason for address in addresses if (reason := why_not_serving(address))}
    for address, reason in silent.items():
        print(f"not serving: {address}: {reason}", file=sys.stderr)
    if not addresses:
        print("no address given", file=sys.stderr)
    return 1 if silent or not addresses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
