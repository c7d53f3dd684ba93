"""A job's curves in real TensorBoard, MLflow and W&B stores, read back with their own readers: each point once."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from spo.client import Client
from spo.errors import InvalidInput
from spo.local.launcher import mirror_children
from spo.metrics_export import is_file_store, mirror, mlflow_name, open_sink
from spo.testing.peers import wait_until
from tests.support.evaluations import step_evaluation
from tests.support.openapi_documents import SCHEMAS, example

BLOCK_BYTES = 32 << 10

# What these libraries do at import is not ours to repair.
pytestmark = pytest.mark.filterwarnings("ignore")


def needs(library: str) -> Any:
    absent = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(absent, reason=f"{library} is not installed: pip install '.[sinks]'")


class Api:
    """Metrics and evaluations of one job, as the REST API answers them; `step` is how far the job is.

    late: steps whose evaluation is still under way.
    """

    def __init__(self) -> None:
        self.step, self.state, self.late = 0, "running", set[int]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                payload = json.dumps(outer.answer(self.path)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def answer(self, path: str) -> Any:
        place, asked = urlsplit(path).path, parse_qs(urlsplit(path).query)
        if place.endswith("/metrics"):
            start, end = int(asked["from_step"][0]), int(asked["to_step"][0])
            steps = [step for step in range(1, self.step + 1) if start <= step <= end]
            columns = {
                "loss": [1.0 / step for step in steps],
                "reward/online": [0.5 for _ in steps],
                "reward": [None if step == 2 else -0.5 for step in steps],
            }
            return {"axis": "step", "steps": steps, "series": columns}
        if place.endswith("/evaluations"):
            steps = [step for step in range(0, self.step + 1, 10) if step not in self.late]
            return {"items": [step_evaluation(step, {"1": 0.25}).model_dump() for step in steps]}
        job = example(SCHEMAS["Job"]) | {"id": "job_1", "state": self.state, "name": "demo"}
        job["progress"] |= {"step": self.step, "steps": 30}
        return {"items": [job], "next_cursor": None} if place == "/v1/jobs" else job


@pytest.fixture
def api() -> Iterator[Api]:
    serving = Api()
    yield serving
    serving.server.shutdown()
    serving.server.server_close()


def run_twice(api: Api, target: str, end: int = 40) -> None:
    """Mirror up to step 12, when the evaluation of step 0 is late, stop, and once more to the end, as after a kill."""
    with Client(api.url, retry_seconds=2) as client:
        api.step, api.late = 12, {0}
        stop = threading.Event()
        stop.set()
        mirror(client, target, stop, "job_1")
        api.step, api.state, api.late = end, "succeeded", set()
        mirror(client, target, threading.Event(), "job_1")


@needs("tensorboard")
def test_tensorboard_reads_each_point_once_after_a_restart(api: Api, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_twice(api, f"tensorboard:{tmp_path}", 1503)
    read = EventAccumulator(str(tmp_path / "job_1"), size_guidance={"scalars": 0})
    read.Reload()

    assert [point.step for point in read.Scalars("training/loss")] == list(range(1, 1504))
    assert read.Scalars("training/loss")[3].value == pytest.approx(0.25)
    assert 2 not in [point.step for point in read.Scalars("training/reward")]
    assert sorted(point.step for point in read.Scalars("evaluation/pass@1")) == list(range(0, 1504, 10))


@needs("tensorboard")
def test_the_launchers_child_mirrors_all_jobs_and_goes_on_after_a_kill(api: Api, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "job_1").mkdir()

    def steps() -> list[int]:
        read = EventAccumulator(str(tmp_path / "job_1"), size_guidance={"scalars": 0})
        read.Reload()
        return [point.step for point in read.Scalars("training/loss")] if read.Tags()["scalars"] else []

    (child,) = mirror_children(f"tensorboard:{tmp_path}", api.url, tmp_path / "mirror.log")
    for api.step in (5, 9):
        child.start()
        wait_until(lambda: steps() == list(range(1, api.step + 1)), f"{api.step} steps", 60)
        assert child.pid
        os.kill(child.pid, signal.SIGKILL if api.step == 5 else signal.SIGTERM)
        assert child.stop_by(time.monotonic() + 30)

    assert steps() == list(range(1, 10))
    assert mirror_children("", api.url, tmp_path / "mirror.log") == []


@needs("mlflow")
def test_mlflow_reads_each_point_once_after_a_restart(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    if importlib.util.find_spec("alembic") is None:
        store = f"file:{tmp_path / 'mlruns'}"
    run_twice(api, f"mlflow:{store}")
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("spo")
    assert experiment
    runs = client.search_runs([experiment.experiment_id])

    assert [run.data.tags["spo.job"] for run in runs] == ["job_1"]
    history = client.get_metric_history(runs[0].info.run_id, "training/loss")
    assert sorted(point.step for point in history) == list(range(1, 41))
    evaluated = client.get_metric_history(runs[0].info.run_id, "evaluation/pass_at_1")
    assert sorted(point.step for point in evaluated) == [0, 10, 20, 30, 40]


def test_mlflows_names_collide_in_no_kind_of_store() -> None:
    names = [mlflow_name("training", name) for name in ("log_ratio", "log_ratio/online", "pass@1", "pass@1/low")]

    assert names == ["training/log_ratio", "training/log_ratio.online", "training/pass_at_1", "training/pass_at_1.low"]
    folders = [name.rpartition("/")[0] for name in names]
    assert set(folders).isdisjoint(names), "a file store makes a folder where a file is"
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for name in names)


@pytest.mark.parametrize(
    ("uri", "folder"),
    [("file:runs/mlflow", True), ("file:///srv/mlflow", True), ("runs/mlflow", True), ("http://h:5000", False)]
    + [(uri, False) for uri in ("sqlite:///m.db", "databricks://x", "https://h")],
)
def test_a_folder_is_known_as_one(uri: str, folder: bool) -> None:
    assert is_file_store(uri) is folder


@needs("wandb")
def test_wandb_offline_holds_each_point_once_after_a_restart(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run_twice(api, "wandb:spo-test")
    files = sorted(tmp_path.rglob("*.wandb"))

    assert [step for path in files for step in wandb_steps(path, "training")] == list(range(1, 41))
    assert sorted(step for path in files for step in wandb_steps(path, "evaluation")) == [0, 10, 20, 30, 40]


def wandb_steps(path: Path, curve: str) -> Iterator[int]:
    """Steps of a curve in an offline run's file."""
    from wandb.proto.wandb_internal_pb2 import Record

    for raw in records(path.read_bytes()[7:]):
        for entry in Record.FromString(raw).history.item:
            if (entry.key or "".join(entry.nested_key)) == f"{curve}/step":
                yield int(json.loads(entry.value_json))


def records(log: bytes) -> Iterator[bytes]:
    """Of a LevelDB log: blocks of 32 KiB (the file's first 7 bytes are W&B's own), records that may be in parts."""
    at, parts = 0, b""
    while at + 7 <= len(log):
        length, kind = struct.unpack_from("<HB", log, at + 4)
        parts += log[at + 7 : at + 7 + length]
        if kind in (1, 4):
            yield parts
            parts = b""
        at += 7 + length
        left = BLOCK_BYTES - (at + 7) % BLOCK_BYTES
        at += left if left < 7 else 0


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("elsewhere:x", "unknown_sink"),
        ("tensorboard:", "unknown_sink"),
        ("mlflow:https://ada:canary@mlflow.example", "secret_in_target"),
    ],
)
def test_a_target_that_cannot_be_or_holds_a_secret_is_refused(target: str, code: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        open_sink(target, "job_1", "demo")

    assert refused.value.code == code
    assert "canary" not in str(refused.value)
