"""Start the orchestrator: `python -m services.orchestrator`."""

from __future__ import annotations

import sys

from services.orchestrator.commit import Leadership
from services.orchestrator.container import AppContext
from services.orchestrator.http.app import HttpServer, freeze_gc
from services.orchestrator.recovery import lacks_durability, require_append_only_file
from services.orchestrator.service import OrchestratorService
from services.orchestrator.settings import Settings
from spo.messaging.redis_client import public_address
from spo.service.process import ServiceProcess, join_platform
from spo.v1.orchestrator_service_pb2_grpc import add_OrchestratorServiceServicer_to_server


def main() -> int:
    settings = Settings()
    process = ServiceProcess("orchestrator", settings, long_polls=settings.long_polls)
    process.needs_of_redis = lambda found: lacks_durability(found, accept_none=not settings.durable_writes)
    client = process.hold_state(join_platform(settings))
    require_append_only_file(client, public_address(settings.redis_url), accept_none=not settings.durable_writes)
    leadership = Leadership(client, process.replica_id, process.address)
    context = AppContext(settings, client, process.stop, leadership)
    context.monitor.unfit = lambda: process.redis_problem
    add_OrchestratorServiceServicer_to_server(OrchestratorService(context), process.server.server)
    http = HttpServer(context)
    jobs = (context.runner, context.dispatcher, context.agent_episodes, context.evaluations, context.deletion)
    loops = (*jobs, context.datasets, context.watch, context.continual_loop, context.autoscaling)
    process.workers += [leadership.run, *(leadership.while_leading(loop.run) for loop in loops), http.run, freeze_gc]
    process.on_drain = context.close
    status = process.run()
    # Only now: until its last worker has ended this process still writes.
    leadership.release()
    return status


if __name__ == "__main__":
    sys.exit(main())
