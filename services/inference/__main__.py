"""python -m services.inference: one replica."""

from __future__ import annotations

import sys

from services.inference.settings import Settings
from spo.service.process import ServiceProcess, join_platform
from spo.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server


def main() -> int:
    settings = Settings()
    process = ServiceProcess("inference", settings, long_polls=settings.served_streams)
    process.answer_probes("loads its libraries")
    # Before they take their time: whoever has no part in this platform is refused at once.
    client = process.hold_state(join_platform(settings))
    # Imported late: probes are answered while these take their time.
    from services.inference.engine_thread import EngineDeaths
    from services.inference.replica import ServingReplica
    from services.inference.rollouts import RolloutWorker
    from services.inference.service import InferenceService, ServedRuns

    replica = ServingReplica(settings, client, process.server.set_serving, process.stop.set)
    worker = RolloutWorker(client, replica, process.replica_id, settings)
    runs = ServedRuns(client)
    service = InferenceService(replica, process.replica_id, EngineDeaths(client), runs, settings.served_streams)
    add_InferenceServiceServicer_to_server(service, process.server.server)
    process.report = replica.report
    process.on_heartbeat = replica.on_heartbeat
    process.workers += [replica.follow, worker.run]
    status = process.run()
    replica.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
