"""Who may do what at the REST door: keys, scopes, tenants, rates, quotas, tokens of a provider, the audit log."""

from __future__ import annotations

import base64
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import redis
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import SecretStr, ValidationError

from services.orchestrator.auth import REMEMBER_SECONDS, SCOPES, Principal, needed_scope
from services.orchestrator.container import AppContext
from services.orchestrator.http import events as live
from services.orchestrator.settings import Settings
from spo.errors import InvalidInput, catalogue
from spo.spec.section import JobState
from spo.testing.runs import distilled
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest
from tests.conftest import NO_CERTIFICATES

Document = dict[str, Any]
OPERATOR_KEY = "the-operators-own-key"


class Door:
    """A served orchestrator with a key, and clients of it by token."""

    def __init__(self, context: AppContext, url: str) -> None:
        self.context = context
        self.url = url

    def ask(self, method: str, path: str, token: str = OPERATOR_KEY, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}", **options.pop("headers", {})}
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False, verify=NO_CERTIFICATES) as client:
            return client.request(method, path, headers=headers, **options)

    def key(self, tenant: str, *scopes: str, **fields: Any) -> str:
        body = {"name": f"key of {tenant}", "tenant": tenant, "scopes": list(scopes), **fields}
        created = self.ask("POST", "/v1/keys", json=body)
        assert created.status_code == 201, created.text
        token: str = created.json()["token"]
        return token


@pytest.fixture
def door(open_context: Callable[..., AppContext], serve: Callable[[AppContext], str]) -> Door:
    context = open_context(api_key=OPERATOR_KEY)
    return Door(context, serve(context))


def refusal(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    return response.status_code, response.json()["code"]


def test_a_token_is_shown_once_and_never_stored(door: Door, redis_client: redis.Redis) -> None:
    token = door.key("red", "jobs:read")

    assert door.ask("GET", "/v1/jobs", token).status_code == 200
    assert token not in door.ask("GET", "/v1/keys").text
    secret = token.split("_", 2)[2].encode()
    stored: list[Any] = [redis_client.dump(key) for key in redis_client.keys("*")]
    assert not any(secret in each for each in stored)


@pytest.mark.parametrize("token", ["wrong", "spo_0123456789abcdef_guess", "spo_", "a.b.c"])
def test_a_wrong_token_gets_nothing(door: Door, token: str) -> None:
    assert refusal(door.ask("GET", "/v1/jobs", token)) == (401, "unauthorized")


def test_the_type_of_a_refusal_leads_to_its_entry_without_a_key(door: Door) -> None:
    refused = door.ask("GET", "/v1/jobs", "wrong").json()

    page = door.ask("GET", refused["type"], "wrong")

    assert page.status_code == 200
    assert catalogue()["unauthorized"].remedy.partition("`")[0] in page.text
    assert "rate_limited" in door.ask("GET", "/errors", "wrong").text
    assert refusal(door.ask("GET", "/errors/made_up", "wrong")) == (404, "not_found")
    assert refusal(door.ask("GET", "/errorsome", "wrong")) == (401, "unauthorized")


def test_a_revoked_key_stops_working(door: Door) -> None:
    token = door.key("red", "jobs:read")
    key_id = door.ask("GET", "/v1/keys").json()["items"][0]["key_id"]
    assert door.ask("GET", "/v1/jobs", token).status_code == 200

    revoked = door.ask("DELETE", f"/v1/keys/{key_id}").json()

    assert revoked["revoked_at"]
    assert refusal(door.ask("GET", "/v1/jobs", token)) == (401, "unauthorized")
    assert door.ask("DELETE", f"/v1/keys/{key_id}").json() == revoked


def test_an_event_stream_ends_soon_after_its_key_is_revoked(
    door: Door, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "ADMISSION_SECONDS", 0.2)
    token = door.key("red", "jobs:read", "jobs:write")
    job_id = door.ask("POST", "/v1/jobs", token, json=document).json()["id"]
    listening = {"Authorization": f"Bearer {token}", "Accept": "text/event-stream"}

    with httpx.stream("GET", f"{door.url}/v1/jobs/{job_id}/events", headers=listening, timeout=10) as stream:
        lines = stream.iter_lines()
        assert any("queued" in line for line in lines)
        time.sleep(1)
        door.ask("DELETE", f"/v1/keys/{door.ask('GET', '/v1/keys').json()['items'][0]['key_id']}")
        # Silence of ten seconds, which a stream that stays would keep, is an error.
        rest = [line for line in lines if line.startswith("id:")]
    assert rest == []


def test_a_key_revoked_behind_our_back_stops_soon(door: Door, open_context: Callable[..., AppContext]) -> None:
    token = door.key("red", "jobs:read")
    assert door.ask("GET", "/v1/jobs", token).status_code == 200
    other = open_context(api_key=OPERATOR_KEY).authenticator.keys
    other.revoke(other.all()[0].key_id)

    deadline = time.monotonic() + REMEMBER_SECONDS + 10
    while door.ask("GET", "/v1/jobs", token).status_code == 200:
        assert time.monotonic() < deadline, "the revoked key still works"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v1/jobs", "jobs:read"),
        ("GET", "/", "jobs:read"),
        ("POST", "/v1/jobs", "jobs:write"),
        ("DELETE", "/v1/jobs/x", "jobs:write"),
        ("GET", "/v1/jobs/x/trajectories", "trajectories:read"),
        ("GET", "/v1/jobs/x/trajectories/y/values", "trajectories:read"),
        ("GET", "/v1/jobs/x/prompts/y", "trajectories:read"),
        ("GET", "/v1/jobs/x/weights", "jobs:read"),
        ("POST", "/v1/jobs/x/weights/rollback", "weights:push"),
        ("POST", "/v1/experience/import", "datasets:write"),
        ("GET", "/v1/experience", "trajectories:read"),
        ("PUT", "/v1/scale", "admin"),
        ("GET", "/v1/keys", "admin"),
        ("GET", "/v1/audit", "admin"),
        ("GET", "/v1/keysmith", "jobs:read"),
    ],
)
def test_each_request_needs_its_scope(method: str, path: str, scope: Any) -> None:
    assert needed_scope(method, path) == scope
    Principal("c", scopes=frozenset({scope})).check(method, path)
    with pytest.raises(InvalidInput, match=scope):
        Principal("c", scopes=SCOPES - {scope, "admin"}).check(method, path)


def test_a_key_without_the_scope_is_refused_at_the_door(door: Door, document: Document) -> None:
    reader = door.key("red", "jobs:read")

    assert refusal(door.ask("POST", "/v1/jobs", reader, json=document)) == (403, "forbidden")
    assert refusal(door.ask("POST", "/v1/keys", reader, json={})) == (403, "forbidden")
    assert door.context.jobs.counts()[JobState.QUEUED] == 0


def test_another_tenants_jobs_are_absent(door: Door, document: Document) -> None:
    red, blue = door.key("red", "jobs:read", "jobs:write"), door.key("blue", "jobs:read", "jobs:write")
    job_id = door.ask("POST", "/v1/jobs", red, json=document).json()["id"]

    paths = ["", "/events", "/metrics", "/weights", "/checkpoints", "/evaluations"]
    assert {door.ask("GET", f"/v1/jobs/{job_id}{path}", blue).status_code for path in paths} == {404}
    assert refusal(door.ask("POST", f"/v1/jobs/{job_id}/cancel", blue)) == (404, "job_not_found")
    assert door.ask("GET", f"/jobs/{job_id}", blue).status_code == 404
    assert door.ask("GET", "/v1/jobs", blue).json()["items"] == []
    assert door.ask("GET", "/v1/jobs?status=queued", blue).json()["items"] == []
    for token in (red, OPERATOR_KEY):
        assert [each["id"] for each in door.ask("GET", "/v1/jobs?status=queued", token).json()["items"]] == [job_id]
        assert door.ask("GET", f"/v1/jobs/{job_id}", token).status_code == 200


def test_a_page_shows_no_more_than_its_readers_scopes(door: Door, document: Document) -> None:
    red, blue = door.key("red", "jobs:read", "jobs:write"), door.key("blue", "jobs:read")
    job_id = door.ask("POST", "/v1/jobs", red, json=document).json()["id"]

    for path in (f"/jobs/{job_id}", f"/jobs/{job_id}/live"):
        assert "lacks the scope trajectories:read" in door.ask("GET", path, red).text
        assert "lacks the scope" not in door.ask("GET", path).text
    assert "queued 1" not in door.ask("GET", "/", blue).text
    assert "queued 1" in door.ask("GET", "/").text


def test_a_tenant_names_only_files_in_folders_that_are_open_to_it(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], document: Document, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "way out").symlink_to(tmp_path)
    context = open_context(api_key=OPERATOR_KEY, tenant_paths=str(tmp_path / "open"))
    door = Door(context, serve(context))
    red = door.key("red", "jobs:read", "jobs:write", "trajectories:read", "datasets:write")
    outside = str(tmp_path / "open" / "way out" / "pi0")
    for path, body, pointer in (
        ("/v1/jobs", document, "/model/path"),
        ("/v1/jobs", document | {"model": {"path": outside}}, "/model/path"),
        ("/v1/jobs", document | {"model": {"path": "/absent"}}, "/model/path"),
        ("/v1/jobs", document | {"tasks": {"kind": "jsonl", "path": "/etc/passwd"}}, "/tasks/path"),
        ("/v1/jobs", distilled(document, tmp_path / "pi0"), "/algorithm/teacher/path"),
    ):
        refused = door.ask("POST", path, red, json=body)
        assert refusal(refused) == (422, "invalid_job_spec")
        assert pointer in [each["pointer"] for each in refused.json()["errors"]]
        assert "may name files in" in refused.text
    shutil.copytree(tmp_path / "pi0", tmp_path / "open" / "pi0")
    inside = document | {"model": {"path": str(tmp_path / "open" / "pi0")}}
    assert door.ask("POST", "/v1/jobs", red, json=inside).status_code == 202
    assert door.ask("POST", "/v1/jobs", json=document).status_code == 202


def test_two_tenants_may_use_the_same_idempotency_key(door: Door, document: Document) -> None:
    tokens = [door.key(tenant, "jobs:read", "jobs:write") for tenant in ("red", "blue")]

    jobs = [
        door.ask("POST", "/v1/jobs", token, json=document, headers={"Idempotency-Key": "one"}).json()["id"]
        for token in tokens * 2
    ]

    assert jobs[:2] == jobs[2:]
    assert jobs[0] != jobs[1]


def test_a_quota_holds_until_a_job_ends(door: Door, document: Document) -> None:
    token = door.key("red", "jobs:read", "jobs:write", max_active_jobs=1)
    keyed = {"json": document, "headers": {"Idempotency-Key": "one"}}
    first = door.ask("POST", "/v1/jobs", token, **keyed).json()["id"]
    assert refusal(door.ask("POST", "/v1/jobs", token, json=document)) == (429, "quota_exceeded")
    assert door.ask("POST", "/v1/jobs", token, **keyed).json()["id"] == first, "a request that is repeated"
    door.ask("POST", f"/v1/jobs/{first}/cancel", token)
    door.context.jobs.transition(first, JobState.CANCELLED, "done")
    assert door.ask("POST", "/v1/jobs", token, json=document).status_code == 202


def test_who_asks_too_often_is_told_when_to_come_back(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str]
) -> None:
    context = open_context(api_key=OPERATOR_KEY, rate_limit="5/hour")
    door = Door(context, serve(context))

    codes = [door.ask("GET", "/v1/jobs").status_code for _ in range(6)]
    stopped = door.ask("GET", "/v1/jobs")

    assert codes == [200] * 5 + [429]
    assert refusal(stopped) == (429, "rate_limited")
    assert 3000 < int(stopped.headers["retry-after"]) <= 3600
    assert door.ask("GET", "/healthz").status_code == 200
    assert [door.ask("GET", "/v1/jobs", "guess").status_code for _ in range(6)] == [401] * 5 + [429]


def test_changes_and_refusals_are_written_down_without_secrets(door: Door, document: Document) -> None:
    token = door.key("red", "jobs:read", "jobs:write")
    job_id = door.ask("POST", "/v1/jobs?canary=sesame", token, json={**document, "name": "canary-name"}).json()["id"]
    door.ask("POST", f"/v1/jobs/{job_id}/cancel", token)
    door.ask("GET", "/v1/jobs", token)
    door.ask("GET", "/v1/jobs", "canary-token")

    page = door.ask("GET", "/v1/audit").json()

    seen = [(each["tenant"], each["method"], each["path"], each["status"]) for each in page["items"]]
    assert seen == [
        ("", "GET", "/v1/jobs", 401),
        ("red", "POST", f"/v1/jobs/{job_id}/cancel", 202),
        ("red", "POST", "/v1/jobs", 202),
        ("", "POST", "/v1/keys", 201),
    ]
    assert all(word not in json.dumps(page) for word in ("canary", "sesame", token))
    first = door.ask("GET", "/v1/audit?limit=1").json()
    rest = door.ask("GET", f"/v1/audit?cursor={first['next_cursor']}").json()
    assert first["items"] + rest["items"] == page["items"]


# --- OpenID Connect ---


class Provider:
    """A real HTTP server that publishes a key, as an identity provider does."""

    def __init__(self) -> None:
        self.private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.asked = 0
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked += 1
                body = json.dumps(provider.documents()[self.path]).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def documents(self) -> dict[str, Any]:
        numbers = self.private.public_key().public_numbers()
        key = {"kty": "RSA", "kid": "one", "alg": "RS256", "use": "sig", "n": _b64(numbers.n), "e": _b64(numbers.e)}
        return {
            "/.well-known/openid-configuration": {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys"},
            "/keys": {"keys": [key]},
        }

    def token(self, private: Any = None, algorithm: str = "RS256", kid: str = "one", **changed: Any) -> str:
        claims = {
            "iss": self.issuer,
            "aud": "spo",
            "sub": "ada",
            "exp": int(time.time()) + 600,
            "tenant": "red",
            "scope": "openid jobs:read",
            **changed,
        }
        kept = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(kept, private or self.private, algorithm=algorithm, headers={"kid": kid})


def _b64(number: int) -> str:
    return base64.urlsafe_b64encode(number.to_bytes((number.bit_length() + 7) // 8)).rstrip(b"=").decode()


@pytest.fixture
def provider() -> Iterator[Provider]:
    playing = Provider()
    yield playing
    playing.server.shutdown()
    playing.server.server_close()


def test_tokens_of_the_provider_are_taken_and_forgeries_are_not(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], provider: Provider
) -> None:
    context = open_context(api_key=OPERATOR_KEY, oidc_issuer=provider.issuer, oidc_audience="spo")
    door = Door(context, serve(context))

    assert door.ask("GET", "/v1/jobs", provider.token()).status_code == 200
    assert refusal(door.ask("GET", "/v1/keys", provider.token())) == (403, "forbidden")
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    bad = [
        provider.token(private=stranger),
        provider.token(private="x" * 32, algorithm="HS256"),
        provider.token(aud="another"),
        provider.token(iss="http://elsewhere"),
        provider.token(exp=int(time.time()) - 60),
        provider.token(exp=None),
        provider.token(tenant=None),
        provider.token(tenant=["red"]),
    ]
    assert [door.ask("GET", "/v1/jobs", token).status_code for token in bad] == [401] * len(bad)
    assert door.ask("GET", "/v1/jobs").status_code == 200


def test_tokens_with_made_up_key_ids_do_not_make_us_ask_the_provider_each_time(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], provider: Provider
) -> None:
    context = open_context(api_key=OPERATOR_KEY, oidc_issuer=provider.issuer, oidc_audience="spo")
    door = Door(context, serve(context))
    assert door.ask("GET", "/v1/jobs", provider.token()).status_code == 200
    asked = provider.asked
    codes = {door.ask("GET", "/v1/jobs", provider.token(kid=f"made-up-{number}")).status_code for number in range(20)}

    assert codes == {401}
    assert provider.asked <= asked + 1
    assert door.ask("GET", "/v1/jobs", provider.token()).status_code == 200


def test_another_tenants_run_is_not_named_among_the_replicas(
    door: Door, document: Document, redis_client: redis.Redis
) -> None:
    red, blue = door.key("red", "jobs:read", "jobs:write"), door.key("blue", "jobs:read")
    job_id = door.ask("POST", "/v1/jobs", red, json=document).json()["id"]
    door.context.replicas.beat(
        HeartbeatRequest(replica_id="r", pool="inference", run_id=job_id, policy_version=7, problem=f"no {job_id}")
    )

    seen = {token: door.ask("GET", "/v1/replicas", token) for token in (red, blue, OPERATOR_KEY)}

    assert [answer.json()["items"][0]["run_id"] for answer in seen.values()] == [job_id, "", job_id]
    assert job_id not in seen[blue].text
    assert job_id not in door.ask("GET", "/", blue).text


def test_a_provider_without_audience_is_refused_at_start() -> None:
    with pytest.raises(ValidationError, match="OIDC_AUDIENCE"):
        Settings(api_key=SecretStr("k"), oidc_issuer="https://id.example")
