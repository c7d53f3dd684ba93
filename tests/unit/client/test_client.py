"""The SDK against a scripted HTTP server on loopback: what it sends, repeats, and raises."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spo import errors
from spo.client import Client
from spo.spec.job_spec import parse_job_spec
from tests.support.openapi_documents import answer_to

Answer = tuple[int, dict[str, Any] | list[str]]
Script = Callable[["Request"], Answer]
JOB = answer_to("GET", "/v1/jobs/job_1") | {"id": "job_1", "state": "running", "new_field": 1}


class Request:
    """What the server saw."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body


class ScriptedServer:
    """Answers every request by a function; a list of strings is a stream of server-sent events that then breaks off."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.script: Script = lambda request: (200, JOB)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def respond(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body)
                outer.requests.append(request)
                status, answer = outer.script(request)
                stream = isinstance(answer, list)
                payload = "".join(answer).encode() if isinstance(answer, list) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = respond
            do_POST = respond

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.url, api_key="key", retry_seconds=3) as connected:
        yield connected


def event(seq: int, kind: str = "progress", **body: object) -> str:
    document = {"seq": seq, "at": "2026-01-01T00:00:00Z", "actor": "orchestrator", "kind": kind, "body": body}
    return f"id: {seq}\ndata: {json.dumps(document)}\n\n"


def test_a_submit_carries_the_key_and_survives_a_restart_of_the_api(server: ScriptedServer, client: Client) -> None:
    answers = iter([(503, {"code": "draining", "detail": "the orchestrator is draining"}), (202, JOB)])
    server.script = lambda request: next(answers)
    job = client.submit(parse_job_spec({"model": {"path": "/models/pi0"}}))
    first, second = server.requests
    assert (job.id, job.state, job.progress.step) == ("job_1", "running", JOB["progress"]["step"])
    # The same Idempotency-Key twice: a submit whose answer was lost does not become two jobs.
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.headers["authorization"] == "Bearer key"
    assert json.loads(second.body)["model"]["path"] == "/models/pi0"


@pytest.mark.parametrize("asked", ["submit", "validate", "fork"])
def test_what_takes_long_to_check_is_waited_for_while_the_api_is_there(server: ScriptedServer, asked: str) -> None:
    begun = time.monotonic()
    checked = threading.Event()

    def slow(request: Request) -> Answer:
        # Busy for longer than an API that is away is waited for, then slower than other calls may be.
        if time.monotonic() - begun < 0.6:
            return 503, {"code": "checks_busy", "detail": "too many specs are being checked; try again"}
        checked.wait(0.6)
        return 202, JOB

    server.script = slow
    with Client(server.url, timeout_seconds=0.3, retry_seconds=0.3) as client:
        arguments: tuple[object, ...] = ("job_1",) if asked == "fork" else ({},)
        assert getattr(client, asked)(*arguments)
    assert len({request.headers.get("idempotency-key") for request in server.requests}) == 1


def test_an_api_that_is_away_is_not_waited_for_as_long_as_its_checks(server: ScriptedServer) -> None:
    server.close()
    began = time.monotonic()
    with Client(server.url, retry_seconds=0.3) as client, pytest.raises(errors.Unreachable):
        client.submit({})
    assert time.monotonic() - began < 10


def test_two_submits_are_two_jobs_unless_the_caller_names_a_key(server: ScriptedServer, client: Client) -> None:
    server.script = lambda request: (202, JOB)
    client.submit({})
    client.submit({})
    client.submit({}, idempotency_key="mine")
    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidInput),
        (401, errors.InvalidInput),
        (404, errors.NotFound),
        (409, errors.Conflict),
        (412, errors.PreconditionFailed),
        (422, errors.InvalidInput),
        (500, errors.InternalError),
    ],
)
def test_a_problem_becomes_the_error_it_stands_for(
    server: ScriptedServer, client: Client, status: int, kind: type[errors.SpoError]
) -> None:
    fault = {"pointer": "/algorithm/beta", "message": "must be above 0"}
    server.script = lambda request: (status, {"code": "some_code", "detail": "what went wrong", "errors": [fault]})
    with pytest.raises(kind, match="what went wrong") as raised:
        client.get("job_1")
    assert raised.value.code == "some_code"
    assert raised.value.violations == (errors.FieldViolation("/algorithm/beta", "must be above 0"),)
    assert len(server.requests) == 1


def test_an_answer_that_is_no_json_is_still_a_typed_error(server: ScriptedServer, client: Client) -> None:
    server.script = lambda request: (500, ["<html>proxy</html>"])
    with pytest.raises(errors.InternalError, match="HTTP 500"):
        client.get("job_1")


def test_an_api_that_is_not_there_is_named_within_the_time_limit() -> None:
    with Client("http://127.0.0.1:1", retry_seconds=0.5) as client:
        with pytest.raises(errors.Unreachable, match="spo up") as raised:
            client.get("job_1")
        with pytest.raises(errors.Unreachable):
            list(client.events("job_1"))
    assert "http://127.0.0.1:1" in raised.value.message


def test_the_event_stream_reconnects_without_gaps_or_repeats(server: ScriptedServer, client: Client) -> None:
    streams = iter(
        [
            [event(1), event(2)],
            [event(2), event(3), ": heartbeat\n\n"],
            [event(4, "state", to="succeeded")],
        ]
    )
    server.script = lambda request: (200, next(streams))
    assert [each.seq for each in client.events("job_1")] == [1, 2, 3, 4]
    assert [request.headers["last-event-id"] for request in server.requests] == ["0", "2", "3"]
    assert {request.headers["accept"] for request in server.requests} == {"text/event-stream"}


def test_the_event_stream_of_an_unknown_job_is_refused(server: ScriptedServer, client: Client) -> None:
    server.script = lambda request: (404, {"code": "job_not_found", "detail": "there is no job job_9"})
    with pytest.raises(errors.NotFound, match="job_9"):
        list(client.events("job_9"))


def test_lists_are_read_across_pages_up_to_the_limit(server: ScriptedServer, client: Client) -> None:
    def page(request: Request) -> Answer:
        second = "cursor=next" in request.path
        jobs = [JOB | {"id": f"job_{number}"} for number in ((3, 4) if second else (1, 2))]
        return 200, {"items": jobs, "next_cursor": None if second else "next"}

    server.script = page
    assert [job.id for job in client.jobs()] == ["job_1", "job_2", "job_3", "job_4"]
    assert [job.id for job in client.jobs(limit=3)] == ["job_1", "job_2", "job_3"]


def test_waiting_ends_with_the_job_or_with_a_named_timeout(server: ScriptedServer, client: Client) -> None:
    states = iter(["running", "failed"])
    server.script = lambda request: (200, JOB | {"state": next(states)})
    assert client.wait("job_1", timeout_seconds=30).state == "failed"
    server.script = lambda request: (200, JOB)
    with pytest.raises(errors.NotReady, match="still running") as raised:
        client.wait("job_1", timeout_seconds=0)
    assert raised.value.code == "wait_timeout"
