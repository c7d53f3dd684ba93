"""`python -m services.sandbox_judge`: runs programs in a sandbox and decides every reward."""

import sys

from services.sandbox_judge.probe import choose_tier, require_packages
from services.sandbox_judge.sandbox_worker import lanes, this_machine
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler, JudgeService, JudgeWorker
from spo.errors import SpoError
from spo.messaging.run_specs import RunTenants
from spo.observability import get_logger
from spo.service.process import ServiceProcess, join_platform
from spo.v1.judge_service_pb2_grpc import add_JudgeServiceServicer_to_server


def main() -> int:
    settings = Settings()
    process = ServiceProcess("sandbox-judge", settings)
    try:
        client = process.watch_redis(join_platform(settings))
        tier = choose_tier(settings)
        require_packages(tier, settings)
    except SpoError as error:
        get_logger("start").error("the judge will not serve", reason=error.message, code=error.code)
        return 1
    workers = lanes(settings.workers, this_machine())
    scheduler = JudgeScheduler(client, settings, tier, workers, RunTenants(client).of)
    add_JudgeServiceServicer_to_server(JudgeService(scheduler), process.server.server)
    process.workers.append(JudgeWorker(client, scheduler, process.replica_id, settings))
    process.report = lambda beat: setattr(beat, "load", scheduler.load)
    status = process.run()
    scheduler.close(process.drain_seconds_left)
    return status


if __name__ == "__main__":
    sys.exit(main())
