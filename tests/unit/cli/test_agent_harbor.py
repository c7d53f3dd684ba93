"""A trial of Harbor as an episode: which task it is, what Harbor is told, and what its result is worth.

Harbor here is a script that answers as its program does; the real one, with a real engine: see serving.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spo.cli.agents import HarborRunner, Played, harbor_tasks
from spo.client import Client
from spo.client.models import EpisodeLease
from spo.errors import InvalidInput, NotFound, PreconditionFailed
from spo.testing.peers import wait_until

# It says what it was told, and answers with the result that lies beside the task, or waits for an interrupt.
PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, sys, time
trial = json.loads(pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
told = {{"words": sys.argv[1:], "trial": trial, "environment": dict(os.environ)}}
task = pathlib.Path(trial["task"]["path"])
(task / "told.json").write_text(json.dumps(told))
if (task / "result.json").exists():
    folder = pathlib.Path(trial["trials_dir"], trial["trial_name"])
    folder.mkdir(parents=True)
    (folder / "result.json").write_text((task / "result.json").read_text())
    sys.exit()
try:
    (task / "waits").touch()
    time.sleep(60)
except KeyboardInterrupt:
    (task / "interrupted").touch()
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task, and a program harbor that is found."""
    made = tmp_path / "tasks" / "hello"
    made.mkdir(parents=True)
    (made / "task.toml").touch()
    (made / "instruction.md").write_text("Write\nhello.\n")
    program = tmp_path / "bin" / "harbor"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SPO_API_KEY", "canary")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    return made


def runner(folder: Path) -> HarborRunner:
    # With a backend of its own it needs no engine to remove containers from.
    return HarborRunner(cast("Client", None), "default", {"guess": "nop -e other --ak depth=3"}, folder)


def lease(statement: str = "Write hello.") -> EpisodeLease:
    deadline = int(1000 * (time.time() + 600))
    session = {
        **{"id": "ses_01ABC", "job_id": "job_1", "base_url": "http://127.0.0.1:1/s/ses_01ABC/v1", "key": "ses_key"},
        **{"token": "tok_secret", "model": "policy", "deadline_unix_ms": deadline},
    }
    fields = {"lease_id": "ses_01ABC", "fence": 0, "lease_until_unix_ms": deadline, "harness": "guess"}
    return EpisodeLease.model_validate(
        {**fields, "arguments": {}, "problem_id": "p", "statement": statement, "seed": 1, "session": session}
    )


def played(task: Path, folder: Path, stop: threading.Event | None = None) -> Played:
    folder.mkdir()
    return runner(task.parent)._played(lease(), folder, stop or threading.Event())


def result(rewards: object, error: str = "") -> dict[str, Any]:
    failure = {"exception_type": error, "exception_message": "why"} if error else None
    return {"verifier_result": None if rewards is None else {"rewards": rewards}, "exception_info": failure}


@pytest.mark.parametrize(
    ("found", "status", "reward"),
    [
        (result({"reward": 1}), "finished", 1.0),
        (result({"reward": 0.0}), "finished", 0.0),
        (result({"tests": 0.5}), "finished", 0.5),
        (result({"reward": 0.25, "style": 1}), "finished", 0.25),
        (result({"reward": 0}, "AgentTimeoutError"), "cut", 0.0),
        (result({"reward": 1}, "ContextLengthExceededError"), "cut", 1.0),
        # An outage must not become a reward of 0.
        (result({"reward": 0}, "NonZeroAgentExitCodeError"), "failed", None),
        (result({"reward": 0}, "APIConnectionError"), "failed", None),
        (result(None, "EnvironmentStartTimeoutError"), "failed", None),
        (result({"a": 1, "b": 1}), "failed", None),
        (result({"reward": 1.5}), "failed", None),
        (result({"reward": "1"}), "failed", None),
        (result(None), "failed", None),
        (result({}), "failed", None),
    ],
)
def test_a_trial_is_worth_what_its_verifier_says_and_nothing_where_it_failed(
    task: Path, tmp_path: Path, found: dict[str, Any], status: str, reward: float | None
) -> None:
    (task / "result.json").write_text(json.dumps(found))
    ended = played(task, tmp_path / "episode")
    assert (ended.status, ended.reward) == (status, reward), ended.printed


def test_harbor_is_told_the_task_the_agent_and_the_session_and_no_secret_of_the_runner(
    task: Path, tmp_path: Path
) -> None:
    (task / "result.json").write_text(json.dumps(result({"reward": 1})))
    played(task, tmp_path / "episode")
    told = json.loads((task / "told.json").read_text())
    words, trial, environment = told["words"], told["trial"], told["environment"]
    assert words[:8] == ["trial", "start", "--agent", "nop", "-e", "other", "--ak", "depth=3"]
    assert trial["task"]["path"] == str(task)
    assert trial["agent"]["model_name"] == "openai/policy"
    assert 500 < trial["agent"]["max_timeout_sec"] <= 600
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:1/s/ses_01ABC/v1"
    assert (environment["OPENAI_API_KEY"], environment["DOCKER_HOST"]) == ("ses_key", "unix:///nowhere")
    assert environment["HARBOR_TELEMETRY"] == "0"
    assert "canary" not in json.dumps(told)
    assert "tok_secret" not in json.dumps(told)


def test_an_episode_of_a_job_that_wants_the_runners_reward_is_ended_with_that_of_harbors_verifier(task: Path) -> None:
    (task / "result.json").write_text(json.dumps(result({"reward": 0.5})))
    told: list[Mapping[str, object]] = []
    calls = SimpleNamespace(end=lambda lease_id, outcome: told.append(outcome))
    playing = runner(task.parent)
    playing.client = cast("Client", SimpleNamespace(agents=calls))
    playing.play(lease().model_copy(update={"reward": "runner"}), threading.Event())
    (outcome,) = told
    assert (outcome["status"], outcome["reward"]) == ("finished", 0.5)


def test_a_trial_that_is_to_end_is_interrupted_so_that_it_removes_what_it_started(task: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    ended: list[Played] = []
    thread = threading.Thread(target=lambda: ended.append(played(task, tmp_path / "episode", stop)))
    thread.start()
    wait_until((task / "waits").exists, "the trial runs", 60)
    stop.set()
    thread.join(60)
    assert (task / "interrupted").exists()
    assert [each.status for each in ended] == ["stopped"]


def test_an_episode_without_a_task_is_not_started_and_tasks_that_are_none_or_alike_are_refused(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound, match="no task of Harbor"):
        runner(task).begin([], tmp_path, lease("Write something else."))
    assert list(harbor_tasks(task).values()) == list(harbor_tasks(task.parent).values()) == [task]
    with pytest.raises(InvalidInput, match="no task of Harbor"):
        harbor_tasks(tmp_path / "bin")
    twin = task.parent / "twin"
    twin.mkdir()
    (twin / "task.toml").touch()
    with pytest.raises(InvalidInput, match="twin has no instruction"):
        harbor_tasks(task.parent)
    (twin / "instruction.md").write_text("Write  hello.")
    with pytest.raises(InvalidInput, match="hello and twin have the same instruction"):
        harbor_tasks(task.parent)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreconditionFailed, match="no program harbor"):
        runner(task)
