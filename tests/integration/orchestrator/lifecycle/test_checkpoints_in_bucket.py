"""Weights and checkpoints in a bucket: forks are copies of keys, and whoever owns a job's objects removes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo import redis_keys
from spo.manifest_folder import entry_of
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.weights import s3_backend
from spo.weights.s3_backend import S3Backend
from spo.weights.store import CHECKPOINT_DIGITS, digest_of


@pytest.fixture
def context(open_context: Callable[..., AppContext], bucket_url: str, tmp_path: Path) -> AppContext:
    places = {"weight_store_url": f"{bucket_url}/weights", "checkpoint_store_url": f"{bucket_url}/checkpoints"}
    return open_context(weight_cache_path=str(tmp_path / "cache"), shared_state=False, **places)


@pytest.fixture
def parent(context: AppContext, document: dict[str, Any], bucket_url: str, tmp_path: Path) -> str:
    """An ended job with version 1 of step 10 and a checkpoint of step 10, both in the bucket alone."""
    job_id = context.jobs.submit(parse_job_spec(document))
    part = tmp_path / "model-00001.safetensors"
    part.write_bytes(b"weights")
    head = {"version": 1, "parent": 0, "step": 10, "dtype": "float32", "epoch": 1}
    digest = _put(S3Backend(f"{bucket_url}/weights"), job_id, 1, head, part)
    told: dict[str, Any] = {"version": 1, "step": 10, "uri": "u", "manifest_digest": digest}
    record = json.dumps(told | {"size_bytes": 1, "published_at": "t"})
    context.redis.hset(own_keys.job_weights(job_id), "1", record)
    part = tmp_path / "rank-00000.safetensors"
    part.write_bytes(b"state" * 100)
    head = {"step": 10, "weight_version": 1, "weight_step": 10, "world_size": 1, "zero_stage": 1, "epoch": 1}
    digest = _put(S3Backend(f"{bucket_url}/checkpoints", CHECKPOINT_DIGITS), job_id, 10, head, part)
    told = {"step": 10, "path": "p", "manifest_digest": digest, "weight_version": 1}
    context.redis.hset(redis_keys.job_checkpoints(job_id), "10", json.dumps(told))
    context.jobs.fail(job_id, "test", "it ended")
    return job_id


def _put(backend: S3Backend, job_id: str, number: int, head: dict[str, Any], part: Path) -> str:
    with_files = {**head, "files": [entry_of(part)]}
    backend.put_file(job_id, number, entry_of(part), part)
    backend.put_manifest(job_id, number, with_files)
    return digest_of(with_files)


def objects(url: str, job_id: str) -> list[str]:
    store = obstore.store.from_url(url, client_options={"allow_http": True})
    paths = (entry["path"] for page in obstore.list(store) for entry in page)
    return sorted(path for path in paths if job_id in path)


@pytest.mark.parametrize("largest", [5 << 30, 10])
def test_a_fork_from_a_checkpoint_is_its_own_whatever_becomes_of_the_parent(
    context: AppContext,
    api: httpx.Client,
    parent: str,
    bucket_url: str,
    tmp_path: Path,
    largest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Copied by the store, or where an object is larger than it copies, through here.
    monkeypatch.setattr(s3_backend, "MAX_COPY_BYTES", largest)
    listed = api.get(f"/v1/jobs/{parent}/checkpoints").json()["items"]
    answer = api.post(f"/v1/jobs/{parent}/fork", json={"checkpoint_step": 10})
    assert answer.status_code == 202, answer.text
    fork = answer.json()["id"]
    context.deletion.delete(parent)
    context.deletion.sweep()

    assert [each["step"] for each in listed] == [10]
    assert objects(bucket_url, parent) == []
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(fork, state, "test")
    grant = context.leases.wait_for_job("trainer", 0)
    assert grant.checkpoint_path == f"{bucket_url}/checkpoints/{fork}"
    (told,) = grant.checkpoints.items
    backend = S3Backend(f"{bucket_url}/checkpoints", CHECKPOINT_DIGITS)
    manifest = backend.manifest(fork, 10)
    assert (manifest["step"], manifest["weight_version"]) == (10, 1)
    assert told.manifest_digest == digest_of(manifest)
    (entry,) = manifest["files"]
    backend.fetch(fork, 10, entry, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"state" * 100
    assert not (tmp_path / "state" / "checkpoints").exists()


def test_a_fork_of_a_checkpoint_whose_part_is_gone_is_refused_and_leaves_nothing(
    context: AppContext, api: httpx.Client, parent: str, bucket_url: str
) -> None:
    store = obstore.store.from_url(bucket_url, client_options={"allow_http": True})
    (part,) = (path for path in objects(bucket_url, parent) if "rank-00000" in path)
    obstore.delete(store, part)
    before = objects(bucket_url, "job_")

    answer = api.post(f"/v1/jobs/{parent}/fork", json={"checkpoint_step": 10})

    assert (answer.status_code, answer.json()["code"]) == (412, "fork_start_lost")
    assert objects(bucket_url, "job_") == before


def test_a_fork_whose_model_no_other_service_would_see_is_refused_by_field(api: httpx.Client, parent: str) -> None:
    answer = api.post(f"/v1/jobs/{parent}/fork", json={"as_reference": True})

    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_fork")
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/as_reference"]


def test_a_job_that_redis_lost_comes_back_with_the_checkpoint_that_is_in_the_bucket(
    context: AppContext, parent: str
) -> None:
    context.watch.manifests.save([parent], "epoch")
    manifest = context.watch.manifests.read(parent)
    assert manifest
    context.redis.delete(redis_keys.run_state(parent), redis_keys.job_checkpoints(parent))

    context.job_rebuild.rebuild(manifest, resume=False, actor="test")

    assert context.redis.hkeys(redis_keys.job_checkpoints(parent)) == [b"10"]
