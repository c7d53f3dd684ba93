"""`python -m services.tinker`: one base model, and the adapters that clients of the Tinker API train on it."""

from __future__ import annotations

import sys

from services.tinker.settings import Settings
from spo.service.process import ServiceProcess
from spo.v1.tinker_service_pb2_grpc import add_TinkerServiceServicer_to_server


def main() -> int:
    settings = Settings()
    process = ServiceProcess("tinker", settings)
    process.hold_state_when_known()
    process.answer_probes("loads its libraries and the base model")
    # Imported late: probes are answered while these take their time.
    from services.tinker.service import assemble

    service, worker = assemble(settings)
    add_TinkerServiceServicer_to_server(service, process.server.server)
    process.workers.append(worker.run)
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
