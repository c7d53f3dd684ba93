"""The runner of agents as a service: plays, keeps its key from its agents, says how it is, and drains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.agent_runner.confined import landlock_version
from spo.local.launcher import free_ports
from spo.rpc.client import is_healthy
from spo.testing.peers import wait_until
from tests.integration.orchestrator.serving.conftest import KEY, Counter
from tests.integration.orchestrator.serving.test_agent_leases import Played

pytestmark = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")

# Calls its session by the address and key that it is told, without a package, and then looks around.
AGENT = """
import glob, json, os, signal, socket, sys, urllib.request

def call():
    body = json.dumps({"model": "x", "messages": [{"role": "user", "content": "x"}]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))

def tried(what):
    try:
        return str(what())
    except OSError as error:
        return type(error).__name__

found = {"text": call()["choices"][0]["message"]["content"]}
# Behind the process that keeps the agent stands the runner.
keeper = os.getppid()
runner = int(open(f"/proc/{keeper}/stat").read().rpartition(")")[2].split()[1])
found["keeper"] = tried(lambda: open(f"/proc/{keeper}/mem", "rb"))
found["environment"] = tried(lambda: open(f"/proc/{runner}/environ").read())
found["memory"] = tried(lambda: open(f"/proc/{runner}/mem", "rb"))
found["signal"] = tried(lambda: os.kill(runner, 0))
found["secret"] = tried(lambda: open(sys.argv[1]).read())
found["episodes"] = tried(lambda: os.listdir(os.path.dirname(os.getcwd())))
found["beside"] = tried(lambda: open(os.path.dirname(os.getcwd()) + "/mine", "w"))
found["own"] = tried(lambda: open("mine", "w").write("x"))
found["held"] = sorted(name for name in os.environ if "RUNNER" in name or "SPO_API" in name)
print(json.dumps(found))
"""


class Service:
    """The process and where it answers."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, metrics_port: int, log: Path) -> None:
        self.process, self.address, self.log = process, f"127.0.0.1:{port}", log
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"

    def count(self, name: str) -> float:
        lines = httpx.get(self.metrics_url, timeout=10, trust_env=False).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def counter(open_counter: Callable[..., Counter]) -> Counter:
    return open_counter(replica_silence_seconds=600)


@contextmanager
def serving(url: str, folder: Path, harness: str, **settings: object) -> Iterator[Service]:
    """The service as a pod starts it, with a key in a file as Docker mounts it; killed at last if it has not gone."""
    ports = free_ports(["grpc", "metrics"], {})
    told = {
        "HOST": "127.0.0.1",
        "PORT": ports["grpc"],
        "METRICS_PORT": ports["metrics"],
        "API_URL": url,
        "API_KEY": KEY,
    }
    told |= {"HARNESSES": json.dumps({"guess": harness}), **settings}
    environment = {**os.environ, **{f"SPO_AGENT_RUNNER_{name}": str(value) for name, value in told.items()}}
    with (folder / "runner.log").open("wb") as log:
        command = [sys.executable, "-m", "services.agent_runner"]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield Service(process, ports["grpc"], ports["metrics"], folder / "runner.log")
    finally:
        process.kill()
        process.wait()


def test_a_runner_service_plays_episodes_whose_agents_see_neither_its_key_nor_each_other(
    counter: Counter, tmp_path: Path
) -> None:
    played = Played(counter)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "agent.py").write_text(AGENT)
    (tmp_path / "key").write_text(KEY)
    # Where it is told what the agent has printed, it gives a reward and keeps what it saw.
    (tmp_path / "score.py").write_text(
        f"open({str(tmp_path / 'seen')!r}, 'a').write(open('answer.txt').read())\nprint(1)"
    )
    harness = f"{sys.executable} {programs}/agent.py {tmp_path}/key"
    score, readable = f"{sys.executable} {tmp_path}/score.py", json.dumps([str(programs)])
    with serving(counter.url, tmp_path, harness, SCORE=score, READABLE=readable) as service:
        wait_until(
            lambda: service.process.poll() is not None or is_healthy(service.address), "the runner is ready", 120
        )
        wait_until(lambda: service.count("spo_agent_runner_episodes_total{") >= 2, "both episodes are played", 240)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0, service.said()

    rollouts = played.rollouts()
    assert [each.verdict.score for each in rollouts] == [1, 1], service.said()[-3000:]
    for found in map(json.loads, (tmp_path / "seen").read_text().replace("}{", "}\n{").splitlines()):
        assert found.pop("text") == "one two three"
        assert found.pop("own") == "1"
        assert found == {
            **dict.fromkeys(
                ("keeper", "environment", "memory", "signal", "secret", "episodes", "beside"), "PermissionError"
            ),
            "held": [],
        }
    assert KEY not in service.said()


def test_a_runner_that_is_asked_to_go_gives_back_what_does_not_end_in_time(counter: Counter, tmp_path: Path) -> None:
    played = Played(counter)
    with serving(counter.url, tmp_path, "sleep 600", MOST=2, DRAIN_SECONDS=16, SCORE="echo 1") as service:
        wait_until(lambda: "spo_agent_runner_playing 2.0" in _metrics(service), "both are played", 120)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0, service.said()
    assert [each["fence"] for each in played.lease(most=5)] == [0, 0]


def _metrics(service: Service) -> str:
    try:
        return httpx.get(service.metrics_url, timeout=10, trust_env=False).text
    except httpx.TransportError:
        return ""


def test_a_runner_is_not_ready_while_the_platform_is_away_and_ends_where_it_is_refused(
    counter: Counter, tmp_path: Path
) -> None:
    away = f"http://127.0.0.1:{free_ports(['away'], {})['away']}"
    with serving(away, tmp_path, "true") as service:
        wait_until(lambda: "no episodes can be leased" in service.said(), "it has asked in vain", 120)
        wait_until(lambda: not is_healthy(service.address), "it is not ready", 30)
        assert service.process.poll() is None
    with serving(counter.url, tmp_path, "true", API_KEY="wrong") as service:
        assert service.process.wait(120) == 1
        assert '"unauthorized"' in service.said()
        assert "Traceback" not in service.said()
    with serving(counter.url, tmp_path, "no-such-program") as service:
        assert service.process.wait(120) == 1
        assert "no-such-program" in service.said()
