"""Episodes as trials of Harbor: its own program, agents and verifier, in containers of a real engine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import httpx
import pytest

from spo.cli.agents import HarborRunner, Running
from spo.cli.containers import COMPOSED
from spo.client import Client
from spo.client.models import EpisodeLease
from spo.testing.peers import wait_until
from tests.integration.orchestrator.serving.conftest import KEY, Counter
from tests.integration.orchestrator.serving.test_agent_leases import Played
from tests.support.docker_engine import compose_engine, harbor_task

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.cpu_seconds(240),
    pytest.mark.timeout(900),
    # The SDK leaves sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

# A module of anybody's for Harbor: it asks the policy and then does nothing for a long time.
ENDLESS = """
import asyncio, json, os, urllib.request
from harbor.agents.nop import NopAgent

class Endless(NopAgent):
    async def run(self, instruction, environment, context):
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        address = os.environ["OPENAI_BASE_URL"] + "/models"
        await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(address, headers=headers))
        await asyncio.sleep(600)
"""


# How runners name their trials; a platform in containers may be beside them on the engine.
RUNNERS = re.compile(r"spo\d+-\d+-")


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    with compose_engine() as url, pytest.MonkeyPatch.context() as patched:
        patched.setenv("DOCKER_HOST", url)
        found = docker.DockerClient(base_url=url, timeout=120)
        yield found
        found.close()


@pytest.fixture
def tasks(engine: docker.DockerClient, tmp_path: Path) -> Path:
    harbor_task(engine, tmp_path / "tasks" / "hello", "guess", "Hello, world!")
    return tmp_path / "tasks"


@pytest.fixture
def counter(open_counter: Callable[..., Counter]) -> Counter:
    return open_counter(replica_silence_seconds=600)


class Calling(HarborRunner):
    """Harbor's own agents of tests ask no model, and an episode without a call has no reward: it calls for them."""

    def begin(self, command: list[str], folder: Path, lease: EpisodeLease) -> Running:
        body = {"model": "x", "messages": [{"role": "user", "content": lease.statement}]}
        headers = {"Authorization": f"Bearer {lease.session.key}"}
        address = f"{lease.session.base_url}/chat/completions"
        httpx.post(address, json=body, headers=headers, timeout=60, trust_env=False).raise_for_status()
        return super().begin(command, folder, lease)


def left(engine: docker.DockerClient) -> list[str]:
    """Projects of this process's runners, or of what it has started, that the engine still has."""
    found = engine.containers.list(all=True, filters={"label": COMPOSED}, ignore_removed=True)
    networks = [each.name for each in engine.networks.list()]
    return [name for name in [*(each.labels[COMPOSED] for each in found), *networks] if RUNNERS.match(name)]


def test_the_oracle_earns_1_and_an_agent_that_does_nothing_earns_0(
    counter: Counter, engine: docker.DockerClient, tasks: Path
) -> None:
    played = Played(counter)
    with Client(counter.url, KEY) as client:
        for agent in ("oracle", "nop"):
            runner = Calling(client, "default", {"guess": agent}, tasks)
            runner.run(threading.Event(), 1)
            runner.close()
    (group,) = played.context.agent_episodes._open[played.job_id].values()
    assert [(each.state, each.reward) for each in group.episodes] == [("done", 1.0), ("done", 0.0)]
    assert left(engine) == []


def test_a_killed_runner_leaves_no_container_and_no_network(
    counter: Counter, engine: docker.DockerClient, tasks: Path, tmp_path: Path
) -> None:
    Played(counter)
    (tmp_path / "endless.py").write_text(ENDLESS)
    command = [sys.executable, "-m", "spo.cli", "agents", "harbor", str(tasks), "--harness", "guess=endless:Endless"]
    runner = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "SPO_API_URL": counter.url, "SPO_API_KEY": KEY})
    try:
        wait_until(lambda: len(left(engine)) == 2, "the trial's container and network", 240)
        runner.send_signal(signal.SIGKILL)
        runner.wait(30)
        wait_until(lambda: left(engine) == [], "what it had started is gone", 240)
    finally:
        runner.kill()
        runner.wait(30)


def test_a_runner_that_is_asked_to_stop_removes_its_containers_and_gives_the_episode_back(
    counter: Counter, engine: docker.DockerClient, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(counter)
    (tmp_path / "endless.py").write_text(ENDLESS)
    monkeypatch.chdir(tmp_path)
    stop = threading.Event()
    with Client(counter.url, KEY) as client:
        runner = HarborRunner(client, "default", {"guess": "endless:Endless"}, tasks)
        thread = threading.Thread(target=runner.run, args=(stop,))
        thread.start()
        wait_until(lambda: len(left(engine)) == 2, "the trial's container and network", 240)
        stop.set()
        thread.join(240)
        assert not thread.is_alive()
        # Before whatever is left is removed: Harbor has done it.
        assert left(engine) == []
        runner.close()
    (group,) = played.context.agent_episodes._open[played.job_id].values()
    assert [each.state for each in group.episodes] == ["waiting", "waiting"]
