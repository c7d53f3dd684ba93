"""Agents' own programs and packages, unmodified, against a session of a real orchestrator: each takes two turns of
tools and leaves one whole path, in which every prompt begins with all that was read and sampled before it; but for
those that write their own history otherwise (smolagents, aider), whose calls are roots of their own, each whole.

Each runs in a process of an environment of its own, which `make test-nightly` installs; a scripted engine plays the
part of a clever model.
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
from tests.support.foreign_clients import SECONDS, aider, environment_of_clients, run_in_clients

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.cpu_seconds(60)]

# Each: the session's url and key; prints "fine" at its end.
BEGIN = """
import asyncio, json, sys
url, key = sys.argv[1:3]
QUESTION = "How is it in Oslo and in Bergen?"
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
def weather(place: str) -> str:
    \"\"\"The weather of a place.

    Args:
        place: where.
    \"\"\"
    return f"rain in {place}"
"""
OPENAI_CHAT = """
import openai
client, said = openai.OpenAI(base_url=url, api_key=key), [{"role": "user", "content": QUESTION}]
parameters = {**PARAMETERS, "additionalProperties": False}
function = {"name": "weather", "description": "The weather.", "parameters": parameters, "strict": True}
while True:
    asked = {"model": "gpt-5", "messages": said, "tools": [{"type": "function", "function": function}]}
    with client.chat.completions.stream(**asked) as stream:
        message = stream.get_final_completion().choices[0].message
    said.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        found = weather(**json.loads(call.function.arguments))
        said.append({"role": "tool", "tool_call_id": call.id, "content": found})
assert message.content == "It rains in both.", message
print("fine")
"""
OPENAI_RESPONSES = """
import openai
client, said = openai.OpenAI(base_url=url, api_key=key), [{"role": "user", "content": QUESTION}]
tool = {"type": "function", "name": "weather", "description": "The weather.", "parameters": PARAMETERS, "strict": False}
while True:
    answer = client.responses.create(model="gpt-5", input=said, tools=[tool])
    said += answer.output
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        found = weather(**json.loads(call.arguments))
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": found})
assert answer.output_text == "It rains in both.", answer
print("fine")
"""
ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key)
said = [{"role": "user", "content": QUESTION}]
tool = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}
while True:
    with client.messages.stream(model="claude", max_tokens=500, messages=said, tools=[tool]) as stream:
        message = stream.get_final_message()
    said.append({"role": "assistant", "content": message.content})
    uses = [block for block in message.content if block.type == "tool_use"]
    if not uses:
        break
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": weather(**use.input)} for use in uses]
    said.append({"role": "user", "content": results})
assert message.content[0].text == "It rains in both.", message
print("fine")
"""
OPENAI_AGENTS = """
import agents, openai
agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=url, api_key=key)
model = agents.OpenAICHATModel("gpt-5", openai_client=client)
agent = agents.Agent(name="one", instructions="Be brief.", model=model, tools=[agents.function_tool(weather)])
assert agents.Runner.run_sync(agent, QUESTION).final_output == "It rains in both."
print("fine")
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("gpt-5", provider=OpenAIProvider(base_url=url, api_key=key))
agent = Agent(model, instructions="Be brief.", tools=[weather])
assert agent.run_sync(QUESTION).output == "It rains in both."
print("fine")
"""
LANGGRAPH = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
tools = [tool(weather)]
model = ChatOpenAI(base_url=url, api_key=key, model="gpt-5").bind_tools(tools)
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode(tools))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
ended = graph.compile().invoke({"messages": [("user", QUESTION)]})
assert ended["messages"][-1].content == "It rains in both.", ended
print("fine")
"""
SMOLAGENTS = """
import smolagents
model = smolagents.OpenAIModel("gpt-5", api_base=url, api_key=key)
agent = smolagents.AGENT(tools=[smolagents.tool(weather)], model=model, max_steps=5, verbosity_level=0)
assert agent.run(QUESTION) == "It rains in both."
print("fine")
"""
MINI_SWE_AGENT = """
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
model = LitellmModel(
    model_name="openai/gpt-5", model_kwargs={"api_base": url, "api_key": key}, cost_tracking="ignore_errors"
)
agent = DefaultAgent(model, LocalEnvironment(), system_template="Be brief.", instance_template="{{ task }}")
ended = agent.run("Write hello into a file.")
assert ended["exit_status"] == "Submitted" and open("made").read() == "hello\\n", ended
print("fine")
"""
Turn = tuple[str, tuple[str, dict[str, str]] | None]
WEATHER: tuple[Turn, ...] = (
    ("Let me look.", ("weather", {"place": "Oslo"})),
    ("And there.", ("weather", {"place": "Bergen"})),
    ("It rains in both.", None),
)
FINAL: tuple[Turn, ...] = (*WEATHER[:2], ("So.", ("final_answer", {"answer": "It rains in both."})))
CODE: tuple[Turn, ...] = (
    ('Thought: I look.\n<code>\nprint(weather("Oslo"))\n</code>', None),
    ('Thought: and there.\n<code>\nprint(weather("Bergen"))\n</code>', None),
    ('Thought: I know.\n<code>\nfinal_answer("It rains in both.")\n</code>', None),
)
SHELL: tuple[Turn, ...] = (
    ("I write it.", ("bash", {"command": "echo hello > made"})),
    ("I look.", ("bash", {"command": "cat made"})),
    ("Done.", ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
)
HARNESSES: dict[str, tuple[str, tuple[Turn, ...]]] = {
    "openai chat": (OPENAI_CHAT, WEATHER),
    "openai responses": (OPENAI_RESPONSES, WEATHER),
    "anthropic": (ANTHROPIC, WEATHER),
    "openai-agents chat": (OPENAI_AGENTS.replace("CHAT", "ChatCompletions"), WEATHER),
    "openai-agents responses": (OPENAI_AGENTS.replace("CHAT", "Responses"), WEATHER),
    "pydantic-ai": (PYDANTIC_AI, WEATHER),
    "langgraph": (LANGGRAPH, WEATHER),
    "smolagents tools": (SMOLAGENTS.replace("AGENT", "ToolCallingAgent"), FINAL),
    "smolagents code": (SMOLAGENTS.replace("AGENT", "CodeAgent"), CODE),
    "mini-swe-agent": (MINI_SWE_AGENT, SHELL),
}
# What the model said stands in their next prompts with a list of its calls behind it.
EDITS_HISTORY = ("smolagents tools", "smolagents code")
# A file as a whole, as aider's format has it; its tests fail once.
EDITS: tuple[Turn, ...] = (
    ("hello.py\n```\nprint(1)\n```\n", None),
    ("hello.py\n```\nprint(2)\n```\n", None),
)


class Scripted(Agent):
    """A session whose engine says the turns of a script, one a call."""

    def __init__(self, counter: Counter, turns: tuple[Turn, ...]) -> None:
        super().__init__(counter)
        double = counter.peers.inference
        coming = iter(enumerate(turns))

        def says(request: ServeRequest) -> str:
            number, (text, call) = next(coming)
            made = [ServedCall(id=f"call_{number}", name=call[0], arguments_json=json.dumps(call[1]))] if call else []
            double.calls = made
            return text

        double.says = says
        self.turns = turns

    def check(self, *, roots: bool = False) -> None:
        """All is one path: each call goes on from the one before it, and nothing of it was read anew.

        roots: each call begins anew instead, as of a program that edits its own history.
        """
        calls = self.tree()
        assert [call["text"] for call in calls] == [text for text, _ in self.turns]
        parents = [None] * len(calls) if roots else [None, *range(len(calls) - 1)]
        assert [call["parent"] for call in calls] == parents
        assert {call["reason"] for call in calls[1:]} <= {"edited" if roots else "", ""}
        ended = self.end(reward=1)
        assert ended.status_code == 200, ended.text


@pytest.fixture
def counter(open_counter: Callable[..., Counter]) -> Counter:
    return open_counter(replica_silence_seconds=3600)


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_takes_two_turns_of_tools_and_leaves_whole_paths(counter: Counter, tmp_path: Path, name: str) -> None:
    environment_of_clients("mini")
    program, turns = HARNESSES[name]
    agent = Scripted(counter, turns)
    own: dict[str, Any] = {"OPENAI_API_KEY": "unused", "MSWEA_SILENT_STARTUP": "1"}
    # From a file: some read the source of a tool.
    (tmp_path / "harness.py").write_text(BEGIN + program)
    run = 'import runpy; runpy.run_path("harness.py", run_name="__main__")'
    printed = run_in_clients(run, agent.grant["base_url"], agent.grant["key"], folder=tmp_path, **own)
    assert "fine" in printed, printed
    agent.check(roots=name in EDITS_HISTORY)


def test_aider_edits_a_file_until_its_tests_pass_and_each_prompt_that_shows_the_file_anew_is_a_root(
    counter: Counter, tmp_path: Path
) -> None:
    agent = Scripted(counter, EDITS)
    (tmp_path / "hello.py").write_text("print(0)\n")
    options = [
        "--model",
        "openai/gpt-x",
        "--edit-format",
        "whole",
        "--no-git",
        "--yes-always",
        "--no-show-model-warnings",
    ]
    options += ["--no-check-update", "--analytics-disable", "--map-tokens", "0", "--no-pretty", "--auto-test"]
    command = [str(aider()), *options, "--test-cmd", "grep 2 hello.py", "--message", "It is to print 2.", "hello.py"]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "OPENAI_API_BASE": agent.grant["base_url"],
        "OPENAI_API_KEY": agent.grant["key"],
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert (tmp_path / "hello.py").read_text() == "print(2)\n", ran.stdout[-3000:]
    agent.check(roots=True)
