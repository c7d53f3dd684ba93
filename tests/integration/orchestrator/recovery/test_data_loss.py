"""Redis back empty or behind: told as what it is, and the jobs made again from their manifests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.deletion import keys_of
from services.orchestrator.recovery import PlatformIdentity
from services.orchestrator.versions import announced_version
from spo import redis_keys
from spo.errors import NotFound
from spo.manifest_folder import seal_folder, staging_folder
from spo.service.state import StateFolder
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until

Document = dict[str, Any]


@pytest.fixture
def state_path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def sealed(folder: Path, head: Document) -> str:
    with staging_folder(folder) as writing:
        save_file({"w": np.ones(4, np.float32)}, writing / "rank-00000.safetensors")
        return seal_folder(writing, folder, {"epoch": 4, **head}).manifest_digest


def trained_job(context: AppContext, document: Document, state_path: Path, tenant: str = "") -> str:
    """A running job with weight version 1 and a checkpoint, both of step 10, whose trainer had the lease epoch 4."""
    job_id = context.jobs.submit(parse_job_spec(document | {"labels": {"team": "red"}}), tenant=tenant)
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(job_id, state, "test")
    folder = state_path / "weights" / job_id / f"{1:08d}"
    digest = sealed(folder, {"version": 1, "parent": 0, "step": 10, "dtype": "float32"})
    told = {"version": 1, "step": 10, "uri": str(folder), "manifest_digest": digest}
    record = json.dumps(told | {"size_bytes": 1, "published_at": "t"})
    context.redis.hset(own_keys.job_weights(job_id), "1", record)
    folder = state_path / "checkpoints" / job_id / f"{10:010d}"
    digest = sealed(folder, {"step": 10, "weight_version": 1, "world_size": 1, "zero_stage": 1})
    told = {"step": 10, "path": str(folder), "manifest_digest": digest, "weight_version": 1, "epoch": 4}
    context.redis.hset(redis_keys.job_checkpoints(job_id), "10", json.dumps(told))
    context.redis.hset(own_keys.job_lease(job_id), "epoch", "4")
    return job_id


def empty_redis(context: AppContext) -> None:
    """Redis comes back without its data; the leader takes the lead again."""
    context.redis.flushall()
    assert context.leadership.take()


@pytest.fixture
def lost(context: AppContext, document: Document, state_path: Path) -> str:
    """A job that trained when Redis lost everything, after which the orchestrator has looked once."""
    context.watch.look()
    job_id = trained_job(context, document, state_path)
    context.watch.look()
    empty_redis(context)
    context.watch.look()
    return job_id


def test_a_platform_that_loses_nothing_says_nothing(
    context: AppContext, api: httpx.Client, document: Document, open_context: Callable[..., AppContext]
) -> None:
    context.watch.look()
    api.post("/v1/jobs", json=document).raise_for_status()
    context.watch.look()
    open_context().watch.look()

    found = api.get("/v1/platform").json()
    assert (found["notice"], found["losses"], found["lost_jobs"]) == ("", [], [])
    assert found["epoch"]
    assert api.get("/readyz").json() == {"status": "ready"}


def test_a_loss_is_told_everywhere(lost: str, api: httpx.Client) -> None:
    answer = api.get(f"/v1/jobs/{lost}")
    assert (answer.status_code, answer.json()["code"]) == (404, "job_records_lost")
    assert "It was running" in answer.json()["detail"]

    assert "Redis came back without its data" in api.get("/readyz").json()["data_loss"]
    found = api.get("/v1/platform").json()
    assert [loss["kind"] for loss in found["losses"]] == ["redis_emptied"]
    (job,) = found["lost_jobs"]
    assert (job["id"], job["state"], job["checkpoints"], job["weight_versions"]) == (lost, "running", [10], [1])
    page = api.get("/", headers={"accept": "text/html"}).text
    assert "The records of 1 jobs were lost" in page
    # A job that never was is still just that.
    assert api.get(f"/v1/jobs/job_{'0' * 26}").json()["code"] == "job_not_found"


def test_another_tenant_does_not_learn_of_a_lost_job(context: AppContext, document: Document, state_path: Path) -> None:
    context.watch.look()
    job_id = trained_job(context, document, state_path, tenant="red")
    context.watch.look()
    context.redis.flushall()

    assert context.watch.absent(job_id, "blue").code == "job_not_found"
    assert context.watch.absent(job_id, "red").code == "job_records_lost"
    assert [manifest.id for manifest in context.watch.lost("blue")] == []


def test_a_running_process_notices_within_seconds(
    context: AppContext, document: Document, state_path: Path, api: httpx.Client
) -> None:
    import threading

    thread = threading.Thread(target=context.watch.run, args=(context.stop,))
    thread.start()
    try:
        job_id = api.post("/v1/jobs", json=document).raise_for_status().json()["id"]
        assert (state_path / "jobs" / f"{job_id}.json").is_file()
        wait_until(lambda: bool(context.redis.hget(redis_keys.platform(), "epoch")), "the platform has an epoch", 10)
        context.redis.flushall()
        wait_until(lambda: "data_loss" in api.get("/readyz").json(), "the loss is told", 15)
    finally:
        context.stop.set()
        thread.join(10)


def test_a_lost_job_comes_back_as_failed_with_what_is_on_disk(
    lost: str, context: AppContext, api: httpx.Client
) -> None:
    (made,) = api.post("/v1/platform/rebuild", json={}).raise_for_status().json()["items"]
    assert (made["id"], made["state"]) == (lost, "failed")

    job = api.get(f"/v1/jobs/{lost}").json()
    assert job["failure"]["code"] == "records_lost"
    assert [kept["step"] for kept in api.get(f"/v1/jobs/{lost}/checkpoints").json()["items"]] == [10]
    assert [kept["version"] for kept in api.get(f"/v1/jobs/{lost}/weights").json()["items"]] == [1]
    assert [found["id"] for found in api.get("/v1/jobs", params={"label": "team:red"}).json()["items"]] == [lost]
    assert "rebuilt from its manifest" in api.get(f"/v1/jobs/{lost}/events").json()["items"][0]["body"]["reason"]
    assert api.get("/readyz").json() == {"status": "ready"}
    assert api.get("/v1/platform").json()["losses"][0]["acknowledged"]

    again = api.post("/v1/platform/rebuild", json={"job_ids": [lost]})
    assert (again.status_code, again.json()["code"]) == (422, "not_lost")


def test_a_lost_job_is_queued_again_where_that_is_asked_for(lost: str, context: AppContext, api: httpx.Client) -> None:
    api.post("/v1/platform/rebuild", json={"resume": True}).raise_for_status()

    assert context.jobs.refold(lost) is JobState.QUEUED
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(lost, state, "test")
    grant = context.leases.wait_for_job("trainer-2", 1)
    assert grant.run_id == lost
    # Above what any trainer of before the loss may hold, and after the weights that are there.
    assert grant.epoch > 4
    assert grant.next_weight_version == 2
    assert [kept.step for kept in grant.checkpoints.items] == [10]
    announced = announced_version(context.jobs, lost)
    assert announced is not None
    assert announced.version == 1


def test_a_checkpoint_that_was_changed_since_is_not_offered(
    lost: str, context: AppContext, api: httpx.Client, state_path: Path
) -> None:
    folder = state_path / "checkpoints" / lost / f"{10:010d}"
    shutil.rmtree(folder)
    sealed(folder, {"step": 10, "weight_version": 1, "world_size": 2, "zero_stage": 1})

    api.post("/v1/platform/rebuild", json={}).raise_for_status()

    assert api.get(f"/v1/jobs/{lost}/checkpoints").json()["items"] == []


@pytest.mark.parametrize("ended", [JobState.SUCCEEDED, JobState.CANCELLED])
def test_an_ended_job_comes_back_as_it_ended(
    ended: JobState, context: AppContext, document: Document, state_path: Path
) -> None:
    context.watch.look()
    job_id = trained_job(context, document, state_path)
    if ended is JobState.CANCELLED:
        context.jobs.transition(job_id, JobState.CANCELLING, "test")
    context.jobs.transition(job_id, ended, "test")
    context.watch.look()
    empty_redis(context)
    context.watch.look()
    (manifest,) = context.watch.lost()

    context.job_rebuild.rebuild(manifest, resume=True, actor="test")

    assert context.jobs.state(job_id) is ended


def test_a_deleted_job_is_no_lost_job(context: AppContext, document: Document, state_path: Path) -> None:
    context.watch.look()
    job_id = context.jobs.submit(parse_job_spec(document))
    context.watch.look()
    context.jobs.fail(job_id, "test", "over")
    context.deletion.delete(job_id)
    context.watch.look()

    assert context.watch.lost() == []
    with pytest.raises(NotFound) as refused:
        context.jobs.state(job_id)
    assert refused.value.code == "job_not_found"


def test_events_that_a_failover_lost_are_told(context: AppContext, document: Document, api: httpx.Client) -> None:
    context.watch.look()
    job_id = context.jobs.submit(parse_job_spec(document))
    keys = [redis_keys.run_state(job_id), own_keys.job_events(job_id), redis_keys.job_record(job_id)]
    before = {key: context.redis.dump(key) for key in keys}
    context.jobs.transition(job_id, JobState.VALIDATING, "test")
    context.watch.look()

    for key, stored in before.items():
        context.redis.restore(key, 0, stored, replace=True)
    context.watch.look()
    context.watch.look()

    assert [loss["kind"] for loss in api.get("/v1/platform").json()["losses"]] == ["redis_behind"]
    told = [event.body["events_known"] for event in context.jobs.events(job_id) if event.kind == "records_behind"]
    assert told == [2]


# --- Redis set back ---


def _keys_of_job(context: AppContext, job_id: str) -> dict[str, bytes]:
    found = (key for keys in keys_of(context.redis, job_id) for key in keys)
    return {key: stored for key in found if (stored := context.redis.dump(key)) is not None}


def set_back(context: AppContext, job_id: str, backup: dict[str, bytes]) -> None:
    for key in _keys_of_job(context, job_id):
        context.redis.delete(key)
    for key, stored in backup.items():
        context.redis.restore(key, 0, stored, replace=True)


@pytest.fixture
def behind(context: AppContext, document: Document, state_path: Path) -> tuple[str, dict[str, bytes]]:
    """A job that trained, as `trained_job`, and Redis' keys of it from when its trainer had the lease epoch 2."""
    context.watch.look()
    job_id = trained_job(context, document, state_path)
    folder = state_path / "checkpoints" / job_id / f"{5:010d}"
    digest = sealed(folder, {"step": 5, "weight_version": 0, "epoch": 3})
    told = {"step": 5, "path": str(folder), "manifest_digest": digest, "weight_version": 0, "epoch": 3}
    context.redis.hset(redis_keys.job_checkpoints(job_id), "5", json.dumps(told))
    after = _keys_of_job(context, job_id)
    context.redis.delete(own_keys.job_weights(job_id), redis_keys.job_checkpoints(job_id))
    context.redis.hset(own_keys.job_lease(job_id), "epoch", "2")
    backup = _keys_of_job(context, job_id)
    set_back(context, job_id, after)
    context.watch.look()
    return job_id, backup


def nothing_else(state_path: Path, job_id: str) -> None:
    """Only Redis was set back."""


def no_manifest(state_path: Path, job_id: str) -> None:
    (state_path / "jobs" / f"{job_id}.json").unlink()


def older_checkpoint_only(state_path: Path, job_id: str) -> None:
    (state_path / "checkpoints" / job_id / f"{10:010d}" / "manifest.json").write_bytes(b"{")


def no_file(state_path: Path, job_id: str) -> None:
    shutil.rmtree(state_path / "checkpoints" / job_id)
    shutil.rmtree(state_path / "weights" / job_id)


def stale_checkpoint(state_path: Path, job_id: str) -> None:
    """Of a trainer that had lost its lease, and that nobody was told of."""
    sealed(state_path / "checkpoints" / job_id / f"{12:010d}", {"step": 12, "weight_version": 1, "epoch": 2})


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.parametrize(
    ("also", "goes_on_from", "next_version"),
    [
        (nothing_else, [10, 5], 2),
        (no_manifest, [10, 5], 2),
        (older_checkpoint_only, [5], 2),
        (no_file, [], 1),
        (stale_checkpoint, [10, 5], 2),
    ],
)
def test_a_job_that_redis_is_behind_of_goes_on_from_the_newest_intact_checkpoint_under_a_greater_epoch(
    open_context: Callable[..., AppContext],
    context: AppContext,
    behind: tuple[str, dict[str, bytes]],
    state_path: Path,
    looked: bool,
    also: Callable[[Path, str], None],
    goes_on_from: list[int],
    next_version: int,
) -> None:
    job_id, backup = behind
    set_back(context, job_id, backup)
    also(state_path, job_id)
    # As another process finds it, which has seen nothing of before.
    context.watch.manifests._saved.clear()
    if looked:
        context.watch.look()

    grant = context.leases.wait_for_job("trainer-2", 0)

    assert grant.run_id == job_id
    assert grant.epoch > 4
    assert [each.step for each in grant.checkpoints.items] == goes_on_from
    assert grant.next_weight_version == next_version
    told = [event.body for event in context.jobs.events(job_id) if event.kind == "records_behind"]
    assert [each["goes_on_from_step"] for each in told][:1] == [*goes_on_from, 0][:1]
    assert grant.epoch > max(each["lease_epoch"] for each in told) - 1
    losses = [loss.kind for loss in context.watch.identity.losses()]
    assert set(losses) == {"redis_behind"}
    context.watch.look()
    assert len(context.watch.identity.losses()) == len(losses), "it is told once"


def test_a_trainer_whose_lease_is_in_the_backup_keeps_it(
    context: AppContext, behind: tuple[str, dict[str, bytes]]
) -> None:
    job_id, _ = behind
    context.redis.delete(redis_keys.job_checkpoints(job_id))
    context.watch.look()

    assert int(context.redis.hget(own_keys.job_lease(job_id), "epoch") or 0) == 4
    assert context.redis.hkeys(redis_keys.job_checkpoints(job_id)) == [b"10", b"5"]


@pytest.fixture
def identity(redis_client: redis.Redis, tmp_path: Path) -> PlatformIdentity:
    found = PlatformIdentity(redis_client, StateFolder(tmp_path / "state"), str(tmp_path / "weights"))
    (tmp_path / "weights").mkdir()
    assert found.check() is None
    assert found.check() is None
    return found


def kinds(identity: PlatformIdentity) -> list[str]:
    first, second = identity.check(), identity.check()
    assert second is None, "a loss is told once"
    return [loss.kind for loss in [first] if loss]


def test_a_backup_from_before_a_loss_is_behind(identity: PlatformIdentity, redis_client: redis.Redis) -> None:
    first = identity.epoch
    redis_client.delete(redis_keys.platform())
    assert kinds(identity) == ["redis_emptied"]
    redis_client.hset(redis_keys.platform(), "epoch", first)

    assert kinds(identity) == ["redis_behind"]
    assert identity.epoch != first


def test_the_redis_of_another_platform_is_told(identity: PlatformIdentity, redis_client: redis.Redis) -> None:
    redis_client.hset(redis_keys.platform(), "epoch", "another")

    assert kinds(identity) == ["other_redis"]
    assert identity.epoch == "another"


def test_an_emptied_state_folder_is_told(identity: PlatformIdentity, redis_client: redis.Redis, tmp_path: Path) -> None:
    redis_client.zadd(redis_keys.job_index(), {"job_1": 1})
    shutil.rmtree(tmp_path / "state")

    assert kinds(identity) == ["state_emptied"]


def test_the_weights_of_another_platform_are_told(identity: PlatformIdentity, tmp_path: Path) -> None:
    (tmp_path / "weights" / "platform.json").write_text('{"epoch": "another"}')

    assert kinds(identity) == ["weights_replaced"]
