"""The experience store in a bucket of a real S3 server: stored, listed, imported, exported, pruned, and begun from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import httpx
import pytest
import redis

from services.orchestrator import stored_experience
from services.orchestrator.container import AppContext
from services.replay_buffer.archive import ExperienceArchiver
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import InvalidInput, Unreachable
from spo.experience.store import ExperienceStore, Origin, Selection, merge
from spo.spec.job_spec import StoredExperience, TasksSpec
from spo.tasks.load import load_tasks
from spo.testing.runs import PROMPTS, RUN, start_run, trajectory
from spo.v1.prompt_pb2 import Prompt

TASKS = TasksSpec(kind="toy", train_problems=6, evaluation_problems=3)
JSONL = {"Content-Type": "application/x-ndjson"}


@pytest.fixture
def buffer(redis_client: redis.Redis) -> ReplayStore:
    start_run(redis_client)
    redis_client.set(redis_keys.run_state(RUN), "running")
    for prompt_id in PROMPTS:
        prompt = Prompt(prompt_id=prompt_id, text=f"words of {prompt_id}", task_set="toy", tests_digest="t")
        redis_client.hset(redis_keys.run_prompts(RUN), prompt_id, prompt.SerializeToString())
    return ReplayStore(redis_client)


def test_a_run_is_stored_in_a_bucket_and_the_next_one_begins_from_it(buffer: ReplayStore, bucket_url: str) -> None:
    buffer.append(RUN, [trajectory(number, right=number % 2 == 0) for number in range(40)])
    store = ExperienceStore(f"{bucket_url}/some/folder")

    assert ExperienceArchiver(buffer, store, 16, 60).archive(RUN) == 40

    files = store.files()
    assert [file.rows for file in files] == [16, 16, 8]
    folder = f"{bucket_url.removeprefix('s3://')}/some/folder/task_set=toy/reference=pi0/run=job_TEST/"
    assert all(file.path.startswith(folder) for file in files)
    (listed,) = stored_experience.runs(buffer.client, store, stored_experience.Scope(None))
    assert (listed.run, listed.trajectories, listed.files, listed.complete) == (RUN, 40, 3, False)
    selection = Selection(ExperienceStore(f"{bucket_url}/some/folder"), (StoredExperience(run=RUN, per_prompt=6),))
    taken = selection.of(Prompt(prompt_id=PROMPTS[1], text=f"words of {PROMPTS[1]}"))
    assert len(taken) == 6
    merge(store, files)
    assert [file.rows for file in store.files()] == [40]
    assert store.superseded() == []
    assert {each.trajectory.prompt_id for each in taken} == {PROMPTS[1]}


def test_rows_are_imported_listed_exported_and_pruned_in_a_bucket(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], bucket_url: str
) -> None:
    context = open_context(experience_url=f"{bucket_url}/folder")
    problems = load_tasks(TASKS).train
    rows = [{"statement": each.statement, "response_text": f"right {each.problem_id}"} for each in problems]
    body = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    with httpx.Client(base_url=serve(context), timeout=60, trust_env=False) as api:
        asked = {"name": "theirs", "tasks": TASKS.model_dump_json()}
        imported = api.post("/v1/experience/import", params=asked, content=body, headers=JSONL)
        assert (imported.status_code, imported.json().get("stored")) == (201, 6), imported.text
        (listed,) = api.get("/v1/experience").json()["items"]
        assert (listed["run"], listed["trajectories"], listed["files"]) == ("theirs", 6, 1)
        exported = api.post("/v1/experience/export", json={"run": "theirs", "format": "jsonl"})
        assert len(exported.content.splitlines()) == 6
        again = api.post(
            "/v1/experience/import", params={**asked, "name": "again"}, content=exported.content, headers=JSONL
        )
        assert again.json()["stored"] == 6, again.text
        page = api.get("/v1/experience/rows", params={"run": "again", "limit": 4}).json()
        assert (len(page["items"]), bool(page["next_cursor"])) == (4, True)
        assert api.post("/v1/experience/prune", json={"run": "theirs"}).json()["files"] == 1
        assert [each["run"] for each in api.get("/v1/experience").json()["items"]] == ["again"]


@pytest.mark.usefixtures("s3_server")
def test_a_bucket_that_is_not_there_is_unreachable_for_writers() -> None:
    with pytest.raises(Unreachable, match="experience store at s3://nosuch/folder cannot be used"):
        ExperienceStore("s3://nosuch/folder").write(Origin("theirs", "import", "toy"), "part-1", [])
    with pytest.raises(InvalidInput, match="names no bucket"):
        ExperienceStore("s3://")


def test_a_server_that_is_away_is_unreachable_within_seconds(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = ExperienceStore("s3://bucket/folder")
    before = time.monotonic()

    with pytest.raises(Unreachable):
        store.files()

    assert time.monotonic() - before < 30
