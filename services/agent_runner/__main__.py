"""`python -m services.agent_runner`: leases episodes and plays each with a command; it holds a key for that alone."""

import sys

from services.agent_runner.confined import require_landlock, words_before
from services.agent_runner.settings import Settings
from spo.cli.agents import END_SECONDS, EpisodeRunner
from spo.client import Client
from spo.errors import SpoError
from spo.observability import get_logger
from spo.service.process import ServiceProcess


def main() -> int:
    settings = Settings()
    process = ServiceProcess("agent-runner", settings, heartbeats=False)
    key = settings.api_key.get_secret_value()
    with Client(settings.api_url, key or None, retry_seconds=5, timeout_seconds=30) as client:
        try:
            runner = EpisodeRunner(client, settings.pool, settings.harnesses, settings.score or None, settings.most)
            if settings.confined:
                require_landlock()
                runner.before = words_before(settings.readable)
        except (SpoError, OSError) as error:
            get_logger("runner").error("the runner will not serve", reason=str(error))
            return 1
        # An agent that is to end has END_SECONDS for each of two signals; then its episode is given back.
        runner.patience_seconds = max(0.0, settings.drain_seconds - 3 * END_SECONDS)
        process.workers.append(runner.run)
        process.obstacle = lambda: runner.obstacle
        return process.run()


if __name__ == "__main__":
    sys.exit(main())
