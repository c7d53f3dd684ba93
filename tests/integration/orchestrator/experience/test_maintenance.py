"""Compacting stored experience over a live orchestrator: nothing that is read changes, and nothing gets in its way."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo.experience.columns import StoredTrajectory
from spo.experience.store import Origin
from spo.testing.runs import trajectory
from spo.v1.prompt_pb2 import Prompt


@pytest.fixture
def job(api: httpx.Client, document: dict[str, Any]) -> str:
    return str(api.post("/v1/jobs", json=document).json()["id"])


def store_files(context: AppContext, run: str, kind: str, files: int) -> None:
    for number in range(files):
        made = trajectory(number, run_id=run)
        row = StoredTrajectory(made, Prompt(prompt_id=made.prompt_id, text="words", task_set="toy"))
        context.experience.write(Origin(run, kind, "toy"), f"part-{number}", [row])


def stored(api: httpx.Client) -> set[tuple[str, str]]:
    return {(each["run"], each["trajectory_id"]) for each in api.get("/v1/experience/rows").json()["items"]}


def test_compacting_changes_no_row_and_leaves_runs_that_grow_alone(
    api: httpx.Client, context: AppContext, job: str
) -> None:
    store_files(context, "theirs", "import", 4)
    store_files(context, job, "run", 2)
    before = stored(api)
    looked = api.post("/v1/experience/compact", json={"dry_run": True}).json()
    assert (looked["files_before"], looked["files_after"], looked["compacted"]) == (4, 1, False)

    done = api.post("/v1/experience/compact", json={}).json()

    assert (done["runs"], done["trajectories"], done["files_after"], done["left_over"]) == (["theirs"], 4, 1, 0)
    assert (len(before), stored(api)) == (6, before)
    assert api.post("/v1/experience/compact", json={}).json()["runs"] == []
    assert api.post("/v1/experience/prune", json={"run": "theirs"}).json()["trajectories"] == 4
    assert {run for run, _ in stored(api)} == {job}


def test_pruning_takes_what_a_compaction_cut_short_left_along(api: httpx.Client, context: AppContext) -> None:
    store_files(context, "theirs", "import", 3)
    before = stored(api)
    api.post("/v1/experience/compact", json={})
    store_files(context, "theirs", "import", 2)
    assert stored(api) == before

    assert api.post("/v1/experience/prune", json={"run": "theirs"}).json()["trajectories"] == 3

    assert context.experience.files() == context.experience.superseded() == []


def test_pruning_and_compacting_keep_out_of_each_others_way(api: httpx.Client, context: AppContext) -> None:
    store_files(context, "theirs", "import", 1)
    context.redis.set(own_keys.experience_maintenance(), "somebody")

    for action, requested in (("prune", {"run": "theirs"}), ("compact", {})):
        refused = api.post(f"/v1/experience/{action}", json=requested)
        assert (refused.status_code, refused.json()["code"]) == (409, "experience_busy")
    context.redis.delete(own_keys.experience_maintenance())
    assert api.post("/v1/experience/prune", json={"run": "theirs"}).json()["removed"] is True
    assert context.redis.get(own_keys.experience_maintenance()) is None
