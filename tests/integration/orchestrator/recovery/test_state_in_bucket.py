"""What the orchestrator keeps in files, in a bucket: an empty disk finds it, and a bucket that is away is told."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest
import redis

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.datasets import DatasetFiles
from services.orchestrator.jobs import SEGMENT
from spo import redis_keys
from spo.errors import NotFound, NotReady, Unreachable
from spo.service.state import StateBucket, StateFolder, StatePlace, state_at
from spo.spec.job_spec import TasksSpec, parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from tests.support.s3_server import S3Server

Open = Callable[..., AppContext]
Serve = Callable[[AppContext], str]

ROW = json.dumps({"statement": "Print 1.", "tests": [{"stdin": "", "stdout": "1\n", "public": True}]}).encode() + b"\n"
BODY = b"".join(ROW.replace(b"1", str(number).encode()) for number in range(10, 20))


@pytest.fixture
def url(bucket_url: str) -> str:
    return f"{bucket_url}/platform"


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, url: str) -> StatePlace:
    return state_at(tmp_path / "state" if request.param == "folder" else url)


def send(api: httpx.Client, dataset_id: str, offset: int, part: bytes) -> httpx.Response:
    digest = f"sha-256=:{base64.b64encode(hashlib.sha256(part).digest()).decode()}:"
    kind = "application/offset+octet-stream"
    headers = {"Content-Type": kind, "Upload-Offset": str(offset), "Content-Digest": digest}
    return api.patch(f"/v1/datasets/{dataset_id}", content=part, headers=headers)


def begin(api: httpx.Client) -> str:
    answer = api.post("/v1/datasets", json={"name": "mine", "size_bytes": len(BODY)})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def upload(context: AppContext, api: httpx.Client, half: Callable[[], None] = lambda: None) -> str:
    dataset_id = begin(api)
    assert send(api, dataset_id, 0, BODY[:100]).status_code == 200
    half()
    assert send(api, dataset_id, 100, BODY[100:]).status_code == 200
    context.datasets._advance_alone(context.datasets.get(dataset_id))
    assert context.datasets.get(dataset_id).state == "ready"
    return dataset_id


def running_job(context: AppContext, document: dict[str, Any]) -> str:
    job_id = context.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(job_id, state, "test")
    return job_id


def add_events(client: redis.Redis, job_id: str, count: int) -> None:
    key = own_keys.job_events(job_id)
    at = int(client.xrevrange(key, count=1)[0][0].split(b"-")[0])
    fields = {"at": "2026-11-22T13:13:25.123Z", "actor": "orchestrator", "kind": "progress", "from": "", "to": ""}
    with client.pipeline(transaction=False) as pipe:
        for seq in range(at + 1, at + 1 + count):
            pipe.xadd(key, {**fields, "body": json.dumps({"done": seq})}, id=f"{seq}-0")
        pipe.execute()


def test_a_folder_and_a_bucket_keep_the_same_names(place: StatePlace, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"x" * (6 << 20))
    place.write("jobs/a.json", b"1")
    place.write("jobs/a.json", b"2")
    place.put("datasets/one/part-1", tmp_path / "part")
    place.write("datasets/two/part-1", b"")

    assert (place.read("jobs/a.json"), place.read("jobs/b.json"), place.read("datasets/two/part-1")) == (
        b"2",
        None,
        b"",
    )
    assert place.names("datasets") == ["datasets/one/part-1", "datasets/two/part-1"]
    assert place.names("nothing") == []
    place.fetch("datasets/one/part-1", tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"x" * (6 << 20)
    with pytest.raises(FileNotFoundError):
        place.fetch("datasets/three/part-1", tmp_path / "absent")
    place.remove("jobs/a.json")
    place.remove("jobs/a.json")
    place.remove_folder("datasets/one")
    place.remove_folder("nothing")
    assert (place.names("jobs"), place.names("datasets")) == ([], ["datasets/two/part-1"])


def test_a_bucket_lists_more_than_a_page(url: str) -> None:
    place = StateBucket(url)
    wanted = [f"jobs/{number:04d}.json" for number in range(1010)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: place.write(name, b"{}"), wanted))

    assert place.names("jobs") == wanted
    assert place.names("job") == []


def test_an_orchestrator_on_an_empty_disk_finds_datasets_events_manifests_and_identity(
    open_context: Open,
    serve: Serve,
    url: str,
    tmp_path: Path,
    document: dict[str, Any],
    redis_client: redis.Redis,
) -> None:
    def restarted(name: str) -> AppContext:
        return open_context(state_path=tmp_path / name, state_store_url=url)

    first = restarted("first")
    with httpx.Client(base_url=serve(first), timeout=60, trust_env=False) as api:
        dataset_id = upload(first, api)
    job_id = running_job(first, document)
    add_events(redis_client, job_id, 3 * SEGMENT)
    while first.jobs.move_events_to_files(job_id):
        pass
    before = first.jobs.events(job_id, limit=10_000)
    first.watch.look()
    epoch = first.watch.identity.epoch
    assert sorted(path.parent.name for path in (tmp_path / "first").rglob("*") if path.is_file()) == [dataset_id]

    second = restarted("second")
    second.watch.look()

    assert (second.watch.identity.epoch, second.watch.identity.losses()) == (epoch, [])
    assert int(redis_client.xlen(own_keys.job_events(job_id))) < 2 * SEGMENT
    assert second.jobs.events(job_id, limit=10_000) == before
    task_set = TasksSpec(kind="dataset", id=dataset_id, train_problems=4, evaluation_problems=2)
    assert len(second.library.load(task_set).train) == 4
    assert second.datasets.file_of(second.datasets.get(dataset_id)).read_bytes() == BODY
    redis_client.delete(redis_keys.run_state(job_id), redis_keys.job_record(job_id), redis_keys.run_spec(job_id))
    assert [manifest.id for manifest in second.watch.lost()] == [job_id]
    with pytest.raises(NotFound, match="records were lost"):
        second.jobs.spec(job_id)


def test_an_upload_goes_on_at_another_orchestrator_and_leaves_nothing_once_it_is_deleted(
    open_context: Open, serve: Serve, url: str, tmp_path: Path
) -> None:
    first = open_context(state_path=tmp_path / "first", state_store_url=url)
    with httpx.Client(base_url=serve(first), timeout=60, trust_env=False) as api:
        dataset_id = begin(api)
        assert send(api, dataset_id, 0, BODY[:100]).status_code == 200
    second = open_context(state_path=tmp_path / "second", state_store_url=url)
    with httpx.Client(base_url=serve(second), timeout=60, trust_env=False) as api:
        assert send(api, dataset_id, 100, BODY[100:]).status_code == 200
        second.datasets._advance_alone(second.datasets.get(dataset_id))
        assert second.datasets.get(dataset_id).state == "ready"
        stored = StateBucket(url).names("datasets")
        assert api.delete(f"/v1/datasets/{dataset_id}").status_code == 204

    assert len(stored) == 2
    assert StateBucket(url).names("datasets") == []
    assert not list((tmp_path / "second" / "datasets").iterdir())


def test_a_dataset_whose_part_is_gone_is_said_to_be_damaged(
    open_context: Open, serve: Serve, url: str, tmp_path: Path
) -> None:
    context = open_context(state_store_url=url)
    place = StateBucket(url)
    with httpx.Client(base_url=serve(context), timeout=60, trust_env=False) as api:
        dataset_id = begin(api)
        assert send(api, dataset_id, 0, BODY[:100]).status_code == 200
        place.remove(place.names("datasets")[0])
        assert send(api, dataset_id, 100, BODY[100:]).status_code == 200
        context.datasets._advance_alone(context.datasets.get(dataset_id))
        shown = api.get(f"/v1/datasets/{dataset_id}").json()

    assert shown["state"] == "invalid"
    assert "upload it again" in shown["report"]["faults"][0]["message"]


def test_a_dataset_that_is_here_does_not_wait_while_another_is_fetched(url: str, tmp_path: Path) -> None:
    files = DatasetFiles(StateBucket(url), tmp_path)
    here = tmp_path / "tasks.jsonl"
    here.write_bytes(BODY)
    with ThreadPoolExecutor(1) as threads, files._fetching:
        assert threads.submit(files.here, here, len(BODY), "", []).result(10) == here


def test_a_dataset_that_a_full_disk_cannot_take_waits_for_room(
    open_context: Open, serve: Serve, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    context = open_context(state_store_url=url)
    with httpx.Client(base_url=serve(context), timeout=60, trust_env=False) as api:
        dataset_id = begin(api)
        assert send(api, dataset_id, 0, BODY).status_code == 200
    with monkeypatch.context() as patched:
        patched.setattr(StateBucket, "fetch", full)
        context.datasets._advance_alone(context.datasets.get(dataset_id))
    assert context.datasets.get(dataset_id).state == "validating"
    context.datasets._advance_alone(context.datasets.get(dataset_id))
    assert context.datasets.get(dataset_id).state == "ready"


def test_a_deleted_job_leaves_no_events_and_no_manifest_in_the_bucket(
    open_context: Open, url: str, document: dict[str, Any], redis_client: redis.Redis
) -> None:
    context = open_context(state_store_url=url)
    job_id = running_job(context, document)
    add_events(redis_client, job_id, 2 * SEGMENT)
    context.jobs.move_events_to_files(job_id)
    context.watch.look()
    place = StateBucket(url)
    assert len(place.names("events")) == 1
    assert place.names("jobs") == [f"jobs/{job_id}.json"]
    assert context.jobs.fail(job_id, "test", "it ended")
    context.deletion.delete(job_id)
    context.deletion.sweep()

    assert (place.names("events"), place.names("jobs")) == ([], [])


def test_a_bucket_that_hangs_is_a_503_in_bounded_time_and_loses_nothing(
    open_context: Open,
    serve: Serve,
    s3_server: S3Server,
    url: str,
    document: dict[str, Any],
    redis_client: redis.Redis,
) -> None:
    context = open_context(state_store_url=url)
    job_id = running_job(context, document)
    add_events(redis_client, job_id, 2 * SEGMENT)
    events = context.jobs.events(job_id, limit=10_000)
    with httpx.Client(base_url=serve(context), timeout=90, trust_env=False) as api:

        def cut() -> None:
            os.kill(s3_server.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                answer = send(api, open_upload(context), 100, BODY[100:])
                assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable"), answer.text
                assert answer.json()["retryable"]
                assert time.monotonic() - began < 45
                # Whoever comes next is told at once, and what needs Redis alone goes on.
                began = time.monotonic()
                with pytest.raises(Unreachable):
                    context.files.place.read("platform.json")
                assert time.monotonic() - began < 1
                with pytest.raises(NotReady, match="its older events cannot be written"):
                    context.runner._move_events(job_id)
                assert api.get(f"/v1/jobs/{job_id}").status_code == 200
                assert api.get("/v1/platform").json()["code"] == "storage_unavailable"
                assert "does not answer" in api.get("/v1/attention").text
            finally:
                os.kill(s3_server.pid, signal.SIGCONT)
            wait_until(lambda: _answers(context.files.place), "the bucket is asked again")

        dataset_id = upload(context, api, half=cut)

    assert context.datasets.file_of(context.datasets.get(dataset_id)).read_bytes() == BODY
    context.runner._move_events(job_id)
    assert context.jobs.events(job_id, limit=10_000) == events


def open_upload(context: AppContext) -> str:
    (raw,) = context.redis.smembers(own_keys.open_datasets())
    return str(raw.decode())


def _answers(place: StatePlace) -> bool:
    try:
        place.read("platform.json")
    except Unreachable:
        return False
    return True


def test_an_orchestrator_starts_without_its_bucket_and_takes_up_its_work_when_it_is_back(
    open_context: Open, serve: Serve, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{probe.getsockname()[1]}"
    for name, value in S3Server(nowhere, tmp_path).environment().items():
        monkeypatch.setenv(name, value)
    context = open_context(state_store_url="s3://absent/state")
    looking = threading.Thread(target=context.watch.run, args=(context.stop,))
    looking.start()
    try:
        with httpx.Client(base_url=serve(context), timeout=90, trust_env=False) as api:
            began = time.monotonic()
            made = api.post("/v1/jobs", json=document)
            assert made.status_code == 202, made.text
            absent = api.get("/v1/jobs/job_01ARZ3NDEKTSV4RRFFQ69G5FAV")
            listed = api.get("/v1/jobs")
            part = send(api, begin(api), 0, BODY[:10])
            assert time.monotonic() - began < 60
    finally:
        context.stop.set()
        looking.join(60)

    assert not looking.is_alive()
    assert (absent.status_code, absent.json()["code"]) == (503, "storage_unavailable")
    assert (part.status_code, part.json()["code"]) == (503, "storage_unavailable")
    assert [job["id"] for job in listed.json()["items"]] == [made.json()["id"]]


def test_objects_have_the_names_of_the_files_so_that_a_folder_is_copied_as_it_is(
    open_context: Open, url: str, tmp_path: Path, document: dict[str, Any], redis_client: redis.Redis
) -> None:
    before = open_context()
    job_id = running_job(before, document)
    add_events(redis_client, job_id, 2 * SEGMENT)
    before.jobs.move_events_to_files(job_id)
    events = before.jobs.events(job_id, limit=10_000)
    before.watch.look()
    store = obstore.store.from_url(url, client_options={"allow_http": True})
    names = [name for folder in ("jobs", "events") for name in StateFolder(tmp_path / "state").names(folder)]
    for name in [*names, "platform.json"]:
        obstore.put(store, name, tmp_path / "state" / name)

    after = open_context(state_store_url=url, state_path=tmp_path / "empty")
    after.watch.look()

    assert after.watch.identity.losses() == []
    assert after.jobs.events(job_id, limit=10_000) == events
