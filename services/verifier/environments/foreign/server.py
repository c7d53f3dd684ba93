"""The gRPC server of one environment of another package, and the task file of what it holds."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from importlib.metadata import version

from services.verifier.environments.foreign.journal import JournalledEnvironment, StartEpisode, Worth
from services.verifier.environments.registry import Environments
from services.verifier.environments.sealed_state import OpenState
from services.verifier.environments.service import EnvironmentService
from spo.observability.logs import configure_logs, get_logger
from spo.rpc.server import RpcServer
from spo.v1.environment_service_pb2_grpc import add_EnvironmentServiceServicer_to_server

log = get_logger("foreign")

# No program: the environment decides about every episode, and the answer is asked about none.
_DECIDED = {"expected": ["decided by the environment"]}


def serve(asked: argparse.Namespace) -> int:
    """Answer until SIGTERM."""
    configure_logs("environment", "info", "json")
    start, decider = _source(asked)
    environment = JournalledEnvironment(start, Worth(decider, asked.low, asked.high, asked.passes))
    host, _, port = asked.listen.rpartition(":")
    server = RpcServer(host, int(port))
    service = EnvironmentService(Environments({asked.name: environment}), OpenState())
    add_EnvironmentServiceServicer_to_server(service, server.server)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server.start()
    server.set_serving(True)
    log.info("serving", environment=asked.name, decider=decider, address=server.address)
    stop.wait()
    server.stop(5)
    environment.close()
    return 0


def print_tasks(asked: argparse.Namespace) -> int:
    """Print JSON lines, one per task: its prompt as the statement, and the arguments by which it is found."""
    if asked.openenv:
        rows: list[dict[str, object]] = [{"statement": f"{asked.name} {number}"} for number in range(asked.count)]
    else:
        from services.verifier.environments.foreign.verifiers_package import Hosted

        hosted = Hosted(asked.verifiers, json.loads(asked.options), asked.role)
        rows = hosted.rows(asked.count)
    for row in rows:
        print(json.dumps({**row, "answer": _DECIDED}, ensure_ascii=False))
    return 0


def _source(asked: argparse.Namespace) -> tuple[StartEpisode, str]:
    """What opens its episodes, and who decides about them."""
    if asked.openenv:
        from services.verifier.environments.foreign.openenv_server import OpenEnvServer

        return OpenEnvServer(asked.openenv).start, f"openenv {version('openenv-core')} {asked.name}"
    from services.verifier.environments.foreign.verifiers_package import Hosted

    hosted = Hosted(asked.verifiers, json.loads(asked.options), asked.role)
    return hosted.start, f"verifiers {version('verifiers')} {asked.verifiers}"
