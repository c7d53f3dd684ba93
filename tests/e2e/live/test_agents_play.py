"""A job whose episodes anybody's script plays: `spo agents run` starts it, and what it was answered is trained on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest

from spo.client import Client
from spo.reproduce.plan import merged
from spo.tasks.toy import toy_tasks
from tests.e2e.conftest import SHORT, demo_spec
from tests.e2e.live.test_verifiers import QUICK
from tests.support.docker_engine import compose_engine, harbor_task

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_seconds(200), pytest.mark.timeout(900)]

# It knows the package and the variables that the package reads, and nothing of the platform. It thinks twice of its
# first question, goes on from its second answer, asks something beside, and forgets all but its question at last.
# Of each problem the first six runs fail behind a call, so that one episode or two of its first group are lost.
SCRIPT = """
import hashlib, json, os, sys, urllib.request

def fails():
    name = __file__ + hashlib.sha256(open("statement.txt", "rb").read()).hexdigest()
    for number in range(6):
        try:
            os.close(os.open(f"{name}.{number}", os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            pass

if fails():
    body = {"model": "x", "messages": [{"role": "user", "content": "0"}], "max_tokens": 1}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
    sys.exit("gives up")

import openai
client = openai.OpenAI(max_retries=5)

def ask(said, model="gpt-5"):
    answer = client.chat.completions.create(model=model, messages=said, max_tokens=10)
    return answer.choices[0].message

question = {"role": "user", "content": open("statement.txt").read()}
ask([question])
said = [question, ask([question]).model_dump(), {"role": "user", "content": "1"}]
found = ask(said)
ask([{"role": "user", "content": "2"}], "gpt-5-mini")
beside = ask([{"role": "user", "content": "3"}])
said = [question, {"role": "assistant", "content": "so"}, {"role": "user", "content": "4"}]
print(ask(said).content, found.content, beside.content)
print(json.load(open("problem.json"))["session"])
"""
SCORE = "print(float('p' in open('answer.txt').read()))"
PLAYED: dict[str, Any] = {
    # What is said beside begins prompts of its own.
    "model": {"max_prompt_tokens": 48},
    "tasks": {
        "train_problems": 6,
        "evaluation_problems": 0,
        "harness": {
            **{"name": "script", "max_calls": 8, "max_seconds": 120, "reward": "runner", "runner_pool": "e2e"},
            # A branch has as many tokens as a response; an episode has three.
            "max_episode_tokens": 160,
        },
    },
    "algorithm": {"losses": [{"objective": "group_centred_squared"}], "value_noise": None},
    "rollout": {"samples_per_prompt": 4, "temperature": 1.0, "top_p": 1.0},
    "offline": {"human_solutions": False, "keep_reference_samples": False},
    "replay": {"mix": [{"source": "online", "share": 1.0}], "unit": "group", "min_online": 8},
    "trainer": {"batch_size": 8, "steps": 3},
}


@contextmanager
def runner(url: str, folder: Path) -> Iterator[None]:
    """`spo agents run` as a person starts it, ended by SIGTERM."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "score.py").write_text(SCORE)
    commands = [f"script={sys.executable} {folder / 'script.py'}", f"{sys.executable} {folder / 'score.py'}"]
    command = [sys.executable, "-m", "spo.cli", "agents", "run", "--harness", commands[0], "--score", commands[1]]
    with (folder / "runner.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--pool", "e2e", "--most", "2"], env=os.environ | {"SPO_API_URL": url}, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "runner.log").read_text()


def test_a_script_whose_episodes_branch_plays_a_job_and_each_token_of_its_trees_is_trained_once(
    live: Any, client: Client, tmp_path: Path, reference_model: Path
) -> None:
    spec = {**demo_spec(reference_model, merged(SHORT, QUICK), PLAYED), "value": None, "name": "played"}
    job = client.submit(spec)

    with runner(live.url, tmp_path):
        ended = client.wait(job.id, 600)

    assert (ended.state, ended.failure) == ("succeeded", None), (tmp_path / "runner.log").read_text()[-3000:]
    kept = client.trajectories(job.id, limit=50)
    assert len(kept) >= 8
    # Whole groups but for what was lost, each sample once; what was played as the last step was done is nobody's.
    groups = Counter(each.group_id for each in kept)
    assert set(groups.values()) <= {2, 3, 4}
    assert min(groups.values()) < 4
    assert len({each.trajectory_id for each in kept}) == len(kept)
    # What the sessions' trees have as sampled and not thrown away was trained on, each token once, and nothing else.
    wholes = {each.trajectory_id: client.trajectory(job.id, each.trajectory_id) for each in kept}
    for whole in wholes.values():
        calls = client.agents.tree(whole.segments[-1].text.split()[-1]).calls
        assert [call.parent for call in calls] == [None, None, 1, None, None, None]
        first, second, beside, last = (calls[number] for number in (1, 2, 4, 5))
        assert whole.prompt_token_ids == first.read
        assert [(part.kind, part.tokens) for part in whole.segments] == [
            *(("action", len(first.sampled)), ("observation", len(second.read)), ("action", len(second.sampled))),
            *(("branch", len(beside.read)), ("action", len(beside.sampled))),
            *(("branch", len(last.read)), ("action", len(last.sampled))),
        ]
        texts = [first.sampled, second.read, second.sampled, beside.read, beside.sampled, last.read, last.sampled]
        assert whole.response_token_ids == [token for tokens in texts for token in tokens]
        assert len(whole.sampling_logprobs) == len(whole.response_token_ids)
    learnt = client.metrics(job.id)
    assert learnt.steps == [1, 2, 3]
    lacking: set[str] = set()
    for step, tokens in zip(learnt.steps, learnt.series["tokens"], strict=True):
        drawn = [wholes[each] for each in client.batch(job.id, step).trajectory_ids]
        # Two groups, each with all that it has.
        of_batch = Counter(whole.group_id for whole in drawn)
        assert of_batch == {group: groups[group] for group in of_batch}
        assert len(of_batch) == 2
        lacking |= {group for group, count in of_batch.items() if count < 4}
        assert tokens == sum(part.tokens for whole in drawn for part in whole.segments if part.kind == "action")
    assert lacking, "a group of which episodes are lost is trained on"


# An agent of anybody's for Harbor: it asks the policy once, and does what the task wants where the answer has a "p".
HARBOR_AGENT = """
import asyncio, json, os, urllib.request
from harbor.agents.nop import NopAgent

def ask(said):
    body = {"model": "x", "messages": [{"role": "user", "content": said}], "max_tokens": 10}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

class Asks(NopAgent):
    async def run(self, instruction, environment, context):
        if "p" in await asyncio.to_thread(ask, instruction.strip()):
            await environment.exec("echo 'done' > hello.txt")
"""


@pytest.mark.nightly
def test_trials_of_harbor_in_containers_are_rewarded_by_their_tests_and_trained_on(
    live: Any, client: Client, tmp_path: Path, reference_model: Path
) -> None:
    with compose_engine() as engine:
        found = docker.DockerClient(base_url=engine, timeout=120)
        harbor_task(found, tmp_path / "tasks" / "hello", toy_tasks(1, 0, 0).train[0].statement, "done")
        found.close()
        (tmp_path / "asks.py").write_text(HARBOR_AGENT)
        spo = [sys.executable, "-m", "spo.cli", "agents"]
        rows = subprocess.run([*spo, "harbor-problems", str(tmp_path / "tasks")], capture_output=True, check=True)
        (tmp_path / "problems.jsonl").write_bytes(rows.stdout)
        tasks = {"kind": "jsonl", "path": str(tmp_path / "problems.jsonl"), "train_problems": 1}
        own: dict[str, Any] = {
            "tasks": {**tasks, "harness": {"name": "asks", "runner_pool": "harbor", "max_seconds": 900}},
            "rollout": {"samples_per_prompt": 2},
            "replay": {"min_online": 2},
            "trainer": {"batch_size": 2, "micro_batch_size": 2, "steps": 1, "checkpoint_interval": 1},
        }
        spec = {**demo_spec(reference_model, merged(SHORT, QUICK), PLAYED, own), "value": None, "name": "harbor"}
        job = client.submit(spec)
        command = [*spo, "harbor", str(tmp_path / "tasks"), "--harness", "asks=asks:Asks", "--pool", "harbor"]
        environment = os.environ | {"SPO_API_URL": live.url, "DOCKER_HOST": engine}
        with (tmp_path / "runner.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            ended = client.wait(job.id, 800)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
    assert (ended.state, ended.failure) == ("succeeded", None), (tmp_path / "runner.log").read_text()[-3000:]
    drawn = client.batch(job.id, 1).trajectory_ids
    assert len(drawn) == 2
    ended_sessions = [each for each in client.agents.all(job.id) if each.outcome]
    played = [(client.agents.tree(each.id).calls[0], each.outcome or {}) for each in ended_sessions]
    for trajectory_id in drawn:
        whole = client.trajectory(job.id, trajectory_id)
        (action,) = whole.segments
        # What the tests in the container found, and neither the agent nor the runner: the policy's answer decides it.
        assert action.tokens == len(whole.response_token_ids)
        (call, outcome), *_ = (each for each in played if each[0].sampled == whole.response_token_ids)
        assert outcome["reward"] == float("p" in call.text)
        assert whole.reward == outcome["reward"] - 1
