"""Start the replay buffer: `python -m services.replay_buffer`."""

from __future__ import annotations

import sys

from services.replay_buffer.archive import archive_reader, archive_workers
from services.replay_buffer.ingest import IngestWorker, ReferenceScores, SharedRolloutIngest
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.settings import Settings
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.messaging.streams.stage import Consumer
from spo.service.process import ServiceProcess, join_platform
from spo.v1.replay_service_pb2_grpc import add_ReplayServiceServicer_to_server


def main() -> int:
    settings = Settings()
    process = ServiceProcess("replay-buffer", settings, long_polls=settings.long_polls)
    client = process.hold_state(join_platform(settings))
    store = ReplayStore(client)
    service = ReplayService(BatchSampler(store, settings.long_polls), settings.stop_memory_share)
    service.archived = archive_reader(settings)
    add_ReplayServiceServicer_to_server(service, process.server.server)
    stream, group = redis_keys.verdicts(), redis_keys.INGEST_GROUP
    consumer = Consumer(client, stream, group, process.replica_id, settings.reclaim_seconds)
    scores = ReferenceScores.at(settings.value_estimation_address, settings.logprobs_deadline_seconds)
    ingest = IngestWorker(store, consumer, scores, settings.groups_per_read)
    shared = SharedRolloutIngest(service.sampler, scores, service.storage)
    process.workers += [ingest.run, shared.run, *archive_workers(service.sampler, settings)]
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
