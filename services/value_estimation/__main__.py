"""Start value-estimation: `python -m services.value_estimation`."""

from __future__ import annotations

import sys

from services.value_estimation.settings import Settings
from spo.service.process import ServiceProcess, join_platform
from spo.v1.value_service_pb2_grpc import add_ValueServiceServicer_to_server
from spo.weights.store import WeightStore


def main() -> int:
    settings = Settings()
    process = ServiceProcess("value-estimation", settings)
    process.answer_probes("loads its libraries")
    # Before they take their time: whoever has no part in this platform is refused at once.
    client = process.hold_state(join_platform(settings))
    # Imported late: probes are answered while these take their time.
    from services.value_estimation.reference import Policies, References
    from services.value_estimation.samples import connect_clients
    from services.value_estimation.service import TokenValuer, ValueService
    from services.value_estimation.workers import PivotalWorker, ValueWorker

    references = References.as_told(client, settings)
    clients = connect_clients(settings, process.stop, client)
    weights = WeightStore(settings.weight_place, cache_path=settings.weight_cache_path)
    valuer = TokenValuer(client, Policies(references, weights), clients)
    add_ValueServiceServicer_to_server(ValueService(client, references, valuer), process.server.server)
    process.report = references.report
    shared = (client, references, clients, settings, process.replica_id)
    process.workers += [ValueWorker(*shared).run, PivotalWorker(*shared).run]
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
