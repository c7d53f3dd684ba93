"""PUT /v1/scale: wishes within bounds, carried out by whoever starts processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from pydantic import ValidationError

from services.orchestrator.autoscaling import KubernetesScaler
from services.orchestrator.container import AppContext
from services.orchestrator.settings import Settings
from spo import redis_keys
from spo.errors import Unreachable
from spo.v1.orchestrator_service_pb2 import HeartbeatRequest


def served(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], **settings: Any
) -> tuple[AppContext, str]:
    context = open_context(**settings)
    return context, serve(context) + "/v1/scale"


def put(url: str, **pools: Any) -> httpx.Response:
    return httpx.put(url, json={name.replace("_", "-"): count for name, count in pools.items()}, trust_env=False)


def test_a_request_is_kept_and_shown_beside_what_is_live(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], redis_client: redis.Redis
) -> None:
    context, url = served(open_context, serve, scaler="local")
    for number, draining in enumerate((False, False, True)):
        context.replicas.beat(HeartbeatRequest(replica_id=f"i{number}", pool="inference", draining=draining))

    answer = put(url, inference=3, sandbox_judge=2)

    assert answer.status_code == 202
    assert answer.json()["pools"] == {
        "inference": {"desired": 3, "live": 2, "draining": 1, "minimum": 1, "maximum": 8},
        "sandbox-judge": {"desired": 2, "live": 0, "draining": 0, "minimum": 1, "maximum": 8},
        "verifier": {"desired": 1, "live": 0, "draining": 0, "minimum": 1, "maximum": 8},
    }
    assert redis_client.hgetall(redis_keys.scale()) == {b"inference": b"3", b"sandbox-judge": b"2"}
    assert httpx.get(url, trust_env=False).json() == answer.json()


@pytest.mark.parametrize(
    ("requested", "code", "pointer"),
    [
        ({"inference": 9}, "invalid_scale", "/inference"),
        ({"inference": 0, "sandbox_judge": 2}, "invalid_scale", "/inference"),
        ({"inference": -1}, "invalid_request", "/inference"),
        ({"inference": "many"}, "invalid_request", "/inference"),
        ({"trainer": 2}, "invalid_request", "/trainer"),
    ],
)
def test_a_request_out_of_bounds_changes_nothing(
    open_context: Callable[..., AppContext],
    serve: Callable[[AppContext], str],
    redis_client: redis.Redis,
    requested: dict[str, Any],
    code: str,
    pointer: str,
) -> None:
    _, url = served(open_context, serve, scaler="local")

    refused = put(url, **requested)

    assert refused.status_code == 422
    assert (refused.json()["code"], refused.json()["errors"][0]["pointer"]) == (code, pointer)
    assert not redis_client.exists(redis_keys.scale())


def test_where_nobody_scales_a_request_is_refused_and_says_so(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str]
) -> None:
    _, url = served(open_context, serve)

    refused = put(url, inference=2)

    assert (refused.status_code, refused.json()["code"]) == (412, "scaling_unavailable")
    assert httpx.get(url, trust_env=False).json()["pools"]["inference"]["desired"] is None


class Cluster:
    """Answers the two paths that the scaler uses, as the Kubernetes API does; remembers what was patched."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {
            "/apis/apps/v1/namespaces/lab/deployments/spo-inference/scale": {"spec": {"replicas": 1}},
            "/apis/keda.sh/v1alpha1/namespaces/lab/scaledobjects/spo-inference": {
                "spec": {"minReplicaCount": 2, "maxReplicaCount": 9}
            },
        }
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(None)

            def do_PATCH(self) -> None:
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, patch: dict[str, Any] | None) -> None:
                found = cluster.objects.get(self.path)
                allowed = self.headers["Authorization"] == "Bearer pod-token" and found is not None
                if found is not None and allowed and patch:
                    found["spec"].update(patch["spec"])
                self.send_response(200 if allowed else 403)
                self.end_headers()
                self.wfile.write(json.dumps(found if allowed else {"kind": "Status"}).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    playing = Cluster()
    yield playing
    playing.server.shutdown()
    playing.server.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("pod-token\n")
    (folder / "namespace").write_text("lab")
    return folder


@pytest.mark.parametrize("keda", [False, True])
def test_kubernetes_is_asked_to_patch_one_object(cluster: Cluster, account: Path, keda: bool) -> None:
    settings = Settings(scaler="kubernetes", kubernetes_url=cluster.url, scale_prefix="spo-", scale_keda=keda)
    scaler = KubernetesScaler(settings, account)
    before = scaler.desired("inference")

    scaler.scale("inference", 5)

    assert (before, scaler.desired("inference")) == (2 if keda else 1, 5)
    changed = [path for path, found in cluster.objects.items() if 5 in found["spec"].values()]
    assert len(changed) == 1


def test_a_missing_role_and_an_absent_cluster_are_told_apart(cluster: Cluster, account: Path) -> None:
    refused = KubernetesScaler(Settings(scaler="kubernetes", kubernetes_url=cluster.url, scale_prefix="x-"), account)
    absent = KubernetesScaler(Settings(scaler="kubernetes", kubernetes_url="http://127.0.0.1:1"), account)

    with pytest.raises(Unreachable, match="Role"):
        refused.scale("inference", 2)
    with pytest.raises(Unreachable, match="did not answer"):
        absent.scale("inference", 2)


def test_a_token_that_is_not_mounted_is_told_apart_from_a_bug(cluster: Cluster, account: Path) -> None:
    (account / "token").unlink()
    scaler = KubernetesScaler(Settings(scaler="kubernetes", kubernetes_url=cluster.url, scale_prefix="spo-"), account)

    with pytest.raises(Unreachable, match="is its token mounted"):
        scaler.scale("inference", 2)


def test_bounds_that_hold_no_number_are_refused_at_start() -> None:
    with pytest.raises(ValidationError, match="MIN_REPLICAS"):
        Settings(min_replicas=5, max_replicas=4)


def test_the_launcher_keeps_its_first_replica(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str]
) -> None:
    _, url = served(open_context, serve, scaler="local", min_replicas=0)

    assert put(url, inference=0).status_code == 422
