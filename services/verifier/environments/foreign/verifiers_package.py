"""Environments of the package `verifiers` (0.4: tasksets and environments of its hub), unchanged.

There the environment calls the model. Here its one agent gets a harness of ours, whose model is an endpoint in this
process: a call to it waits until the platform's policy has written, so what the environment sends the model is what
the policy reads. Chat environments of one agent; what calls tools by the provider's own format is refused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
import verifiers.v1 as vf
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from services.verifier.environments.foreign import policy_harness
from services.verifier.environments.service import Said, Setup, bad_argument
from spo.errors import InternalError, InvalidInput, NotReady
from spo.observability import get_logger

log = get_logger("foreign")

START_SECONDS = 300.0
# The name under which verifiers finds a harness is a module's.
HARNESS = "spo_policy_harness"
_Result = TypeVar("_Result")


class Hosted:
    """One environment of the package, on an event loop of its own with the endpoint that stands for the policy."""

    def __init__(self, name: str, options: dict[str, Any], role: str = "") -> None:
        sys.modules.setdefault(HARNESS, policy_harness)
        self._seats: dict[str, Seat] = {}
        self._numbers = itertools.count()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop, name="verifiers", daemon=True).start()
        config = resolve_env_config({"taskset": {"id": name, **options}})
        roles = [field for field, value in config if isinstance(value, vf.AgentConfig)]
        if len(roles) != 1 and role not in roles:
            raise NotReady(f"{name} has the agents {', '.join(roles)}: name the one that is trained with --role")
        # In this process: its harness executes nothing.
        seat = {role or roles[0]: {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}}
        self.environment = load_environment(resolve_env_config({"taskset": {"id": name, **options}, **seat}))
        self._tasks: list[vf.Task] = []
        self._stream: Iterator[vf.Task] = iter(self.environment.taskset)
        self._lock = threading.Lock()
        self.port = self.run(self._serve(), START_SECONDS)

    def run(self, work: Coroutine[Any, Any, _Result], seconds: float) -> _Result:
        """The result of work on the loop. Raises what it raises, NotReady after so many seconds."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise NotReady(f"the environment did not answer within {seconds:g} s") from None

    def task(self, number: int) -> vf.Task:
        """A task by its place in the taskset. Raises InvalidInput where there are fewer."""
        with self._lock:
            self._tasks += itertools.islice(self._stream, max(0, number + 1 - len(self._tasks)))
            if not 0 <= number < len(self._tasks):
                raise bad_argument("task", f"must be below {len(self._tasks)}, the number of tasks there are")
            return self._tasks[number]

    def rows(self, count: int) -> list[dict[str, object]]:
        """The first tasks as rows of a task file: a prompt of theirs is the problem's statement."""
        found: list[dict[str, object]] = []
        for number in range(count):
            try:
                opening = self.start(Setup(arguments={"task": number}, seconds=START_SECONDS), 0)
            except InvalidInput:
                break
            text = opening.opening().text
            opening.close()
            found.append({"statement": text, "arguments": {"task": number, "shown": True}})
        return found

    def start(self, setup: Setup, seed: int) -> Seat:
        """Open an episode: of the row's task, or of a taskset that has one alone."""
        arguments = {**setup.arguments, **_row(setup)}
        number = arguments.get("task", 0)
        if type(number) is not int:
            raise bad_argument("task", "must be a whole number")
        seat = Seat(self, f"episode-{next(self._numbers)}", self.task(number), setup.seconds)
        seat.shown = bool(arguments.get("shown"))
        self._seats[seat.name] = seat
        return seat

    def leave(self, seat: Seat) -> None:
        """Forget an episode."""
        self._seats.pop(seat.name, None)

    def _loop(self) -> None:
        try:
            self.loop.run_forever()
        except BaseException:
            # Such as SystemExit, by which the package ends a command: without its loop this process serves nobody.
            log.exception("the environment's loop has ended")
            os._exit(1)

    async def _serve(self) -> int:
        """Hold the environment's resources, and serve the endpoint for as long as the process lives; its port."""
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> JSONResponse:
            body = await request.json()
            seat = self._seats.get(str(body.get("model")))
            if seat is None:
                return JSONResponse({"error": {"message": "this episode is over"}}, 404)
            return JSONResponse(_completion(seat.name, await seat.answer_to(body["messages"])))

        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._served = asyncio.create_task(server.serve(sockets=[listening]))
        self._resources = self.environment.serving()
        await self._resources.__aenter__()
        return int(listening.getsockname()[1])


class Seat:
    """One episode: the environment runs as a task of the loop, and waits here whenever it asks its model."""

    def __init__(self, hosted: Hosted, name: str, task: vf.Task, seconds: float) -> None:
        self._hosted, self.name, self._task, self._seconds = hosted, name, task, seconds
        # Whether the problem's statement is the task's prompt already.
        self.shown = False
        self._asked: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._running: asyncio.Task[vf.Episode] | None = None

    async def answer_to(self, messages: list[dict[str, Any]]) -> str:
        """What the policy writes on a request of the environment's."""
        self._asked.put_nowait(messages)
        return await self._answers.get()

    def opening(self) -> Said:
        said = self._hosted.run(self._begin(), self._seconds)
        return Said("") if self.shown and not said.done else said

    def act(self, action: str) -> Said:
        return self._hosted.run(self._go_on(action), self._seconds)

    def close(self) -> None:
        self._hosted.leave(self)
        if self._running is not None:
            self._hosted.loop.call_soon_threadsafe(self._running.cancel)

    async def _begin(self) -> Said:
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{self._hosted.port}/v1", api_key_var="SPO_NO_KEY")
        context = vf.ModelContext(model=self.name, client=client)
        self._running = asyncio.create_task(self._hosted.environment.run_episode(self._task, context))
        return await self._next()

    async def _go_on(self, action: str) -> Said:
        self._answers.put_nowait(action)
        return await self._next()

    async def _next(self) -> Said:
        """What the environment asks its model next, or what the episode earned."""
        assert self._running is not None
        asking = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait((asking, self._running), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return Said(unread(asking.result()))
        finally:
            asking.cancel()
        episode = self._running.result()
        failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            reason = failures[-1].message if failures else "it ended without a reward"
            raise InternalError(f"the episode failed: {reason}"[:500], code="environment_broken")
        return Said(done=True, reward=sum(trace.reward for trace in episode.traces if trace.rewards))


def unread(messages: list[dict[str, Any]]) -> str:
    """What the policy has not read of a conversation: what follows its own last message."""
    written = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return "\n\n".join(_text(message) for message in messages[written[-1] + 1 if written else 0 :])


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def _row(setup: Setup) -> dict[str, Any]:
    found = setup.problem.get("arguments")
    return dict(found) if isinstance(found, dict) else {}


def _completion(name: str, text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {
        "id": name,
        "object": "chat.completion",
        "created": 0,
        "model": name,
        "choices": [choice],
        "usage": usage,
    }
