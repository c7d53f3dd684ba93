"""`python -m services.verifier.environments.foreign`: one environment of another package behind our contract.

`serve` answers the platform's verifiers; `tasks` prints a task file whose rows name the environment's tasks. It runs in
a virtual environment of its own, with this platform's base packages and the other package, and knows no secret.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from importlib.metadata import version
from typing import Any

import httpx

from services.verifier.environments.foreign.journal import JournalledEnvironment, Said, StartEpisode, Worth
from services.verifier.environments.service import Environments, EnvironmentService, OpenState, Setup
from spo.observability import configure_logs, get_logger
from spo.rpc.server import RpcServer
from spo.v1.environment_service_pb2_grpc import add_EnvironmentServiceServicer_to_server

SCHEMA_SECONDS = 30.0
# The type of a field in a JSON schema -> how a bare reply is read as it.
_READ = {"integer": int, "number": float}

log = get_logger("foreign")

# No program: the environment decides about every episode, and the answer is asked about none.
_DECIDED = {"expected": ["decided by the environment"]}


class OpenEnvServer:
    """One OpenEnv server by its base address."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._schema: dict[str, Any] = {}

    def start(self, setup: Setup, seed: int) -> OpenEnvEpisode:
        """Open an episode; the job's and the row's arguments go to the server's reset."""
        if not self._schema:
            reply = httpx.get(f"{self.url}/schema", timeout=SCHEMA_SECONDS)
            reply.raise_for_status()
            self._schema = reply.json()["action"]
        row = setup.problem.get("arguments")
        reset = {**setup.arguments, **(row if isinstance(row, dict) else {}), "seed": seed}
        return OpenEnvEpisode(self.url, self._schema, reset)


class OpenEnvEpisode:
    """One session: actions are what the policy writes, observations what it reads, rewards are summed."""

    def __init__(self, url: str, schema: dict[str, Any], reset: dict[str, Any]) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=url).sync()
        self._schema, self._reset = schema, reset
        self._reward = 0.0

    def opening(self) -> Said:
        self._client.connect()
        result = self._client.reset(**self._reset)
        said = self._said(result.observation, result.reward, done=result.done)
        fields = json.dumps(self._schema.get("properties", {}), sort_keys=True)
        return Said(f"{said.text}\n\nAn action is a JSON object with these fields: {fields}", said.done, said.reward)

    def act(self, action: str) -> Said:
        try:
            read = action_in(action, self._schema)
        except ValueError as error:
            return Said(f"This is no action: {error}")
        result = self._client.step(read)
        return self._said(result.observation, result.reward, done=result.done)

    def close(self) -> None:
        self._client.close()

    def _said(self, shown: object, reward: float | None, *, done: bool) -> Said:
        self._reward += float(reward or 0.0)
        # An observation that is one text is read as that text.
        text = shown if isinstance(shown, str) else json.dumps(shown, sort_keys=True, ensure_ascii=False)
        return Said(text, bool(done), self._reward)


def action_in(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The action that a reply is: a JSON object, in a fence or not, or the value of the one field that is required.

    Raises ValueError where it is none.
    """
    reply = text.strip()
    if "```" in reply:
        inside = reply.split("```")[-2 if reply.count("```") > 1 else -1]
        label, newline, body = inside.partition("\n")
        reply = (body if newline and label.strip().isalnum() else inside).strip()
    try:
        found = json.loads(reply)
    except (ValueError, RecursionError):
        found = reply
    if isinstance(found, dict):
        return found
    required = schema.get("required", [])
    if len(required) != 1:
        raise ValueError(f"it must be a JSON object with {', '.join(required) or 'the fields of an action'}")
    (name,) = required
    kind = schema.get("properties", {}).get(name, {}).get("type")
    if kind == "string":
        return {name: text.strip()}
    if kind in _READ and not isinstance(found, str | int | float):
        raise ValueError(f"{name} must be of the type {kind}")
    return {name: _READ[kind](found) if kind in _READ else found}


def serve(asked: argparse.Namespace) -> int:
    """Answer until SIGTERM."""
    configure_logs("environment", "info", "json")
    start, decider = _source(asked)
    environment = JournalledEnvironment(start, Worth(decider, asked.low, asked.high, asked.passes))
    host, _, port = asked.listen.rpartition(":")
    server = RpcServer(host, int(port))
    service = EnvironmentService(Environments({asked.name: environment}), OpenState())
    add_EnvironmentServiceServicer_to_server(service, server.server)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server.start()
    server.set_serving(True)
    log.info("serving", environment=asked.name, decider=decider, address=server.address)
    stop.wait()
    server.stop(5)
    environment.close()
    return 0


def print_tasks(asked: argparse.Namespace) -> int:
    """Print JSON lines, one per task: its prompt as the statement, and the arguments by which it is found."""
    if asked.openenv:
        rows: list[dict[str, object]] = [{"statement": f"{asked.name} {number}"} for number in range(asked.count)]
    else:
        from services.verifier.environments.foreign.verifiers_package import Hosted

        hosted = Hosted(asked.verifiers, json.loads(asked.options), asked.role)
        rows = hosted.rows(asked.count)
    for row in rows:
        print(json.dumps({**row, "answer": _DECIDED}, ensure_ascii=False))
    return 0


def _source(asked: argparse.Namespace) -> tuple[StartEpisode, str]:
    """What opens its episodes, and who decides about them."""
    if asked.openenv:
        return OpenEnvServer(asked.openenv).start, f"openenv {version('openenv-core')} {asked.name}"
    from services.verifier.environments.foreign.verifiers_package import Hosted

    hosted = Hosted(asked.verifiers, json.loads(asked.options), asked.role)
    return hosted.start, f"verifiers {version('verifiers')} {asked.verifiers}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="foreign", description=__doc__)
    parser.add_argument("what", choices=("serve", "tasks"))
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--verifiers", metavar="TASKSET", help="a taskset of the package verifiers, installed here")
    source.add_argument("--openenv", metavar="URL", help="the base address of an OpenEnv server")
    parser.add_argument("--name", required=True, help="what jobs call it: tasks.environment.name")
    parser.add_argument("--options", default="{}", help="the taskset's configuration, a JSON object")
    parser.add_argument("--role", default="", help="the agent that is trained, where there are several")
    parser.add_argument("--low", type=float, default=0.0, help="the reward that is a score of 0")
    parser.add_argument("--high", type=float, default=1.0, help="the reward that is a score of 1")
    parser.add_argument("--passes", type=float, default=1.0, help="the score from which an episode is right")
    parser.add_argument("--listen", default="127.0.0.1:7080", help="host:port")
    parser.add_argument("--count", type=int, default=100, help="how many tasks to print")
    asked = parser.parse_args()
    return print_tasks(asked) if asked.what == "tasks" else serve(asked)


if __name__ == "__main__":
    sys.exit(main())
