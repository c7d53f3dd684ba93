"""What `make images-test` and `make cluster-test` make of what they see; the engine and the cluster are a person's."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, ClassVar

import pytest

from spo.testing.peers import wait_until
from tests.support.image_packages import roles

SCRIPTS = Path(__file__).parents[3] / "scripts"


def loaded(name: str) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded("images_test")


@pytest.fixture(scope="module")
def cluster() -> ModuleType:
    return loaded("cluster_test")


@pytest.fixture(scope="module")
def changes() -> ModuleType:
    return loaded("cluster_steps")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/run/secrets/spo_redis_url", "a secret"),
        ("/tmp/deploy/secrets/spo_rpc_token", "a secret"),
        ("/root/.netrc", "a secret"),
        ("/root/.cache/pip/http/a", "a cache"),
        ("/var/lib/apt/lists/deb.debian.org_dists_bookworm_main_binary-amd64_Packages", "a cache"),
        ("/usr/bin/gcc", "a compiler"),
        ("/usr/bin/g++-12", "a compiler"),
        ("/venv/lib/python3.11/site-packages/pip/__init__.py", "a package manager of Python"),
        ("/app/tests/conftest.py", "the tests of ours"),
        ("/venv/bin/python", ""),
        ("/usr/bin/gcov-dump.txt", ""),
        ("/venv/lib/python3.11/site-packages/spo/rpc/client.py", ""),
        ("/venv/lib/python3.11/site-packages/spo/service/settings.py", ""),
    ],
)
def test_what_should_not_lie_in_an_image_is_named(script: ModuleType, path: str, fault: str) -> None:
    found = script.unwanted([path], compiler=False)
    assert found == ([f"{fault}: {path}"] if fault else [])
    assert script.unwanted([path], compiler=True) == ([] if fault == "a compiler" else found)


def test_packages_are_held_against_the_hashed_pins(script: ModuleType) -> None:
    pins = script.pins(
        "Foo_Bar==1.2 ; python_version < '3.12' \\\n    --hash=sha256:00\ntorch==2.13.0+cpu \\\n    --hash=sha256:11\n"
    )
    assert pins == {"foo-bar": "1.2", "torch": "2.13.0+cpu"}
    assert script.unpinned({"foo-bar": "1.2", "torch": "2.13.0+cpu", "spo-platform": "0.1.0"}, pins) == []
    assert script.unpinned({"foo-bar": "1.3", "new": "1"}, pins) == ["foo-bar 1.3 (pinned: 1.2)", "new 1 (pinned: not)"]


def test_the_tier_is_that_of_the_doctors_finding(script: ModuleType) -> None:
    rows = [{"what": "isolation docker"}, {"what": "the judge runs programs under seccomp+landlock"}]
    assert script.tier_of(rows) == "seccomp+landlock"
    assert script.tier_of([{"what": "isolation that the judge accepts"}]) == ""


def test_the_roles_it_asks_for_are_those_of_the_dockerfiles(script: ModuleType) -> None:
    assert {image: set(names) for image, (_, names) in script.IMAGES.items() if image in ("judge", "light")} == {
        image: roles(image) for image in ("judge", "light")
    }
    assert all(set(names) <= roles(image) for image, (_, names) in script.IMAGES.items())


@pytest.mark.parametrize("answers", [False, True])
def test_without_an_engine_it_says_loudly_that_nothing_was_tested(tmp_path: Path, answers: bool) -> None:
    if answers:
        (tmp_path / "none").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "none").chmod(0o755)
    environment = os.environ | {"ENGINE": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "images_test.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "The images were NOT tested." in done.stderr
    assert ("no engine answers" if answers else "there is no") in done.stderr


@pytest.mark.parametrize("given", ["", "/nowhere"])
def test_without_a_cluster_it_says_loudly_that_nothing_was_run(tmp_path: Path, given: str) -> None:
    for tool in ("kubectl", "helm"):
        (tmp_path / tool).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    environment = os.environ | {"KUBECONFIG": given, "PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "cluster_test.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "The chart was NOT run." in done.stderr
    assert ("no cluster answers" if given else "names no cluster") in done.stderr


def pod(phase: str, ready: str = "False", **status: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}, *status.pop("conditions", [])]
    return {"metadata": {"name": "spo-x"}, "status": {"phase": phase, "conditions": conditions, **status}}


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        ([pod("Running", "True")], []),
        ([pod("Succeeded")], []),
        (
            [pod("Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": "Insufficient cpu"}])],
            ["spo-x: Insufficient cpu"],
        ),
        (
            [pod("Pending", containerStatuses=[{"name": "a", "state": {"waiting": {"reason": "ImagePullBackOff"}}}])],
            ["spo-x: a: ImagePullBackOff"],
        ),
        (
            [
                pod(
                    "Running",
                    containerStatuses=[
                        {
                            "name": "a",
                            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                            "lastState": {"terminated": {"reason": "OOMKilled"}},
                        }
                    ],
                )
            ],
            ["spo-x: a: CrashLoopBackOff back-off; a: OOMKilled"],
        ),
        ([pod("Pending", initContainerStatuses=[{"name": "i", "state": {"running": {}}}])], ["spo-x: Pending"]),
        ([{"metadata": {"name": "spo-x"}, "status": {}}], ["spo-x: unknown"]),
    ],
)
def test_a_pod_that_waits_is_named_with_its_cause(
    cluster: ModuleType, pods: list[dict[str, Any]], words: list[str]
) -> None:
    assert cluster.waiting(pods) == words


def a_pod(uid: str, ready: str = "True", **metadata: str) -> dict[str, Any]:
    return {
        "metadata": {"name": uid, "uid": uid, **metadata},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]},
    }


def test_a_pod_that_drains_is_not_waited_for(cluster: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    draining = a_pod("a", "False", deletionTimestamp="2026-11-29T14:18:00Z")
    told = [[draining, a_pod("b", "False")], [draining, a_pod("b")]]
    story = cluster.Story("none", [])
    monkeypatch.setattr(story, "pods", lambda role="": told.pop(0) if len(told) > 1 else told[0])
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.01)
    assert story.uids("inference") == {"b"}
    # It comes back once b is ready, whether a is still there or not; not while a pod that was to go is.
    story.replaced("inference", set())
    monkeypatch.setattr(cluster, "START_SECONDS", 0.05)
    with pytest.raises(SystemExit, match="inference: 1 pods ready"):
        story.replaced("inference", {"a"})


def test_the_steps_are_a_table(cluster: ModuleType) -> None:
    assert cluster.table([("install", 61.6, ""), ("end", 5, "ok")]).splitlines()[2:] == [
        "| install | 62 |  |",
        "| end | 5 | ok |",
    ]


NEW_POD = {
    "metadata": {"creationTimestamp": "2026-11-29T14:00:00Z"},
    "status": {
        "conditions": [
            {"type": "PodScheduled", "lastTransitionTime": "2026-11-29T14:00:01Z"},
            {"type": "Ready", "lastTransitionTime": "2026-11-29T14:01:02Z"},
        ],
        "containerStatuses": [{"state": {"running": {"startedAt": "2026-11-29T14:00:04Z"}}}],
    },
}


def test_phases_are_those_of_the_slowest_pod(changes: ModuleType) -> None:
    faster = json.loads(json.dumps(NEW_POD).replace("14:01:02", "14:00:30"))
    expected = "scheduled after 1 s, started after 4 s, ready after 62 s"
    assert changes.phases([NEW_POD, faster]) == expected == changes.phases([faster, NEW_POD])


def test_phases_take_in_what_a_pods_log_says(changes: ModuleType) -> None:
    lines = [
        "INFO not ours",
        '{"event": "building the engine", "timestamp": "2026-11-29T14:00:20.5Z"}',
        '{"event": "weights loaded", "timestamp": "2026-11-29T14:00:50Z"}',
        '{"event": "weights loaded", "timestamp": "2026-11-29T14:00:55Z"}',
        "[1]",
    ]
    told = changes.phases([{**NEW_POD, "events": changes.first_events("\n".join(lines))}])
    assert told == "scheduled after 1 s, started after 4 s, imported after 20 s, loaded after 50 s, ready after 62 s"


@pytest.mark.parametrize(("quantity", "size"), [("10Gi", 10 << 30), ("512Mi", 512 << 20), ("1.5Ki", 1536), ("7", 7)])
def test_sizes_of_claims_are_read(changes: ModuleType, quantity: str, size: int) -> None:
    assert changes.in_bytes(quantity) == size


def test_a_stranger_that_gets_an_answer_ends_the_run(changes: ModuleType) -> None:
    refused = {"verifier": "UNAUTHENTICATED", "redis": "AuthenticationError"}
    assert changes.strangers_answers(refused).startswith("2 of 2 are reached, and refuse it")
    unreached = {"verifier": "DEADLINE_EXCEEDED", "redis": "TimeoutError"}
    assert changes.strangers_answers(unreached) == "none is reached; redis: TimeoutError; verifier: DEADLINE_EXCEEDED"
    assert changes.strangers_answers({**refused, "verifier": "UNAVAILABLE"}).endswith("; verifier: UNAVAILABLE")
    with pytest.raises(SystemExit, match="is answered"):
        changes.strangers_answers({**refused, "verifier": "answered: b''"})


class Answers(BaseHTTPRequestHandler):
    """Completions: refused at first, then answered, or refused for ever; by what the model is called."""

    seen: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
        self.seen[model] += 1
        well = model == "steady" or (model == "rolling" and self.seen[model] > 2)
        body = b'{"choices": [{}]}' if well else b"{}"
        self.send_response(200 if well else 503)
        self.send_header("Retry-After", "0.01")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: standard error is the test's."""


class Crowded(ThreadingHTTPServer):
    """Takes as many at once as a busy machine lets come together."""

    request_queue_size = 256


@pytest.mark.parametrize("model", ["steady", "rolling", "away"])
def test_the_traffic_counts_every_request(changes: ModuleType, model: str) -> None:
    server = Crowded(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    program = changes.TRAFFIC.replace(":8080", f":{server.server_port}")
    asking = subprocess.Popen(
        [sys.executable, "-c", program, "key", model, "50"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: Answers.seen[model] >= 12, "twelve requests")
    found = json.loads(asking.communicate(timeout=60)[0])
    server.shutdown()
    server.server_close()
    counts = found["counts"]
    assert sum(counts.values()) == found["asked"] >= 4
    if model == "steady":
        assert counts == {"answered": found["asked"]}
    elif model == "away":
        assert counts == {"lost: 503": found["asked"]}
    else:
        assert set(counts) <= {"answered", "answered after a retry"}
        assert counts["answered after a retry"] <= 2
        assert Answers.seen[model] == found["asked"] + 2


def test_every_role_is_taken_away_once(changes: ModuleType) -> None:
    composed = loaded("compose_job")
    assert {*composed.KILLED, "inference"} == set(changes.ROLES)
    services = {path.parent.name.replace("_", "-") for path in (SCRIPTS.parent / "services").glob("*/__main__.py")}
    # Two services that a platform has only where somebody asks for them: neither rehearsal starts them.
    assert set(changes.ROLES) == services - {"tinker", "agent-runner"} | {"redis"}
    faults = set(changes.steps(None, None)) - set(changes.HARMLESS)
    assert len(faults) >= 20
    assert {f"{how}-{role}" for how in ("kill", "evict") for role in changes.ROLES} < faults


def test_a_step_that_is_none_is_refused(changes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONLY", "drain rollback")
    assert changes.selected() == {"drain", "rollback"} < set(changes.steps(None, None))
