"""`python -m services.verifier`: scores responses by HTTP services and models, and plays environments."""

import sys

from services.verifier.environments.service import environment_service
from services.verifier.scorers import scorers_of
from services.verifier.settings import Settings
from services.verifier.stage import VerifierScheduler, VerifierService, VerifierWorker
from spo.errors import SpoError
from spo.observability import get_logger
from spo.service.process import ServiceProcess, join_platform
from spo.v1.environment_service_pb2_grpc import add_EnvironmentServiceServicer_to_server
from spo.v1.judge_service_pb2_grpc import add_JudgeServiceServicer_to_server


def main() -> int:
    settings = Settings()
    process = ServiceProcess("verifier", settings)
    try:
        client = process.watch_redis(join_platform(settings))
    except SpoError as error:
        get_logger("start").error("the verifier will not serve", reason=error.message, code=error.code)
        return 1
    scheduler = VerifierScheduler(client, settings, scorers_of(settings, client))
    add_JudgeServiceServicer_to_server(VerifierService(scheduler), process.server.server)
    add_EnvironmentServiceServicer_to_server(environment_service(client, settings), process.server.server)
    process.workers.append(VerifierWorker(client, scheduler, process.replica_id, settings))
    process.report = lambda beat: setattr(beat, "load", scheduler.load)
    status = process.run()
    scheduler.close(process.drain_seconds_left)
    return status


if __name__ == "__main__":
    sys.exit(main())
