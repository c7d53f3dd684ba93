"""Start the orchestrator: `python -m services.orchestrator`."""

from __future__ import annotations

import sys

from services.orchestrator.container import AppContext
from services.orchestrator.http.server import HttpServer, freeze_gc
from services.orchestrator.service import OrchestratorService
from services.orchestrator.settings import Settings
from spo.messaging.connection import connect
from spo.service.process import ServiceProcess
from spo.v1.orchestrator_service_pb2_grpc import add_OrchestratorServiceServicer_to_server


def main() -> int:
    settings = Settings()
    process = ServiceProcess("orchestrator", settings)
    context = AppContext(settings, connect(settings.redis_url, settings.redis_wait_seconds), process.stop)
    add_OrchestratorServiceServicer_to_server(OrchestratorService(context), process.server.server)
    http = HttpServer(context)
    process.workers += [
        context.runner.run,
        context.dispatcher.run,
        context.evaluations.run,
        context.deletion.run,
        context.datasets.run,
        http.run,
        freeze_gc,
    ]
    process.on_drain = context.close
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
