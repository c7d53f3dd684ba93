"""Agents' command lines, unmodified, against a session of a real orchestrator: each runs two commands in its folder and
leaves one whole path beside what it asks for its own purposes, such as titles.

`make test-nightly` installs them where npm is. The scripted engine calls whichever tool for commands it is shown.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spo.v1.inference_service_pb2 import ServedCall, ServeRequest
from tests.integration.orchestrator.serving.conftest import Counter
from tests.integration.orchestrator.serving.test_agent_sessions import Agent
from tests.support.foreign_clients import SECONDS, node_program

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.cpu_seconds(90)]

TASK = "Write hello into a file named made, and look at it."
COMMANDS = ("echo hello > made", "cat made")
# The tools that run commands, and what each calls its command.
SHELLS = {"Bash": "command", "bash": "command", "exec_command": "cmd", "shell_command": "command"}
CODEX = """
model = "gpt-5"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


def codex(url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    (folder / ".codex").mkdir()
    (folder / ".codex" / "config.toml").write_text(CODEX.replace("{url}", url))
    options = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    return [str(node_program("codex")), *options], {}


def claude(url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY", "IS_SANDBOX")
    own = {**dict.fromkeys(quiet, "1"), "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
    return [str(node_program("claude")), "-p", TASK, "--dangerously-skip-permissions"], own


def opencode(url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    options = {"baseURL": url, "apiKey": "{env:OPENAI_API_KEY}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "here", "options": options, "models": {"policy": {}}}
    settings = {
        "provider": {"here": provider},
        "permission": {"bash": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    (folder / "opencode.json").write_text(json.dumps(settings))
    return [str(node_program("opencode")), "run", "--model", "here/policy", TASK], {}


@pytest.fixture
def counter(open_counter: Callable[..., Counter]) -> Counter:
    return open_counter(replica_silence_seconds=3600)


@pytest.mark.parametrize("started", [codex, claude, opencode], ids=lambda each: each.__name__)
def test_a_command_line_runs_two_commands_and_leaves_one_whole_path(
    counter: Counter, tmp_path: Path, started: Callable[[str, Path], tuple[list[str], dict[str, str]]]
) -> None:
    agent = Agent(counter, max_tokens=2_000_000)
    double, coming = counter.peers.inference, iter(COMMANDS)

    def says(request: ServeRequest) -> str:
        names = [tool["function"]["name"] for tool in json.loads(request.tools_json or "[]")]
        shell = next((name for name in names if name in SHELLS), None)
        command = next(coming, None) if shell else None
        double.calls = []
        if command is None:
            return "It is done." if shell else "a title"
        arguments = {SHELLS[shell or ""]: command, "description": "as asked"}
        double.calls = [ServedCall(id=f"call_{len(command)}", name=shell or "", arguments_json=json.dumps(arguments))]
        return "I do it."

    double.says = says
    command, own = started(agent.grant["base_url"], tmp_path)
    keys: dict[str, Any] = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), agent.grant["key"])
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **keys, **own}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    said = ran.stdout[-3000:] + ran.stderr[-3000:]
    assert ran.returncode == 0, said
    assert (tmp_path / "made").read_text() == "hello\n", said
    calls = agent.tree()
    path = [call for call in calls if call["text"] != "a title"]
    assert [call["text"] for call in path] == ["I do it.", "I do it.", "It is done."], said
    assert [call["parent"] for call in path] == [None, path[0]["number"], path[1]["number"]], [
        (call["reason"], call["messages"]) for call in path
    ]
    assert agent.end(reward=1).status_code == 200
