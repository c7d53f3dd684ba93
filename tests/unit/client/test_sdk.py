"""The SDK covers the whole REST API, with and without asyncio, and the synchronous one is made from the other."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from spo.client import AsyncClient, Client
from spo.errors import Unreachable
from tests.support.openapi_documents import FOREIGN, answer_to

ROOT = Path(__file__).parents[3]
SECTIONS = ("", "agents", "continual", "datasets", "dead_letters", "experience", "platform", "serving")
ENDED = {"seq": 1, "at": "2026-01-01T00:00:00Z", "actor": "trainer", "kind": "state", "body": {"to": "succeeded"}}
ENDS = {"next_cursor": None, "uploaded_bytes": 1 << 20}
ARGUMENTS: dict[str, Any] = {
    "outcome": {},
    "wait_seconds": 1,
    "policy": {},
    "scopes": ["jobs:read"],
    "spec": {},
    "step": 1,
    "version": 1,
    "timeout_seconds": 5,
    "export_format": "jsonl",
}


class Recorder:
    """Answers as docs/openapi.json says and remembers what was asked; what can end has ended, what can be paged has."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, str]] = set()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.add((request.method, request.url.path))
        if request.headers.get("Accept") == "text/event-stream":
            headers = {"Content-Type": "text/event-stream"}
            return httpx.Response(200, headers=headers, text=f"data: {json.dumps(ENDED)}\n\n")
        if request.url.path.endswith("/download"):
            return httpx.Response(200, content=bytes(2 * tarfile.BLOCKSIZE))
        answer = answer_to(request.method, request.url.path)
        if request.url.params.get("validate_only"):
            answer = {"seed": 0}
        if isinstance(answer, dict):
            answer |= {name: value for name, value in ENDS.items() if name in answer}
            answer |= {"uploaded_bytes": 0} if request.method == "POST" and "uploaded_bytes" in answer else {}
            answer |= {"id": "ds_1"} if answer.get("id") == "" else {}
            answer |= {"state": "succeeded"} if answer.get("state") == "" else {}
        return httpx.Response(200, json=answer)


def methods(client: Any) -> list[Callable[..., Any]]:
    """Every public method of the client and of its sections."""
    parts = [getattr(client, name) if name else client for name in SECTIONS]
    names = [(part, name) for part in parts for name in dir(type(part)) if not name.startswith("_")]
    found = [(part, name) for part, name in names if name not in ("close", *SECTIONS)]
    return [getattr(part, name) for part, name in found if callable(getattr(part, name))]


def calls(method: Callable[..., Any], folder: Path) -> list[Any]:
    """What a call returns with something for each argument without a default, and with a job where that is optional."""
    paths = {"path": folder / "rows.jsonl", "target": folder / "out.jsonl", "folder": folder / "model"}
    parameters = inspect.signature(method).parameters
    needed = [
        {**ARGUMENTS, **paths}.get(name, f"{name}_1")
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    replies = [method(*needed)]
    if "job_id" in parameters and parameters["job_id"].default is None:
        replies.append(method(*needed, job_id="job_1"))
    return replies


async def call_all(client: AsyncClient, folder: Path) -> None:
    async with client:
        for reply in (reply for method in methods(client) for reply in calls(method, folder)):
            if inspect.isasyncgen(reply):
                assert [event.seq async for event in reply] == [1]
            else:
                await reply


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return tmp_path


@pytest.mark.parametrize("kind", ["with asyncio", "without"])
def test_every_operation_of_the_api_has_a_method(folder: Path, kind: str) -> None:
    recorder = Recorder()
    transport = httpx.MockTransport(recorder)
    if kind == "with asyncio":
        asyncio.run(call_all(AsyncClient("http://api", transport=transport), folder))
    else:
        with Client("http://api", transport=transport) as client:
            for reply in (reply for method in methods(client) for reply in calls(method, folder)):
                if inspect.isgenerator(reply):
                    assert [event.seq for event in reply] == [1]
    paths: dict[str, Any] = json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"]
    missing = [
        f"{method.upper()} {path}"
        for path, operations in paths.items()
        if not FOREIGN.fullmatch(path)
        for method in operations
        if not any(
            asked == method.upper() and re.fullmatch(re.sub(r"\{[^}]+\}", "[^/]+", path), place)
            for asked, place in recorder.asked
        )
    ]

    assert missing == [], "add methods to spo/client/_async, then `make sdk`"


def test_both_clients_offer_the_same() -> None:
    ours = {name for name in dir(AsyncClient) if not name.startswith("_")}

    assert ours == {name for name in dir(Client) if not name.startswith("_")}


def test_every_method_says_what_it_does() -> None:
    with Client("http://api", transport=httpx.MockTransport(Recorder())) as client:
        silent = [method.__qualname__ for method in methods(client) if not inspect.getdoc(method)]

    assert silent == [], "reference/sdk.md is made of the docstrings"


def test_the_synchronous_client_is_made_from_the_other() -> None:
    if importlib.util.find_spec("unasync") is None:
        message = "unasync is not installed: pip install '.[dev]'"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    place = importlib.util.spec_from_file_location("generate_client", ROOT / "scripts" / "generate_client.py")
    assert place
    assert place.loader
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)

    for name, text in module.synchronous().items():
        assert (ROOT / "spo" / "client" / "_sync" / name).read_text() == text, f"{name}: run `make sdk`"


def test_what_may_have_been_done_is_not_asked_for_twice() -> None:
    asked = []

    def lost(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        raise httpx.ReadTimeout("no answer", request=request)

    with Client("http://api", transport=httpx.MockTransport(lost), retry_seconds=1) as client:
        with pytest.raises(Unreachable):
            client.platform.create_key("ada", "red", ["jobs:read"])
        assert asked == ["/v1/keys"]
        with pytest.raises(Unreachable):
            client.get("job_1")
    assert len(asked) > 2


def test_the_pause_that_the_api_asks_for_is_kept() -> None:
    answers = iter(
        [
            httpx.Response(429, headers={"Retry-After": "1"}, json={}),
            httpx.Response(200, json=answer_to("GET", "/v1/jobs/job_1")),
        ]
    )
    with Client("http://api", transport=httpx.MockTransport(lambda _: next(answers)), retry_seconds=5) as client:
        began = time.monotonic()
        client.get("job_1")

    assert time.monotonic() - began >= 1
