"""`python -m services.sandbox_judge.embedded`: a judge for one command, without Redis, until its standard input ends.

`spo judge` starts it where no judge runs. The only line on standard output is where it listens, or why it does not.
"""

from __future__ import annotations

import json
import os
import sys

from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.sandbox_worker import lanes, this_machine
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler, JudgeService
from spo.errors import SpoError
from spo.observability import configure_logs
from spo.rpc.server import RpcServer
from spo.v1.judge_service_pb2_grpc import add_JudgeServiceServicer_to_server


class MemoryStore:
    """The commands of Redis that a judge without a cache needs; what it holds ends with the process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def mget(self, keys: list[str]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def eval(self, script: str, numkeys: int, *keys_and_args: str | bytes | int) -> None:
        """No verdict is remembered."""


def main() -> int:
    configure_logs("embedded-judge", "warning")
    # Nobody asks this judge twice, so it keeps no verdicts; nobody waits for it at its end either.
    settings = Settings().model_copy(update={"cache_seconds": 0, "recheck_rate": 0.0, "drain_seconds": 1.0})
    try:
        tier = choose_tier(settings)
    except SpoError as error:
        print(json.dumps({"code": error.code, "message": error.message}), flush=True)
        return 1
    workers = lanes(settings.workers, this_machine())
    scheduler = JudgeScheduler(MemoryStore(), settings, tier, workers)
    server = RpcServer("127.0.0.1", 0, max_workers=4 * workers + 2)
    add_JudgeServiceServicer_to_server(JudgeService(scheduler), server.server)
    server.start()
    server.set_serving(True)
    print(json.dumps({"address": server.address, "workers": workers}), flush=True)
    sys.stdin.read()
    server.stop(0)  # calls under way are cancelled and give their programs up
    scheduler.interrupt()
    scheduler.close()
    return 0


if __name__ == "__main__":
    status = main()
    # Threads may still wait for a run that nobody wants; its zygote ends with this process.
    os._exit(status)
