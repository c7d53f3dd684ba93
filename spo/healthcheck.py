"""`python -m spo.healthcheck ADDRESS...`: exit status 0 when all say SERVING; the health check of containers."""

from __future__ import annotations

import sys

from spo.rpc import is_healthy

DEADLINE_SECONDS = 3.0


def main(addresses: list[str]) -> int:
    """Ask each address by the standard gRPC health check and name those that do not serve."""
    silent = [address for address in addresses if not is_healthy(address, DEADLINE_SECONDS)]
    if silent or not addresses:
        print(f"not serving: {', '.join(silent) or 'no address given'}", file=sys.stderr)
    return 1 if silent or not addresses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
