"""`python -m services.agent_runner`: leases episodes of one pool over the HTTP API and plays each with a command.

It knows the platform by its HTTP API alone, as an agent does: it has no token of the services and no way to Redis, so
that what runs beside hostile agents holds nothing but a key that leases episodes.
"""

import sys
from pathlib import Path

from services.agent_runner.confined import __file__ as confined_program, landlock_version
from services.agent_runner.settings import Settings
from spo.cli.agents import END_SECONDS, CommandHere, EpisodeRunner, Running, environment_of
from spo.client import Client
from spo.client.models import EpisodeLease
from spo.errors import InvalidInput, PreconditionFailed, SpoError
from spo.observability import get_logger
from spo.service.process import ServiceProcess

log = get_logger("runner")


class ConfinedRunner(EpisodeRunner):
    """Starts each agent confined to its episode's folder; `readable`: folders that it may read beside the image's."""

    readable: tuple[str, ...] = ()

    def begin(self, command: list[str], folder: Path, lease: EpisodeLease) -> Running:
        """Start an agent in its episode's folder, and keep it there."""
        seen = [sys.prefix, sys.base_prefix, *self.readable]
        # By its path: with -m the agent's folder would be searched for modules first.
        confined = [sys.executable, confined_program, ":".join(seen)]
        return CommandHere([*confined, *command], folder, environment_of(lease, folder))


def runner_of(settings: Settings, client: Client) -> EpisodeRunner:
    """The runner that the settings ask for. Raises InvalidInput, PreconditionFailed (code "no_isolation")."""
    if not settings.harnesses:
        raise InvalidInput("SPO_AGENT_RUNNER_HARNESSES names no command: there is nothing to play with")
    asked = (client, settings.pool, settings.harnesses, settings.score or None, settings.most)
    if not settings.confined:
        return EpisodeRunner(*asked)
    if not landlock_version():
        message = (
            "this kernel offers no Landlock, so agents would see the runner's key: SPO_AGENT_RUNNER_CONFINED=false"
        )
        raise PreconditionFailed(f"{message} where they may", code="no_isolation")
    runner = ConfinedRunner(*asked)
    runner.readable = tuple(settings.readable)
    return runner


def main() -> int:
    settings = Settings()
    process = ServiceProcess("agent-runner", settings, heartbeats=False)
    key = settings.api_key.get_secret_value()
    with Client(settings.api_url, key or None, retry_seconds=5, timeout_seconds=30) as client:
        try:
            runner = runner_of(settings, client)
        except SpoError as error:
            log.error("the runner will not serve", reason=error.message, code=error.code)
            return 1
        # An agent that is to end has END_SECONDS for each of two signals; then its episode is given back.
        runner.patience_seconds = max(0.0, settings.drain_seconds - 3 * END_SECONDS)

        def episodes(_: object) -> None:
            try:
                runner.run(process.stop)
            except SpoError as error:
                log.error("the runner ends", reason=error.message, code=error.code)
                process.failed = True
                process.stop.set()

        process.workers.append(episodes)
        process.obstacle = lambda: runner.obstacle
        return process.run()


if __name__ == "__main__":
    sys.exit(main())
