"""Start value-estimation: `python -m services.value_estimation`."""

from __future__ import annotations

import sys

from services.value_estimation.peers import Peers
from services.value_estimation.reference import References
from services.value_estimation.service import ValueService
from services.value_estimation.settings import Settings
from services.value_estimation.value_worker import ValueWorker
from spo.redis_client import connect
from spo.rpc import Client
from spo.service import ServiceProcess
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.value_service_pb2_grpc import add_ValueServiceServicer_to_server


def main() -> int:
    settings = Settings()
    process = ServiceProcess("value-estimation", settings)
    client = connect(settings.redis_url, settings.redis_wait_seconds)
    references = References(client, settings.tokens_per_forward, settings.device)
    add_ValueServiceServicer_to_server(ValueService(client, references), process.server.server)
    peers = Peers(
        Client("inference", settings.inference_address, InferenceServiceStub),
        Client("sandbox-judge", settings.sandbox_judge_address, JudgeServiceStub),
        Client("replay-buffer", settings.replay_buffer_address, ReplayServiceStub),
        settings,
        process.stop,
    )
    process.workers.append(ValueWorker(client, references, peers, settings, process.replica_id).run)
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
