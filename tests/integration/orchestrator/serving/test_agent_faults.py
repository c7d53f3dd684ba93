"""What dies in the middle of an episode (runner, orchestrator, Redis, replica), and weights that change meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.agent_episodes import MOST_ATTEMPTS
from services.orchestrator.jobs import JobStore
from spo import redis_keys
from spo.cli.agents import EpisodeRunner, work_folder
from spo.client import Client
from spo.errors import InvalidInput
from spo.local.launcher import server_command
from spo.messaging.streams.entries import publish
from spo.rpc.client import RpcClient
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles, wait_until
from spo.testing.runs import toy_spec
from spo.v1.inference_service_pb2 import ServedToken
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt, PromptGroup, Sampling
from spo.v1.trajectory_pb2 import RolloutGroup
from tests.conftest import free_port
from tests.integration.orchestrator.serving.conftest import KEY, Counter
from tests.integration.orchestrator.serving.test_agent_leases import PLAYED, Played
from tests.integration.orchestrator.serving.test_agent_sessions import Agent, written
from tests.support.orchestrator_process import OrchestratorProcess

# A group is taken up by the next orchestrator once it has been nobody's for half a minute.
TAKEN_UP_SECONDS = 120
AGENT = """
import json, os, urllib.request
body = json.dumps({"model": "x", "messages": [{"role": "user", "content": "x"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
print(json.load(urllib.request.urlopen(urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)))["choices"][0]["message"]["content"])
"""


@pytest.fixture
def counter(open_counter: Callable[..., Counter]) -> Counter:
    return open_counter(replica_silence_seconds=600)


def test_an_episode_whose_runner_is_killed_in_a_call_begins_anew_and_the_old_call_is_not_stored(
    counter: Counter, tmp_path: Path
) -> None:
    played, double = Played(counter), counter.peers.inference
    double.goes_on = threading.Event()
    # What it has started goes into a session of its own, and outlives it where nobody ends it.
    helper = "import subprocess; subprocess.Popen(['sh', '-c', 'sleep 600 & sleep 600'], start_new_session=True)"
    (tmp_path / "agent.py").write_text(f"{helper}\n{AGENT}")
    command = [sys.executable, "-m", "spo.cli", "agents", "run", "--harness"]
    command += [f"guess={sys.executable} {tmp_path}/agent.py", "--score", f"{sys.executable} -c print(1)"]
    environment = os.environ | {"SPO_API_URL": counter.url, "SPO_API_KEY": KEY, "TMPDIR": str(tmp_path)}
    with (tmp_path / "runner.log").open("wb") as log:
        runner = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: double.serving == 1, "the agent is in its call", 120)
    finally:
        runner.kill()
        runner.wait()
    # With the runner end its agent and all that this has started, and the episode's folder goes.
    wait_until(lambda: not list(_at_home_in(tmp_path)), "the killed runner's processes have ended", 30)
    wait_until(lambda: not list(tmp_path.glob("spo-episodes-*/episode-*")), "its episode's folder has gone", 30)
    played.silence()
    double.goes_on.set()
    wait_until(lambda: double.serving == 0, "the call has ended")
    double.goes_on = None
    first, second = sorted(played.lease(most=2), key=lambda lease: -lease["fence"])
    assert (first["fence"], second["fence"]) == (1, 0)
    for lease in (first, second):
        played.call(lease, "y")
        assert played.end(lease, reward=0.5).status_code == 200
    sessions = played.context.agent_sessions
    (killed,) = [
        each
        for each, _ in sessions.of_job(played.job_id, 10)
        if (sessions.outcome(each) or {}).get("status") not in ("finished", "cut")
    ]
    assert not sessions.tree(killed).nodes(), "a call whose session has ended is not stored"
    rollouts = played.rollouts()
    assert sorted((each.sample_index, each.attempt, each.verdict.score) for each in rollouts) == sorted(
        (sessions.get(lease["lease_id"]).sample, lease["fence"], 0.5) for lease in (first, second)
    )


def _at_home_in(folder: Path) -> Iterator[psutil.Process]:
    """Processes whose home is below the folder, as an agent's is, and what it starts."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME", "").startswith(f"{folder}/"):
                yield process


def test_a_runner_removes_what_one_that_died_has_left_and_nothing_of_one_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    died = tmp_path / "spo-episodes-died"
    (died / "episode-1").mkdir(parents=True)
    (died / "episode-1" / "answer.txt").write_text("42")
    (died / ".lock").touch()
    with work_folder() as first:
        assert not died.exists()
        with work_folder() as second:
            assert first.exists()
            assert second.exists()
    assert not list(tmp_path.iterdir())


class Platform:
    """A real orchestrator and a Redis of its own that die, with a running job whose group agents play."""

    def __init__(self, peers: ServiceDoubles, folder: Path) -> None:
        self.peers, self.redis_folder, port = peers, folder / "redis", free_port()
        self.server_command = server_command(port, self.redis_folder)
        self.start_redis(redis.Redis(port=port))
        self.orchestrator = OrchestratorProcess(f"redis://127.0.0.1:{port}/0", peers, folder)
        own = {"SPO_ORCHESTRATOR_API_KEY": KEY, "SPO_ORCHESTRATOR_REPLICA_SILENCE_SECONDS": "3600"}
        self.orchestrator.environment = {**self.orchestrator.environment, **own}
        jobs, model = JobStore(self.redis), {"path": "/models/pi0", "max_prompt_tokens": 64, "max_response_tokens": 256}
        self.job_id = jobs.submit(toy_spec({**PLAYED, "model": model}))
        for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
            assert jobs.transition(self.job_id, state, "test")
        sampling = Sampling(samples=2, temperature_min=1, temperature_max=1, top_p=1, max_tokens=256, seed=3)
        prompt = Prompt(prompt_id="ab", text="guess", response_format="raw", language="text")
        group = PromptGroup(
            group_id=f"{self.job_id}-0", run_id=self.job_id, prompt=prompt, sampling=sampling, source=SOURCE_ONLINE
        )
        publish(self.redis, redis_keys.prompts(self.job_id), [group.SerializeToString()])
        peers.inference.prompt_of = written
        peers.inference.shown = lambda word: ServedToken(text=word, logprob=-0.5)

    def start_redis(self, client: redis.Redis) -> None:
        self.redis = client
        self.server = subprocess.Popen(self.server_command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, "Redis answers", 60)

    def _answers(self) -> bool:
        try:
            return bool(self.redis.ping())
        except redis.RedisError:
            return False

    def start(self) -> None:
        self.orchestrator.start()
        client = RpcClient("orchestrator", f"127.0.0.1:{self.orchestrator.grpc_port}", OrchestratorServiceStub)
        beat = HeartbeatRequest(
            replica_id="inference-1", pool="inference", address=self.peers.address, run_id=self.job_id
        )
        client.call("Heartbeat", beat, deadline_seconds=30)
        client.close()

    def ask(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """What the orchestrator answers; a 599 where nothing does."""
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            return httpx.post(self.orchestrator.url + path, json=body, headers=headers, trust_env=False, timeout=60)
        except httpx.TransportError:
            return httpx.Response(599)

    def lease(self) -> list[dict[str, Any]]:
        found = self.ask("/v1/agents/leases", {"pool": "default", "most": 2, "wait_seconds": 1})
        items: list[dict[str, Any]] = found.json()["items"] if found.is_success else []
        return items

    def told(self, lease: dict[str, Any], path: str, body: dict[str, Any]) -> list[int]:
        """Statuses of what a runner tells of an episode until it is taken; a lost lease is not waited for."""
        statuses: list[int] = []

        def taken() -> bool:
            statuses.append(
                self.ask(
                    f"/v1/agents/leases/{lease['lease_id']}/{path}", {"token": lease["session"]["token"], **body}
                ).status_code
            )
            return statuses[-1] < 500

        wait_until(taken, f"{path} is taken", TAKEN_UP_SECONDS, 1)
        return statuses

    def call(self, lease: dict[str, Any], *said: str, tries: int = 0) -> int:
        """The status of a call, as an SDK makes it that tries for the given time."""
        session = lease["session"]
        headers = {"Authorization": f"Bearer {session['key']}", "x-stainless-retry-count": str(tries)}
        body = {"model": "x", "messages": [{"role": "user", "content": text} for text in said]}
        try:
            found = httpx.post(
                f"{session['base_url']}/chat/completions", json=body, headers=headers, trust_env=False, timeout=60
            )
        except httpx.TransportError:
            return 599
        return found.status_code

    def called_until_answered(self, lease: dict[str, Any], *said: str) -> None:
        tries = iter(range(1, 1000))
        wait_until(lambda: self.call(lease, *said, tries=next(tries)) == 200, "the call is answered", 120, 1)

    def tree(self, lease: dict[str, Any]) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{self.orchestrator.url}/v1/agents/sessions/{lease['lease_id']}/tree"
        calls: list[dict[str, Any]] = httpx.get(url, headers=headers, trust_env=False, timeout=60).json()["calls"]
        return calls

    def close(self) -> None:
        self.orchestrator.kill()
        self.redis.close()
        self.server.kill()
        self.server.wait(20)


@pytest.fixture
def platform(peers: ServiceDoubles, tmp_path: Path) -> Iterator[Platform]:
    found = Platform(peers, tmp_path)
    yield found
    peers.inference.goes_on = None
    found.close()


@pytest.mark.timeout(600)
def test_episodes_go_on_behind_an_orchestrator_and_a_redis_that_were_killed_in_calls_and_between_them(
    platform: Platform,
) -> None:
    double = platform.peers.inference
    platform.start()
    one, two = wait_until(lambda: (found := platform.lease()) and found, "both episodes are leased", 60)
    assert platform.call(one, "between") == 200
    with ThreadPoolExecutor(1) as threads:

        def held(lease: dict[str, Any], text: str) -> Future[int]:
            """A call that is under way until the double goes on."""
            double.goes_on = threading.Event()
            call = threads.submit(platform.call, lease, text)
            wait_until(lambda: double.serving == 1, "the call is under way", 60)
            return call

        cut = held(two, "within")
        platform.orchestrator.end(signal.SIGKILL)
        assert cut.result(60) == 599
        assert double.goes_on is not None
        double.goes_on.set()
        platform.start()
        # It knows of both leases before it has taken their group up again: neither is said to be lost.
        renewed = {status for lease in (one, two) for status in platform.told(lease, "renew", {})}
        assert renewed <= {200, 503}
        platform.called_until_answered(two, "within")
        assert platform.call(one, "between", "again") == 200

        cut = held(one, "and again")
        platform.server.kill()
        platform.server.wait(20)
        double.goes_on.set()
        assert cut.result(120) >= 500, "nothing is answered that is not stored"
        platform.start_redis(platform.redis)
        platform.called_until_answered(one, "and again")
        assert platform.told(two, "renew", {})[-1] == 200
    assert [len(platform.tree(lease)) for lease in (one, two)] == [3, 1]
    # Neither key nor token stands in what is shown of a session, said in logs, or written by Redis.
    shown = json.dumps([platform.tree(lease) for lease in (one, two)]).encode()
    kept = [each.read_bytes() for each in platform.redis_folder.rglob("*") if each.is_file()]
    everything = b"".join([shown, platform.orchestrator.log.read_bytes(), *kept])
    assert one["lease_id"].encode() in everything
    for lease in (one, two):
        secrets = lease["session"]["key"].partition(".")[2], lease["session"]["token"]
        assert not any(secret.encode() in everything for secret in secrets)
    sampled = [[call["sampled"] for call in platform.tree(lease)] for lease in (one, two)]
    assert platform.told(one, "outcome", {"status": "finished", "reward": 1})[-1] == 200
    assert platform.redis.xlen(redis_keys.rollouts()) == 0, "no reward before both have finished"
    assert platform.told(two, "outcome", {"status": "finished", "reward": 0.25})[-1] == 200
    wait_until(lambda: platform.redis.xlen(redis_keys.rollouts()) == 1, "the group is passed on", TAKEN_UP_SECONDS)
    ((_, fields),) = platform.redis.xrange(redis_keys.rollouts())
    trajectories = RolloutGroup.FromString(fields[b"payload"]).trajectories
    assert [(each.sample_index, each.attempt, each.verdict.score) for each in trajectories] == [(0, 0, 1), (1, 0, 0.25)]
    for each, calls in zip(trajectories, sampled, strict=True):
        assert sum(part.tokens for part in each.segments if part.kind == 1) == sum(map(len, calls))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_replica_that_dies_in_a_call_leaves_nothing_of_it_and_the_package_tries_again(
    counter: Counter, *, streamed: bool
) -> None:
    agent, double = Agent(counter), counter.peers.inference
    said: Any = [{"role": "user", "content": "x"}]
    with openai.OpenAI(base_url=agent.grant["base_url"], api_key=agent.grant["key"], max_retries=3) as client:
        double.dies = 1
        if streamed:
            with pytest.raises(openai.APIError):
                list(client.chat.completions.create(model="x", messages=said, stream=True))
            assert not agent.tree()
            parts = list(client.chat.completions.create(model="x", messages=said, stream=True))
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        else:
            text = client.chat.completions.create(model="x", messages=said).choices[0].message.content or ""
    assert (text, double.dies) == ("one two three", 0)
    (call,) = agent.tree()
    assert call["text"] == "one two three"


def test_an_agent_that_fails_since_no_replica_answers_costs_its_episode_no_attempt_and_its_runner_nothing(
    open_counter: Callable[..., Counter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = open_counter(serving_wait_seconds=0.1, replica_silence_seconds=600)
    played = Played(counter)
    beat = HeartbeatRequest(
        replica_id="inference-1", pool="inference", address=counter.peers.address, run_id=played.job_id
    )
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.setattr("spo.cli.agents.PAUSE_SECONDS", 0.05)
    played.context.replicas.beat(HeartbeatRequest(replica_id="inference-1", pool="inference", draining=True))
    with Client(counter.url, KEY) as client:
        runner = EpisodeRunner(client, "default", {"guess": f"{sys.executable} {tmp_path}/agent.py"}, "echo 1", 1)
        runner.run(threading.Event(), MOST_ATTEMPTS + 1)
        # One that has been answered since has failed by itself.
        (lease,) = played.lease()
        refused = played.call(lease, "x")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert refused.headers["x-should-retry"] == "true"
        played.context.replicas.beat(beat)
        wait_until(lambda: played.call(lease, "x").status_code == 200, "a replica answers")
        assert played.end(lease, status="failed").status_code == 200
        runner.run(threading.Event(), 2)
    rollouts = played.rollouts()
    assert sorted((each.attempt, each.verdict.score) for each in rollouts) == [(0, 1), (1, 1)]
    assert not played.context.redis.exists(own_keys.agent_lost(played.job_id))


def test_weights_that_change_in_each_call_leave_its_prompt_as_it_was_and_keep_none_waiting(counter: Counter) -> None:
    played, double = Played(counter), counter.peers.inference
    one, two = played.lease(most=2)
    said: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    for version in (3, 4, 7):
        double.version = version
        answer = played.say(one, said).json()["choices"][0]["message"]
        assert double.asked.loaded_version, "whatever is loaded samples it: no turn of a version is waited for"
        fed = list(double.asked.context_token_ids)
        before = counter.ask("GET", f"/v1/agents/sessions/{one['lease_id']}/tree").json()["calls"][:-1]
        assert fed == [token for call in before for token in (*call["read"], *call["sampled"])]
        said += [answer, {"role": "user", "content": f"go on {version}"}]
    calls = counter.ask("GET", f"/v1/agents/sessions/{one['lease_id']}/tree").json()["calls"]
    assert [(call["parent"], call["version_first"], call["version_last"]) for call in calls] == [
        (None, 3, 3),
        (0, 4, 4),
        (1, 7, 7),
    ]
    assert played.end(one, reward=1).status_code == 200
    played.call(two, "x")
    assert played.end(two, reward=1).status_code == 200
    first, second = played.rollouts()
    assert [(each.policy_version_first, each.policy_version_last) for each in (first, second)] == [(3, 7), (7, 7)]
    assert [part.kind for part in first.segments] == [1, 2, 1, 2, 1]


def test_a_runner_without_a_score_gives_back_at_once_what_wants_one_and_says_so(counter: Counter) -> None:
    played = Played(counter)
    with Client(counter.url, KEY) as client:
        runner = EpisodeRunner(client, "default", {"guess": sys.executable}, None, 1)
        with pytest.raises(InvalidInput, match="start it with --score") as refused:
            runner.run(threading.Event())
    assert refused.value.code == "no_score"
    assert [each["fence"] for each in played.lease(most=5)] == [0, 0]


def test_a_runner_tells_an_episodes_end_again_while_the_platform_is_away(
    counter: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(counter)
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.setattr("spo.cli.agents.PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("spo.cli.agents.RENEW_SECONDS", 0.0)
    episodes = played.context.agent_episodes
    taken, asked = episodes._open.pop(played.job_id), threading.Event()
    own = type(episodes)._held

    def held(self: Any, session: Any) -> Any:
        asked.set()
        return own(self, session)

    episodes._open[played.job_id] = taken
    with Client(counter.url, KEY, retry_seconds=0) as client:
        runner = EpisodeRunner(client, "default", {"guess": f"{sys.executable} {tmp_path}/agent.py"}, "echo 1", 1)
        thread = threading.Thread(target=runner.run, args=(threading.Event(), 1))
        thread.start()
        wait_until(lambda: any(each.state == "leased" for group in taken.values() for each in group.episodes), "leased")
        # As a new orchestrator is that has not taken the group up yet.
        episodes._open.pop(played.job_id)
        monkeypatch.setattr(type(episodes), "_held", held)
        assert asked.wait(60)
        episodes._open[played.job_id] = taken
        thread.join(60)
    assert not thread.is_alive()
    assert runner.ended == 1
