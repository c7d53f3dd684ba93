"""The token between services, over real connections: who shows none or another is refused in words, health is open."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import yaml
from pydantic import SecretStr

from services.trainer import loop
from services.trainer.settings import Settings as TrainerSettings
from spo import observability
from spo.errors import FieldViolation, InvalidInput, NotFound, Unauthenticated
from spo.local.launcher import server_command
from spo.rpc.client import HEADER, RpcClient, is_healthy, show_token, tokens_of
from spo.rpc.healthcheck import why_not_serving
from spo.rpc.server import RpcServer
from spo.service.process import ServiceProcess
from spo.service.settings import ServiceSettings
from spo.testing.peers import wait_until
from spo.testing.runs import RUN, toy_spec
from spo.v1 import replay_service_pb2 as replay
from spo.v1.orchestrator_service_pb2 import LeaseJobResponse
from spo.v1.replay_service_pb2_grpc import ReplayServiceServicer, ReplayServiceStub, add_ReplayServiceServicer_to_server
from tests.conftest import free_port

ROOT = Path(__file__).parents[3]
TOKEN = "of-this-platform"


class Answering(ReplayServiceServicer):
    """Notes the metadata of each call; raises what a test put in `fault`."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []
        self.fault: Exception | None = None

    def GetReplayStatus(self, request: Any, context: Any) -> replay.GetReplayStatusResponse:
        self.seen.append(dict(context.invocation_metadata()))
        if self.fault:
            raise self.fault
        return replay.GetReplayStatusResponse(duplicates=3)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    show_token("")


@contextmanager
def serving(token: str) -> Iterator[tuple[Answering, RpcServer]]:
    servicer, server = Answering(), RpcServer("127.0.0.1", 0, token=token)
    add_ReplayServiceServicer_to_server(servicer, server.server)
    server.start()
    server.set_serving(True)
    try:
        yield servicer, server
    finally:
        server.stop(0)


def ask(server: RpcServer, shown: str) -> int:
    show_token(shown)
    client = RpcClient("replay-buffer", server.address, ReplayServiceStub)
    try:
        return int(client.call("GetReplayStatus", replay.GetReplayStatusRequest(), 10).duplicates)
    finally:
        client.close()


def test_whoever_shows_the_token_is_answered_and_errors_still_arrive_as_they_were_raised() -> None:
    with serving(TOKEN) as (servicer, server):
        assert ask(server, TOKEN) == 3
        servicer.fault = InvalidInput("no", violations=(FieldViolation("/run_id", "unknown"),))
        with pytest.raises(InvalidInput) as caught:
            ask(server, TOKEN)
    assert caught.value.violations == (FieldViolation("/run_id", "unknown"),)


@pytest.mark.parametrize(
    ("shown", "words"),
    [("", "shows no token"), ("of-another", "not in this service's SPO_RPC_TOKEN"), (TOKEN[:-1], "not in this")],
)
def test_whoever_shows_none_or_another_is_refused_in_words_before_the_handler(shown: str, words: str) -> None:
    with serving(TOKEN) as (servicer, server):
        with pytest.raises(Unauthenticated, match=words) as caught:
            ask(server, shown)
        assert (caught.value.code, caught.value.retryable) == ("rpc_unauthenticated", True)
        assert TOKEN not in str(caught.value)
    assert servicer.seen == []


def test_a_method_that_does_not_exist_is_refused_alike() -> None:
    with serving(TOKEN) as (_, server):
        show_token("")
        client = RpcClient("replay-buffer", server.address, ReplayServiceStub)
        with pytest.raises(Unauthenticated):
            client.call("SampleBatch", replay.SampleBatchRequest(), 10)
        client.close()


def test_health_is_answered_without_a_token_because_probes_have_none() -> None:
    with serving(TOKEN) as (_, server):
        assert is_healthy(server.address, 10)
        assert why_not_serving(server.address) == ""


def test_a_server_without_a_token_answers_everybody_so_callers_can_have_it_first() -> None:
    with serving("") as (servicer, server):
        assert [ask(server, ""), ask(server, TOKEN)] == [3, 3]
        assert [seen.get(HEADER) for seen in servicer.seen] == [None, f"Bearer {TOKEN}"]


def test_while_it_is_changed_the_old_and_the_new_one_are_accepted_and_the_first_is_shown() -> None:
    assert tokens_of(" new, old ,") == ["new", "old"]
    with serving("new,old") as (servicer, server):
        assert [ask(server, "old"), ask(server, "new,old")] == [3, 3]
        assert [seen[HEADER] for seen in servicer.seen] == ["Bearer old", "Bearer new"]


def test_calls_that_can_be_given_up_show_it_too() -> None:
    with serving(TOKEN) as (_, server):
        show_token(TOKEN)
        client = RpcClient("replay-buffer", server.address, ReplayServiceStub)
        process = ServiceProcess("replay-buffer", _Settings(rpc_token=SecretStr(TOKEN)))
        reply = client.call("GetReplayStatus", replay.GetReplayStatusRequest(), 10, stop=process.stop)
        assert reply.duplicates == 3
        client.close()


class _Settings(ServiceSettings, service="token_test"):
    pass


def test_a_service_process_asks_for_the_token_of_its_settings_and_shows_it() -> None:
    process = ServiceProcess("replay-buffer", _Settings(rpc_token=SecretStr(TOKEN)))
    servicer = Answering()
    add_ReplayServiceServicer_to_server(servicer, process.server.server)
    process.answer_probes("starts")
    process.server.loaded()
    client = RpcClient("replay-buffer", process.server.address, ReplayServiceStub)
    assert client.call("GetReplayStatus", replay.GetReplayStatusRequest(), 10).duplicates == 3
    client.close()
    with pytest.raises(Unauthenticated):
        ask(process.server, "of-another")
    assert observability.HEADER not in servicer.seen[0]
    assert TOKEN not in repr(process.settings)
    process.server.stop(0)


class OneJob:
    """The ranks of a trainer, as one that is not the first sees them: a job, and then the end."""

    def __init__(self) -> None:
        spec = toy_spec({"model": {"path": "/pi0"}}).model_dump(mode="json")
        self.grants = [LeaseJobResponse(run_id=RUN, spec_json=json.dumps(spec)), None]

    def share(self, mine: object) -> LeaseJobResponse | None:
        assert mine is None
        return self.grants.pop(0)


def test_a_trainers_other_ranks_show_the_token_of_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 is a service's process."""
    answers: list[int] = []

    def work(ranks: Any, settings: Any, grant: Any, spec: Any, role: Any, attempt: Any) -> None:
        asked = role._replay.client.call("GetReplayStatus", replay.GetReplayStatusRequest(run_id=grant.run_id), 10)
        answers.append(asked.duplicates)

    monkeypatch.setattr(loop, "_attempt", lambda *_: None)
    monkeypatch.setattr(loop, "_work_on", work)
    with serving(TOKEN) as (_, server):
        settings = TrainerSettings(replay_buffer_address=server.address, rpc_token=SecretStr(TOKEN))
        loop.follow_jobs(cast(Any, OneJob()), settings)
    assert answers == [3]


@contextmanager
def composed(name: str, folder: Path) -> Iterator[tuple[str, int, dict[str, str]]]:
    """A service of docker-compose.yml and its Redis as processes on loopback: address, port of Redis, secrets by file.

    Its command and variables are the file's own, but for names of hosts and ports; secrets are made by make_secrets.sh.
    """
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][name]
    (folder / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "make_secrets.sh", folder / "deploy")
    subprocess.run([folder / "deploy" / "make_secrets.sh"], check=True, capture_output=True, timeout=60)
    secrets = {path.name: path.read_text() for path in (folder / "deploy" / "secrets").iterdir()}
    store, port, metrics = free_port(), free_port(), free_port()
    here = {"/var/lib/spo": str(folder), "0.0.0.0": "127.0.0.1", "7070": str(port), "9090": str(metrics)}
    variables = {key: here.get(value, value) for key, value in service["environment"].items() if "${" not in value}
    # Everyone else is away.
    variables = {key: re.sub(r"^(dns:///)?[\w-]+:7070$", "127.0.0.1:1", value) for key, value in variables.items()}
    mounted = {each.upper(): secrets[each].replace("@redis:6379", f"@127.0.0.1:{store}") for each in service["secrets"]}
    environment = os.environ | variables | mounted
    started = (
        [*server_command(store, folder / "redis"), "--requirepass", secrets["redis_password"]],
        [sys.executable, "-m", *service["command"]],
    )
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        for command in started
    ]
    try:
        yield f"127.0.0.1:{port}", store, secrets
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)


def test_whoever_is_on_composes_network_without_the_token_and_the_password_gets_nothing(tmp_path: Path) -> None:
    with composed("replay-buffer", tmp_path) as (address, store, secrets):
        wait_until(lambda: is_healthy(address, 5), "it answers its probe, which has no token", 120)

        def status(shown: str) -> replay.GetReplayStatusResponse:
            show_token(shown)
            client = RpcClient("replay-buffer", address, ReplayServiceStub)
            try:
                return client.call("GetReplayStatus", replay.GetReplayStatusRequest(run_id="none"), 20)
            finally:
                client.close()

        for shown in ("", "guessed", secrets["spo_orchestrator_api_key"], secrets["spo_rpc_token"][:-1]):
            with pytest.raises(Unauthenticated):
                status(shown)
        with redis.Redis(port=store) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        # Who has it is heard.
        with pytest.raises(NotFound, match="there is no run none"):
            status(secrets["spo_rpc_token"])
