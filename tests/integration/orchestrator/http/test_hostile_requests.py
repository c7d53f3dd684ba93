"""What nobody well-meaning sends, to every endpoint of the OpenAPI document: refused as a problem, and without harm."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from services.orchestrator.auth import SCOPES
from services.orchestrator.container import AppContext
from services.orchestrator.http import middleware
from services.orchestrator.http.app import create_app
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest

Document = dict[str, Any]
KEY = "the-operators-own-key"
HOSTILE_IDS = [
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e",
    "..%5c..%5cwindows",
    "%00",
    "job_01ARZ3NDEKTSV4RRFFQ69G5FAV%00.json",
    "%0d%0aX-Injected:%20yes",
    "%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    "%ff%fe",
    "x" * 5000,
]
IMPORT = "/v1/experience/import"
GHOST = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"
HEADERS_BYTES = 4 << 20


@pytest.fixture
def context(open_context: Callable[..., AppContext]) -> AppContext:
    return open_context(api_key=KEY, rate_limit="1000000/minute", max_import_bytes=1 << 20)


@pytest.fixture
def url(context: AppContext, serve: Callable[[AppContext], str]) -> str:
    return serve(context)


@pytest.fixture
def operator(url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, timeout=30, trust_env=False, headers=headers) as client:
        yield client


def operations(context: AppContext) -> list[tuple[str, str, Document]]:
    """Method, path template and description of everything that is served."""
    described = create_app(context).openapi()["paths"]
    return [(method, path, each) for path, found in described.items() for method, each in found.items()]


THEIRS = ("/s/", "/v1/chat/", "/v1/completions", "/v1/messages", "/v1/models", "/v1/responses")


def is_problem(response: httpx.Response) -> bool:
    """Whether the request was refused in words; clients of OpenAI's and Anthropic's APIs are refused in their form."""
    kind = response.headers.get("content-type", "")
    in_words = kind == "application/problem+json"
    if response.request.url.path.startswith(THEIRS) and not in_words:
        in_words = response.json().get("error", {}).keys() >= {"message", "type"}
    return 400 <= response.status_code < 500 and in_words


def test_no_id_leads_out_of_its_place(context: AppContext, operator: httpx.Client) -> None:
    taken = []
    for method, path, _ in operations(context):
        for hostile in HOSTILE_IDS if "{" in path else ():
            answer = operator.request(method, re.sub(r"\{\w+\}", hostile, path))
            # Dots that a client resolves by itself may lead to another path of ours, which reads only.
            if not is_problem(answer) and not (method == "get" and hostile == "%2e%2e"):
                taken.append((method, path, hostile[:40], answer.status_code))

    assert taken == []


def test_deep_json_is_refused_wherever_json_is_taken(context: AppContext, operator: httpx.Client) -> None:
    bodies = [b"[" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000]
    headers = {"Content-Type": "application/json"}
    asked = 0
    for method, path, operation in operations(context):
        if "application/json" not in operation.get("requestBody", {}).get("content", {}):
            continue
        for body in bodies:
            asked += 1
            answer = operator.request(method, re.sub(r"\{\w+\}", GHOST, path), content=body, headers=headers)
            assert is_problem(answer), (method, path, answer.status_code, answer.text[:300])

    assert asked >= 10


def test_compressed_bodies_are_refused_unopened(context: AppContext, operator: httpx.Client) -> None:
    bomb = gzip.compress(b" " * (100 << 20))
    assert len(bomb) < context.settings.max_body_bytes
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, gzip"):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        answer = operator.post("/v1/jobs", content=bomb, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
        assert answer.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("length", ["Content-Length: 1073741824", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/keys", "/v1/experience/import?name=x"])
def test_a_gigabyte_is_not_taken_in(url: str, path: str, length: str) -> None:
    """The connection is closed on whoever goes on sending."""
    chunk = b"x" * 65536
    piece = b"%x\r\n%b\r\n" % (len(chunk), chunk) if "chunked" in length else chunk
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n{length}\r\n\r\n"
        connection.sendall(head.encode())
        sent = 0
        try:
            while sent < 1 << 30:
                connection.sendall(piece)
                sent += len(piece)
        except OSError:
            pass

    assert sent < 100 << 20


def test_a_body_that_is_too_large_is_answered_before_the_connection_closes(url: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", httpx.URL(url).port or 0, timeout=30)
    connection.putrequest("POST", "/v1/jobs")
    for name, value in {"Authorization": f"Bearer {KEY}", "Content-Length": str(1 << 30)}.items():
        connection.putheader(name, value)
    connection.endheaders()

    answer = connection.getresponse()

    assert (answer.status, json.loads(answer.read())["code"]) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"
    connection.close()


def test_few_files_of_imports_are_in_memory_at_once(operator: httpx.Client, url: str) -> None:
    head = f"POST {IMPORT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\nbegun"

    def code() -> str:
        return str(operator.post(IMPORT, content=b"").json()["code"])

    with ExitStack() as opened:
        for _ in range(middleware.IMPORTS_AT_ONCE):
            address = (httpx.URL(url).host, httpx.URL(url).port or 0)
            opened.enter_context(socket.create_connection(address, timeout=20)).sendall(head.encode())
        wait_until(lambda: code() == "calls_busy", "one too many is told to come back", 10)
    wait_until(lambda: code() != "calls_busy", "there is room once they have gone", 10)


@pytest.mark.parametrize("shape", ["one", "many", "line"])
def test_headers_without_end_are_not_collected(url: str, operator: httpx.Client, shape: str) -> None:
    head = {"one": b"X-Long: ", "many": b"", "line": b""}[shape]
    line = b"GET /" if shape == "line" else b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    piece = b"X-Many: " + b"x" * 1000 + b"\r\n" if shape == "many" else b"x" * 65536
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=30) as connection:
        connection.sendall(line + head)
        sent = 0
        try:
            while sent < 64 << 20:
                connection.sendall(piece)
                sent += len(piece)
        except OSError:
            pass

    # What the kernel buffers on both sides counts as sent.
    assert sent < HEADERS_BYTES + (8 << 20)
    assert operator.get("/healthz").status_code == 200


def test_no_other_site_is_let_in_by_its_browser(operator: httpx.Client) -> None:
    """CORS is off: no answer names an origin, and preflights are refused."""
    foreign = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}

    read = operator.get("/v1/jobs", headers=foreign)
    preflight = operator.options("/v1/jobs", headers=foreign)

    assert preflight.status_code in (403, 405)
    for answer in (read, preflight):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("Origin", b"http://[", "cross_site"),
        ("Origin", b"http://[x]y", "cross_site"),
        ("Authorization", b"Basic \xc3\xa9", "unauthorized"),
        ("Authorization", b"Basic /w==", "unauthorized"),
    ],
)
def test_a_header_that_cannot_be_read_is_refused(operator: httpx.Client, name: str, value: bytes, code: str) -> None:
    answer = operator.post("/v1/jobs", json={}, headers={name: value})

    assert answer.json()["code"] == code, answer.text


def test_without_a_key_a_host_that_cannot_be_read_is_refused(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str]
) -> None:
    with httpx.Client(base_url=serve(open_context()), timeout=30, trust_env=False) as client:
        assert client.get("/v1/jobs", headers={"Host": "["}).json()["code"] == "cross_site"


def test_digits_of_other_scripts_are_in_no_cursor(context: AppContext, operator: httpx.Client, red_job: str) -> None:
    """Redis does not know them, and would be said to be away."""
    asked = 0
    for method, path, operation in operations(context):
        for given in operation.get("parameters", ()):
            if method == "get" and given["in"] == "query" and given["name"] == "cursor":
                asked += 1
                place = path.replace("{job_id}", red_job)
                answers = [operator.get(place, params={"cursor": said}) for said in ("\u0663", "\u0663-\u0663")]
                assert all(answer.status_code in (200, 422) for answer in answers), (path, answers[0].text)
    assert asked >= 5


# --- another tenant ---


@pytest.fixture
def red_job(context: AppContext, document: Document) -> str:
    job_id = context.jobs.submit(parse_job_spec(document), tenant="red")
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    context.replicas.beat(HeartbeatRequest(replica_id="r", pool="inference", run_id=job_id, address="127.0.0.1:1"))
    return job_id


@pytest.fixture
def blue(context: AppContext, url: str) -> Iterator[httpx.Client]:
    """A key of another tenant that may do everything there except administer."""
    _, token = context.authenticator.keys.create("b", "blue", tuple(sorted(SCOPES - {"admin"})))
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, timeout=30, trust_env=False, headers=headers) as client:
        yield client


def test_another_tenants_job_is_absent_at_every_endpoint(context: AppContext, blue: httpx.Client, red_job: str) -> None:
    events = len(context.jobs.events(red_job))
    asked = 0
    for method, path, _ in operations(context):
        if "{job_id}" not in path:
            continue
        asked += 1
        answers = []
        for job_id in (red_job, GHOST):
            fields = {"trajectory_id": "traj_00", "prompt_id": "ab", "step": "1", "version": "1"}
            place = path.format(**{"job_id": job_id, **dict.fromkeys(re.findall(r"\{(\w+)\}", path), "1"), **fields})
            place = place.replace("/jobs/1", f"/jobs/{job_id}").replace("/policies/1", f"/policies/{job_id}")
            answer = blue.request(method, place, json={} if method in ("post", "put", "patch") else None)
            answers.append((answer.status_code, answer.text.replace(job_id, "ID")))
        assert answers[0] == answers[1], (method, path)
        assert answers[0][0] == 404, (method, path, answers[0])

    assert asked > 20
    assert len(context.jobs.events(red_job)) == events


def test_ids_in_bodies_and_queries_are_absent_as_well(blue: httpx.Client, red_job: str) -> None:
    answers = [
        blue.post("/v1/evaluations", json={"job_id": red_job}),
        blue.post("/v1/experience/rejudge", json={"job": red_job}),
        blue.post(f"/v1/experience/import?name=x&job={red_job}", headers={"Content-Type": "application/x-ndjson"}),
        blue.post("/v1/experience/export", json={"run": red_job}),
    ]

    assert [answer.status_code for answer in answers] == [404] * 4


def test_no_list_names_what_belongs_to_another_tenant(context: AppContext, blue: httpx.Client, red_job: str) -> None:
    asked = 0
    listed = [(path, each) for method, path, each in operations(context) if method == "get" and "{" not in path]
    for path, operation in [*listed, ("/", {})]:
        parameters = operation.get("parameters", [])
        if named := {each["name"]: red_job for each in parameters if each["required"]}:
            assert blue.get(path, params=named).status_code == 404, path
            continue
        answer = blue.get(path)
        assert answer.status_code in (200, 403), (path, answer.text[:300])
        assert red_job not in answer.text, path
        assert "red" not in re.findall(r"[a-z]+", answer.text) or path == "/openapi.json", path
        asked += 1

    assert asked > 8
