"""POST fork: a new job from another's weights or checkpoint, which lives on whatever becomes of its parent."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis
from safetensors.numpy import load_file, save_file

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.forks import _name_of_fork, merge_patch
from services.orchestrator.versions import announced_version, published_versions
from spo import redis_keys
from spo.manifest_folder import seal_folder, staging_folder
from spo.model.folder import inspect_model_folder
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import wait_until
from spo.weights.store import WeightStore
from tests.support import command_line

Document = dict[str, Any]


def seal(folder: Path, head: dict[str, Any], name: str, fill: float) -> str:
    with staging_folder(folder) as writing:
        save_file({"w": np.full(4, fill, np.float32)}, writing / name)
        # As in write_model_without_weights: equal weights of several tests are tried once.
        os.utime(writing / name, (0, 0))
        return seal_folder(writing, folder, {"epoch": 1, **head}).manifest_digest


@pytest.fixture
def state_path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def parent(context: AppContext, document: Document, state_path: Path) -> str:
    """An ended job with weight versions 1 and 2 of steps 10 and 20, and a checkpoint of step 20."""
    job_id = context.jobs.submit(parse_job_spec(document | {"labels": {"team": "red"}}))
    for version in (1, 2):
        head = {"version": version, "parent": version - 1, "step": 10 * version, "dtype": "float32"}
        folder = state_path / "weights" / job_id / f"{version:08d}"
        digest = seal(folder, head, "model-00001.safetensors", version)
        told = {"version": version, "step": 10 * version, "uri": str(folder), "manifest_digest": digest}
        record = json.dumps(told | {"size_bytes": 1, "published_at": "t"})
        context.redis.hset(own_keys.job_weights(job_id), str(version), record)
    head = {"step": 20, "updates": 20, "weight_version": 2, "weight_step": 20, "world_size": 1, "zero_stage": 1}
    digest = seal(state_path / "checkpoints" / job_id / f"{20:010d}", head, "rank-00000.safetensors", 3)
    told = {"step": 20, "path": "elsewhere", "manifest_digest": digest, "weight_version": 2}
    context.redis.hset(redis_keys.job_checkpoints(job_id), "20", json.dumps(told))
    context.jobs.fail(job_id, "test", "it ended")
    return job_id


@pytest.fixture
def forked(api: httpx.Client, parent: str) -> Callable[..., Document]:
    def fork(**requested: Any) -> Document:
        answer = api.post(f"/v1/jobs/{parent}/fork", json=requested)
        assert answer.status_code == 202, answer.text
        assert answer.headers["Location"] == f"/v1/jobs/{answer.json()['id']}"
        document: Document = answer.json()
        return document

    return fork


def lease(context: AppContext, job_id: str) -> Any:
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        assert context.jobs.transition(job_id, state, "test")
    return context.leases.wait_for_job("trainer", 0)


def test_a_fork_starts_from_the_newest_weights_and_keeps_pi0(
    context: AppContext, api: httpx.Client, parent: str, forked: Callable[..., Document], state_path: Path
) -> None:
    job = forked(overrides={"name": "again", "trainer": {"steps": 5}})

    before = api.get(f"/v1/jobs/{parent}").json()["spec"]
    assert job["state"] == "queued"
    assert job["spec"] == before | {"name": "again", "trainer": before["trainer"] | {"steps": 5}}
    assert job["lineage"]["parent"] == parent
    assert (job["lineage"]["version"], job["lineage"]["as_reference"]) == (2, False)
    announced = announced_version(context.jobs, job["id"])
    assert announced is not None
    assert (announced.version, announced.step, announced.run_id) == (1, 0, job["id"])
    stored = WeightStore(state_path / "weights").open(job["id"], 1)
    assert stored.manifest_digest == announced.manifest_digest
    assert load_file(stored.files[0])["w"][0] == 2
    grant = lease(context, job["id"])
    assert (grant.start_version, grant.next_weight_version) == (1, 2)
    due = context.evaluations.schedule.due(job["id"])
    assert due is not None
    assert (due.step, due.version) == (0, 1)
    assert [event.kind for event in context.jobs.events(parent)][-1] == "forked"


def test_a_fork_from_a_checkpoint_goes_on_at_its_step(
    context: AppContext, forked: Callable[..., Document], state_path: Path
) -> None:
    job = forked(checkpoint_step=20)

    manifest = json.loads((state_path / "checkpoints" / job["id"] / f"{20:010d}" / "manifest.json").read_text())
    assert (manifest["step"], manifest["updates"], manifest["weight_version"]) == (20, 20, 1)
    grant = lease(context, job["id"])
    assert (grant.start_version, grant.next_weight_version) == (0, 2)
    assert [each["step"] for each in published_versions(context.jobs, job["id"])] == [20]


def test_with_as_reference_the_weights_become_the_model(forked: Callable[..., Document], document: Document) -> None:
    job = forked(version=1, as_reference=True)

    folder = inspect_model_folder(job["spec"]["model"]["path"])
    assert folder.model_hash != inspect_model_folder(document["model"]["path"]).model_hash
    assert [file.name for file in folder.safetensors_files] == ["model.safetensors"]
    assert load_file(folder.safetensors_files[0])["w"][0] == 1
    assert job["progress"]["weight_version"] == 0


def test_forks_outlive_their_parents_and_grandparents(
    context: AppContext, api: httpx.Client, parent: str, forked: Callable[..., Document], state_path: Path
) -> None:
    child = forked(version=2, as_reference=True)
    head = {"version": 1, "parent": 0, "step": 10, "dtype": "float32"}
    digest = seal(state_path / "weights" / child["id"] / f"{1:08d}", head, "model-00001.safetensors", 9)
    told = {"version": 1, "step": 10, "uri": "u", "manifest_digest": digest, "size_bytes": 1, "published_at": "t"}
    context.redis.hset(own_keys.job_weights(child["id"]), "1", json.dumps(told))
    grandchild = api.post(f"/v1/jobs/{child['id']}/fork", json={}).json()
    context.jobs.fail(child["id"], "test", "it ended")

    for gone in (parent, child["id"]):
        assert api.delete(f"/v1/jobs/{gone}").status_code == 204
    context.deletion.sweep()

    assert load_file(WeightStore(state_path / "weights").open(grandchild["id"], 1).files[0])["w"][0] == 9
    assert inspect_model_folder(grandchild["spec"]["model"]["path"]).safetensors_files
    assert api.get(f"/v1/jobs/{grandchild['id']}").json()["lineage"]["parent"] == child["id"]
    assert not (state_path / "models" / child["id"]).exists()


@pytest.mark.parametrize(
    ("requested", "pointer"),
    [
        ({"version": 9}, "/version"),
        ({"checkpoint_step": 7}, "/checkpoint_step"),
        ({"checkpoint_step": 20, "version": 2}, "/checkpoint_step"),
        ({"overrides": {"model": {"path": "/elsewhere"}}}, "/overrides/model/path"),
        ({"overrides": {"model": None}}, "/overrides/model/path"),
        ({"overrides": {"trainer": {"steps": -1}}}, "/overrides/trainer/steps"),
        ({"overrides": {"surprise": 1}}, "/overrides/surprise"),
        ({"surprise": 1}, "/surprise"),
    ],
)
def test_what_cannot_be_forked_is_refused_by_field_and_leaves_nothing(
    context: AppContext, api: httpx.Client, parent: str, state_path: Path, requested: Document, pointer: str
) -> None:
    answer = api.post(f"/v1/jobs/{parent}/fork", json=requested)

    assert answer.status_code == 422
    assert [fault["pointer"] for fault in answer.json()["errors"]] == [pointer]
    assert context.redis.zcard(redis_keys.job_index()) == 1
    assert [each.name for each in state_path.glob("*/*")] == [parent] * 2
    assert context.redis.scard(own_keys.forks_under_way()) == 0


def test_a_pruned_checkpoint_is_refused_with_its_own_code_and_those_there_are_named(
    api: httpx.Client, parent: str, state_path: Path
) -> None:
    answer = api.post(f"/v1/jobs/{parent}/fork", json={"checkpoint_step": 15})
    shutil.rmtree(state_path / "checkpoints" / parent)
    gone = api.post(f"/v1/jobs/{parent}/fork", json={"checkpoint_step": 20})

    assert (answer.status_code, answer.json()["code"]) == (422, "checkpoint_not_kept")
    assert "no checkpoint of step 15; those that it keeps: 20" in answer.json()["errors"][0]["message"]
    assert (gone.status_code, gone.json()["code"]) == (422, "checkpoint_not_kept")


@pytest.mark.parametrize("requested", [{"checkpoint_step": 20}, {"version": 2}])
def test_what_another_trainer_put_in_place_of_the_reported_is_not_handed_on(
    api: httpx.Client, parent: str, state_path: Path, requested: Document
) -> None:
    kind, number = ("weights", f"{2:08d}") if "version" in requested else ("checkpoints", f"{20:010d}")
    folder = state_path / kind / parent / number
    head = json.loads((folder / "manifest.json").read_text())
    shutil.rmtree(folder)
    name = head.pop("files")[0]["name"]
    seal(folder, head, name, 77)

    answer = api.post(f"/v1/jobs/{parent}/fork", json=requested)

    assert (answer.status_code, answer.json()["code"]) == (412, "fork_start_lost")


def test_damaged_weights_are_not_handed_on(api: httpx.Client, parent: str, state_path: Path) -> None:
    file = state_path / "weights" / parent / f"{2:08d}" / "model-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    answer = api.post(f"/v1/jobs/{parent}/fork", json={})

    assert (answer.status_code, answer.json()["code"]) == (412, "fork_start_lost")
    assert "digest" in answer.json()["detail"]


def test_parallel_identical_forks_make_one_job(
    context: AppContext, api: httpx.Client, parent: str, state_path: Path
) -> None:
    def fork(_: int) -> str:
        answer = api.post(f"/v1/jobs/{parent}/fork", json={"version": 1}, headers={"Idempotency-Key": "once"})
        return str(answer.json()["id"])

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(fork, range(8)))

    assert len(made) == 1
    assert context.redis.zcard(redis_keys.job_index()) == 2
    assert {each.name for each in (state_path / "weights").iterdir()} == {parent, *made}


def test_a_fork_whose_commit_was_not_answered_keeps_what_it_needs(
    context: AppContext, api: httpx.Client, parent: str, state_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = context.jobs.submit

    def submit_and_hear_nothing(*given: Any) -> str:
        submit(*given)
        raise redis.ConnectionError("the answer was lost")

    monkeypatch.setattr(context.jobs, "submit", submit_and_hear_nothing)

    assert api.post(f"/v1/jobs/{parent}/fork", json={}).status_code == 503
    (made,) = {each["id"] for each in api.get("/v1/jobs").json()["items"]} - {parent}
    assert WeightStore(state_path / "weights").open(made, 1).files


def test_a_fork_cut_short_is_cleaned_up_by_the_next_process(context: AppContext, state_path: Path) -> None:
    half = state_path / "weights" / "job_half"
    half.mkdir(parents=True)
    context.redis.sadd(own_keys.forks_under_way(), "job_half")
    upkeep = threading.Thread(target=context.deletion.run, args=(context.stop,))
    upkeep.start()

    wait_until(lambda: not half.exists(), "the half-made fork to be removed")

    context.stop.set()
    upkeep.join(30)
    assert not upkeep.is_alive()


def test_the_command_line_forks(api: httpx.Client, parent: str, tmp_path: Path) -> None:
    overrides = tmp_path / "changes.yaml"
    overrides.write_text("trainer: {steps: 7}\n")
    words = ["job", "fork", parent, "--version", "1", "--overrides", str(overrides), "-o", "json"]

    ran = command_line.spo(*words, environment={"SPO_API_URL": str(api.base_url)})

    assert ran.returncode == 0, ran.stderr
    job = json.loads(ran.stdout)
    assert (job["lineage"]["parent"], job["lineage"]["version"], job["spec"]["trainer"]["steps"]) == (parent, 1, 7)


def test_a_patch_merges_objects_replaces_values_and_removes_by_null() -> None:
    document = {"a": {"b": 1, "c": 2}, "d": [1, 2]}

    assert merge_patch(document, {"a": {"b": None, "e": {"f": None}}, "d": [3]}) == {"a": {"c": 2, "e": {}}, "d": [3]}
    verifier = {"kind": "program", "isolation": ""}
    assert merge_patch(verifier, {"kind": "model", "rubric": "r"}) == {"kind": "model", "rubric": "r"}
    assert merge_patch(verifier, {"kind": "program"}) == verifier
    assert document == {"a": {"b": 1, "c": 2}, "d": [1, 2]}


def test_a_fork_has_a_name_of_its_own(parent: str, api: httpx.Client, forked: Callable[..., Document]) -> None:
    name = api.get(f"/v1/jobs/{parent}").json()["name"]
    first, second = forked(), forked(overrides={"labels": {"again": "yes"}})

    assert [job["name"] for job in (first, second)] == [
        f"{name} fork {job['id'][-4:].lower()}" for job in (first, second)
    ]
    assert _name_of_fork(first["name"], "job_ABCD") == f"{name} fork abcd"
    assert len(_name_of_fork("x" * 200, "job_ABCD")) == 200


def test_a_fork_of_a_job_that_is_being_deleted_is_whole_or_refused(
    api: httpx.Client, context: AppContext, parent: str, state_path: Path
) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            context.deletion.sweep()

    def fork(step: int) -> httpx.Response:
        asked = {"checkpoint": 20} if step % 2 else {"version": 2}
        return api.post(f"/v1/jobs/{parent}/fork", json=asked)

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    with ThreadPoolExecutor(7) as threads:
        forks = [threads.submit(fork, step) for step in range(6)]
        gone = threads.submit(api.delete, f"/v1/jobs/{parent}").result()
        answers = [each.result() for each in forks]
    stop.set()
    sweeping.join()
    context.deletion.sweep()

    assert gone.status_code in (204, 409, 503), gone.text
    for answer in answers:
        assert answer.status_code in (202, 404, 409, 412, 422, 503), answer.text
        if answer.status_code == 202:
            granted = lease(context, answer.json()["id"])
            assert granted.start_version or granted.checkpoints.items
            found = WeightStore(str(state_path / "weights")).versions(answer.json()["id"])
            assert found or not granted.start_version
            context.jobs.fail(answer.json()["id"], "test", "its turn is over")
    if gone.status_code == 204:
        assert context.redis.keys(f"*:{parent}:*") == []
    assert context.redis.scard(own_keys.forks_under_way()) == 0
