"""Start the orchestrator: `python -m services.orchestrator`."""

from __future__ import annotations

import sys

from services.orchestrator.desk import Desk
from services.orchestrator.http_server import HttpServer, spare_what_lasts
from services.orchestrator.service import OrchestratorService
from services.orchestrator.settings import Settings
from spo.redis_client import connect
from spo.service import ServiceProcess
from spo.v1.orchestrator_service_pb2_grpc import add_OrchestratorServiceServicer_to_server


def main() -> int:
    settings = Settings()
    process = ServiceProcess("orchestrator", settings)
    desk = Desk(settings, connect(settings.redis_url, settings.redis_wait_seconds), process.stop)
    add_OrchestratorServiceServicer_to_server(OrchestratorService(desk), process.server.server)
    http = HttpServer(desk)
    process.workers += [
        desk.runner.run,
        desk.feeder.run,
        desk.evaluator.run,
        desk.examinations.run,
        desk.retirement.run,
        desk.datasets.run,
        http.run,
        spare_what_lasts,
    ]
    process.on_drain = desk.close
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
