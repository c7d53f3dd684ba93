"""Without a shared folder the models of forks are in the bucket, and machines fetch them to the path that jobs name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import obstore
import pytest
from safetensors.numpy import load_file, save_file

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.continual import ContinualJob, ContinualSpec, Round
from spo.errors import IntegrityError, NotReady, Unreachable
from spo.manifest_folder import entry_of
from spo.model.folder import inspect_model_folder
from spo.spec.job_spec import parse_job_spec
from spo.testing.peers import wait_until
from spo.weights.model_folders import MadeModels
from spo.weights.s3_backend import S3Backend
from spo.weights.store import digest_of

Open = Callable[..., AppContext]


@pytest.fixture
def opened(open_context: Open, bucket_url: str, tmp_path: Path) -> Callable[[], AppContext]:
    """Orchestrators with stores in the bucket alone."""
    places = {f"{store}_store_url": f"{bucket_url}/{store}" for store in ("state", "weight", "checkpoint")}
    return lambda: open_context(weight_cache_path=str(tmp_path / "cache"), shared_state=False, **places)


@pytest.fixture
def context(opened: Callable[[], AppContext]) -> AppContext:
    return opened()


@pytest.fixture
def parent(context: AppContext, document: dict[str, Any], bucket_url: str, tmp_path: Path) -> str:
    """An ended job whose version 1 of step 10 is in the bucket alone."""
    job_id = context.jobs.submit(parse_job_spec(document))
    part = tmp_path / "model-00001.safetensors"
    save_file({"w": np.full(4, 7, np.float32)}, part)
    manifest = {"version": 1, "parent": 0, "step": 10, "dtype": "float32", "epoch": 1, "files": [entry_of(part)]}
    backend = S3Backend(f"{bucket_url}/weight")
    backend.put_file(job_id, 1, entry_of(part), part)
    backend.put_manifest(job_id, 1, manifest)
    told = {"version": 1, "step": 10, "uri": "u", "manifest_digest": digest_of(manifest)}
    context.redis.hset(own_keys.job_weights(job_id), "1", json.dumps(told | {"size_bytes": 1, "published_at": "t"}))
    context.jobs.fail(job_id, "test", "it ended")
    return job_id


def objects(url: str, job_id: str) -> list[str]:
    store = obstore.store.from_url(url, client_options={"allow_http": True})
    paths = (entry["path"] for page in obstore.list(store) for entry in page)
    return sorted(path for path in paths if job_id in path)


def made_fork(context: AppContext, api: httpx.Client, parent: str) -> tuple[str, Path]:
    answer = api.post(f"/v1/jobs/{parent}/fork", json={"as_reference": True})
    assert answer.status_code == 202, answer.text
    return answer.json()["id"], Path(answer.json()["spec"]["model"]["path"])


def test_the_model_of_a_fork_as_reference_reaches_machines_that_have_nothing(
    context: AppContext, api: httpx.Client, parent: str, bucket_url: str, tmp_path: Path
) -> None:
    fork, folder = made_fork(context, api, parent)
    model_hash = inspect_model_folder(folder).model_hash
    shutil.rmtree(tmp_path / "state")

    # Several processes of another machine at once: ranks of a trainer, replicas.
    machine = [MadeModels(f"{bucket_url}/state", tmp_path / "state") for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda models: models.here(str(folder)), machine)) == {folder}

    assert inspect_model_folder(folder).model_hash == model_hash
    assert load_file(folder / "model.safetensors")["w"].tolist() == [7, 7, 7, 7]
    assert not list((tmp_path / "state" / "models").glob(".fetched-*"))
    assert context.jobs.spec(fork).model.path == str(folder)


def test_a_fetch_makes_room_of_deleted_jobs_models_and_touches_none_that_was_never_in_the_bucket(
    context: AppContext, api: httpx.Client, parent: str
) -> None:
    (_, deleted), (_, wanted) = made_fork(context, api, parent), made_fork(context, api, parent)
    models = context.files.models
    # One is being made by a fork, or was made before there was a bucket.
    being_made = models.root / "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"
    shutil.copytree(wanted, being_made)
    shutil.rmtree(wanted)
    assert models._bucket
    models._bucket.remove_run(deleted.name)

    models.here(wanted)

    assert [folder.is_dir() for folder in (wanted, deleted, being_made)] == [True, False, True]


def test_an_orchestrator_on_an_empty_disk_fetches_the_model_before_it_checks_the_job(
    opened: Callable[[], AppContext], context: AppContext, api: httpx.Client, parent: str, tmp_path: Path
) -> None:
    fork, folder = made_fork(context, api, parent)
    shutil.rmtree(tmp_path / "state")
    restarted = opened()
    spec, faults = restarted.jobs.spec(fork), list[Any]()

    def checked() -> bool:
        try:
            faults.append(restarted.spec_check.model.at_submit(spec, None))
        except NotReady:
            return False
        return True

    wait_until(checked, "the model is fetched")
    assert (folder / "model.safetensors").is_file()
    assert not [fault for fault in faults[0] if "no model" in fault.message]


def test_a_fork_of_such_a_fork_has_its_own_model_and_deletion_leaves_nothing(
    context: AppContext, api: httpx.Client, parent: str, bucket_url: str, tmp_path: Path
) -> None:
    fork, folder = made_fork(context, api, parent)
    assert context.jobs.fail(fork, "test", "it ended")
    part = tmp_path / "model-00001.safetensors"
    head = {"version": 1, "parent": 0, "step": 10, "dtype": "float32", "epoch": 1, "files": [entry_of(part)]}
    backend = S3Backend(f"{bucket_url}/weight")
    backend.put_file(fork, 1, entry_of(part), part)
    backend.put_manifest(fork, 1, head)
    told = {"version": 1, "step": 10, "uri": "u", "manifest_digest": digest_of(head), "size_bytes": 1}
    context.redis.hset(own_keys.job_weights(fork), "1", json.dumps(told | {"published_at": "t"}))

    child = api.post(f"/v1/jobs/{fork}/fork", json={"version": 1})
    assert child.status_code == 202, child.text
    context.deletion.delete(fork)
    context.deletion.sweep()

    assert objects(bucket_url, fork) == []
    assert not folder.exists()
    its_own = Path(child.json()["spec"]["model"]["path"])
    assert its_own.name == child.json()["id"]
    shutil.rmtree(its_own)
    assert inspect_model_folder(context.files.models.here(its_own)).safetensors_files


def test_a_round_of_a_continual_job_is_made_from_weights_in_the_bucket(
    context: AppContext, parent: str, tmp_path: Path
) -> None:
    nightly = ContinualJob("nightly", "", "test", ContinualSpec(serves="helper", experience=["traffic"]), admin=True)
    begun = Round(1, parent, 1, 1, {"name": "nightly round 1"}, {})

    made = context.round_jobs.start(nightly, begun)

    assert context.round_jobs.start(nightly, begun) == made
    folder = Path(context.jobs.spec(made).model.path)
    shutil.rmtree(folder)
    assert load_file(context.files.models.here(folder) / "model.safetensors")["w"].tolist() == [7, 7, 7, 7]


def test_a_file_that_nothing_loads_and_a_damaged_one_are_refused(
    context: AppContext, api: httpx.Client, parent: str, bucket_url: str, tmp_path: Path
) -> None:
    fork, folder = made_fork(context, api, parent)
    shutil.rmtree(folder)
    store = obstore.store.from_url(f"{bucket_url}/state", client_options={"allow_http": True})
    (weights,) = (path for path in objects(f"{bucket_url}/state", fork) if path.endswith("model.safetensors"))
    obstore.put(store, weights, b"0" * obstore.head(store, weights)["size"])
    with pytest.raises(IntegrityError):
        context.files.models.here(folder)
    assert not folder.exists()

    (at,) = (path for path in objects(f"{bucket_url}/state", fork) if path.endswith("manifest.json"))
    manifest = json.loads(bytes(obstore.get(store, at).bytes()))
    manifest["files"][0]["name"] = "../../escaped.json"
    obstore.put(store, at, json.dumps(manifest).encode())
    with pytest.raises(IntegrityError):
        context.files.models.here(folder)
    assert not (tmp_path / "escaped.json").exists()


def test_a_model_that_a_bucket_away_holds_is_waited_for(
    context: AppContext,
    api: httpx.Client,
    parent: str,
    bucket_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, folder = made_fork(context, api, parent)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Unreachable):
        MadeModels(f"{bucket_url}/state", tmp_path / "elsewhere").here(tmp_path / "elsewhere" / "models" / folder.name)
    assert MadeModels(f"{bucket_url}/state", tmp_path / "elsewhere").here("/models/pi0") == Path("/models/pi0")
