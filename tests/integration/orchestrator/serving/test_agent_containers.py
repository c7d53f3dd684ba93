"""Episodes in containers of a real engine: what an agent reaches from there, and what a killed runner leaves."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import docker
import pytest

from spo.cli.agents import EpisodeRunner
from spo.cli.containers import LABEL, ContainerLimits, Containers
from spo.client import Client
from spo.errors import NotReady
from spo.testing.peers import wait_until
from tests.integration.orchestrator.serving.conftest import KEY, Counter
from tests.integration.orchestrator.serving.test_agent_leases import Played
from tests.support.docker_engine import INTERPRETER, interpreter_archive, running_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    # The SDK leaves sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

IMAGE = "spo-test-agent"
# The image has no package: what one of OpenAI's does, by hand, and what a hostile one tries.
AGENT = """
import json, os, socket, urllib.error, urllib.request
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]

def ask(path, body=None, method=None):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(path, data, headers, method=method)) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code

def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
    return False

said = [{"role": "user", "content": open("statement.txt").read()}]
root = base.split("/s/")[0]
chat = {"model": "x", "messages": said}
answer = json.loads(ask(base + "/chat/completions", chat))["choices"][0]["message"]
streamed = ask(base + "/chat/completions", {**chat, "stream": True})
elsewhere = [
    ask(root + path)
    for path in ("/v1/jobs", "/metrics", "/healthz", base[len(root):] + "/../../../v1/jobs", "/s/../v1/jobs")
]
outside = socket.socket()
outside.settimeout(2)
print(json.dumps({
    "answer": answer["content"],
    "streamed": "[DONE]" in streamed,
    "elsewhere": elsewhere,
    "outside": fails(outside.connect, ("10.0.0.1", 80)),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "root": fails(open, "/left", "w"),
    "problem": fails(open, os.environ["SPO_PROBLEM"], "w"),
    "folder": open("left", "w").write("x"),
    "keys": sorted(name for name in os.environ if "SPO" in name or "KEY" in name),
    "statement": said[0]["content"],
}))
"""
# It asks once, so that it is known to run, and ends no more.
ENDLESS = """
import os, time, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", headers=headers))
time.sleep(600)
"""
HUNGRY = "x = bytearray(300 << 20)"


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    with running_engine() as url:
        found = docker.DockerClient(base_url=url, timeout=120)
        found.api.import_image_from_data(interpreter_archive("/bin/sh"), repository=IMAGE)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("DOCKER_HOST", url)
            yield found
        found.images.remove(IMAGE, force=True)
        found.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def counter(open_counter: Callable[..., Counter]) -> Counter:
    return open_counter(replica_silence_seconds=600)


def commands(program: str) -> dict[str, str]:
    return {"guess": f"{INTERPRETER} -I -c '{program}'"}


def left(engine: docker.DockerClient) -> list[str]:
    here = {"label": LABEL}
    return [each.status for each in engine.containers.list(all=True, filters=here, ignore_removed=True)]


def test_an_agent_in_a_container_reaches_its_session_and_nothing_else(
    counter: Counter, engine: docker.DockerClient
) -> None:
    played = Played(counter, reward="verifier")
    containers = Containers(ContainerLimits(IMAGE, memory_bytes=128 << 20))
    with Client(counter.url, KEY) as client:
        EpisodeRunner(client, "default", commands(AGENT), None, 1, containers).run(threading.Event(), 1)
        # More memory than it may have ends it: no answer, and no reward.
        EpisodeRunner(client, "default", commands(HUNGRY), None, 1, containers).run(threading.Event(), 1)
    (group,) = played.context.agent_episodes._open[played.job_id].values()
    done, hungry = group.episodes
    found = json.loads(done.answer)
    assert found == {
        "answer": "one two three",
        "streamed": True,
        "elsewhere": [404] * 5,
        "outside": True,
        "interfaces": ["lo"],
        "root": True,
        "problem": True,
        "folder": 1,
        "keys": ["ANTHROPIC_API_KEY", "OPENAI_API_KEY", "SPO_MODEL", "SPO_PROBLEM"],
        "statement": "guess",
    }
    # It ended before its first call, and no agent of its runner has called yet: no attempt of its episode is used up.
    assert (done.state, hungry.state, hungry.attempt) == ("done", "waiting", 0)
    assert left(engine) == []
    containers.close()


def test_a_runner_that_is_killed_leaves_no_container(counter: Counter, engine: docker.DockerClient) -> None:
    Played(counter, reward="verifier")
    command = [sys.executable, "-m", "spo.cli", "agents", "run", "--image", f"{IMAGE},memory_mib=128"]
    harness = f"guess={commands(ENDLESS)['guess']}"
    runner = subprocess.Popen(
        [*command, "--harness", harness],
        env={**os.environ, "SPO_API_URL": counter.url, "SPO_API_KEY": KEY},
    )
    try:
        wait_until(lambda: left(engine) == ["running"], "the agent runs", 150)
        runner.send_signal(signal.SIGKILL)
        runner.wait(30)
        wait_until(lambda: left(engine) == [], "what it had started is gone")
    finally:
        runner.kill()
        runner.wait(30)


def test_an_image_that_is_not_there_is_told_before_an_episode_is_leased(engine: docker.DockerClient) -> None:
    with pytest.raises(NotReady, match="no image no-such-image") as refused:
        Containers(ContainerLimits("no-such-image"))
    assert refused.value.code == "no_containers"
