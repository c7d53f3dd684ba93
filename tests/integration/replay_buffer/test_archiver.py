"""From the buffer into the experience store: each trajectory once, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from services.replay_buffer.archive import ExperienceArchiver
from services.replay_buffer.store import ReplayStore
from spo import redis_keys
from spo.errors import SpoError
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, merge, plan
from spo.messaging.streams.recovery import troubles_of
from spo.testing.peers import wait_until
from spo.testing.runs import PROMPTS, RUN, start_run, trajectory
from spo.v1.prompt_pb2 import SOURCE_HUMAN, SOURCE_OTHER_RUN, SOURCE_REFERENCE, Prompt
from spo.v1.trajectory_pb2 import Annotation


@pytest.fixture
def store(redis_client: redis.Redis) -> ReplayStore:
    start_run(redis_client)
    redis_client.zadd(redis_keys.job_index(), {RUN: 1})
    redis_client.set(redis_keys.run_state(RUN), "running")
    for prompt_id in PROMPTS:
        prompt = Prompt(prompt_id=prompt_id, text=f"words of {prompt_id}", task_set="toy", tests_digest="t")
        redis_client.hset(redis_keys.run_prompts(RUN), prompt_id, prompt.SerializeToString())
    return ReplayStore(redis_client)


def spiller_of(store: ReplayStore, folder: Path, rows_per_file: int = 16) -> ExperienceArchiver:
    return ExperienceArchiver(store, ExperienceStore(str(folder)), rows_per_file, every_seconds=60)


def stored(folder: Path) -> list[StoredTrajectory]:
    experience = ExperienceStore(str(folder))
    return [row for file in experience.files() for batch in experience.batches(file) for row in batch]


def test_everything_that_learning_needs_is_stored_once(store: ReplayStore, tmp_path: Path) -> None:
    made = [trajectory(number, SOURCE_REFERENCE, right=number % 2 == 0) for number in range(40)]
    made[0].annotations.append(Annotation(position=1, rollouts=8, successes=3))
    made[0].parents.append("traj_before")
    for sample in made:
        sample.reference_hash = "f" * 64
    store.append(RUN, made)
    spiller = spiller_of(store, tmp_path)

    assert spiller.archive(RUN) == 40
    assert spiller.archive(RUN) == 0

    found = {row.trajectory.trajectory_id: row for row in stored(tmp_path)}
    assert len(found) == 40
    for sample in made:
        row = found[sample.trajectory_id]
        assert row.trajectory == sample
        assert row.prompt.text == f"words of {sample.prompt_id}"
        assert row.reference_dtype == "float32"
    paths = [file.path for file in ExperienceStore(str(tmp_path)).files()]
    assert len(paths) == 3, "sixteen rows per file"
    assert all("/task_set=toy/reference=ffffffffffffffff/run=job_TEST/" in path for path in paths)


def test_copies_of_stored_experience_are_not_stored_again(store: ReplayStore, tmp_path: Path) -> None:
    copy = trajectory(1, SOURCE_OTHER_RUN)
    copy.origin_run_id = "job_BEFORE"
    store.append(RUN, [copy, trajectory(2, SOURCE_HUMAN)])

    spiller_of(store, tmp_path).archive(RUN)

    assert [row.trajectory.trajectory_id for row in stored(tmp_path)] == ["traj_SOURCE_HUMAN_2"]


def test_a_running_job_is_stored_when_enough_has_come_and_an_ended_one_at_once(
    store: ReplayStore, redis_client: redis.Redis, tmp_path: Path
) -> None:
    spiller = spiller_of(store, tmp_path)
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(15)])
    spiller.archive_when_due(RUN)
    assert stored(tmp_path) == [], "fewer than a file, and no minute has passed"

    store.append(RUN, [trajectory(15, SOURCE_HUMAN)])
    spiller.archive_when_due(RUN)
    assert len(stored(tmp_path)) == 16

    store.append(RUN, [trajectory(16, SOURCE_HUMAN)])
    redis_client.set(redis_keys.run_state(RUN), "succeeded")
    spiller.archive_when_due(RUN)
    assert len(stored(tmp_path)) == 17


def test_two_spillers_that_meet_write_each_file_once(store: ReplayStore, tmp_path: Path) -> None:
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(10)])
    slow, quick = spiller_of(store, tmp_path), spiller_of(store, tmp_path)
    begun = slow._next_file(RUN)
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(10, 20)])

    quick.archive(RUN)
    # The slow one wakes up after the other has gone on: what it writes is what is there.
    slow._write(RUN, *begun)
    slow.archive(RUN)

    ids = [row.trajectory.trajectory_id for row in stored(tmp_path)]
    assert begun == (0, 10)
    assert len(ids) == len(set(ids)) == 20


def test_a_place_that_cannot_be_written_costs_nothing(store: ReplayStore, tmp_path: Path) -> None:
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(20)])
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    spiller = spiller_of(store, blocked / "experience")

    with pytest.raises(SpoError, match="experience"):
        spiller.archive(RUN)
    spiller.every_seconds = -1
    with pytest.raises(SpoError, match="experience"):
        spiller.archive_or_tell(RUN)
    (told,) = troubles_of(store.client, RUN, int(time.time() * 1000))
    assert (told.place, str(blocked) in told.reason) == ("experience", True), "the job's `waits` say so"
    blocked.unlink()

    assert spiller.archive(RUN) == 20
    assert len(stored(blocked / "experience")) == 20


def replay_process(redis_url: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        "SPO_REDIS_URL": redis_url,
        "SPO_EXPERIENCE_URL": str(folder),
        "SPO_ORCHESTRATOR_ADDRESS": "127.0.0.1:1",
        "SPO_REPLAY_BUFFER_PORT": "0",
        "SPO_REPLAY_BUFFER_STORED_ROWS_PER_FILE": "8",
    }
    command = [sys.executable, "-m", "services.replay_buffer"]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_spiller_killed_at_any_time_loses_nothing_and_doubles_nothing(
    store: ReplayStore, redis_server: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    total, kills = 1600, 0
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(total)])
    process = replay_process(redis_server, tmp_path)
    try:
        for _ in range(3):
            before = _written(redis_client)
            wait_until(lambda before=before: _written(redis_client) > before, "a file is written", 150, 0.005)
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            kills += _written(redis_client) < total
            process = replay_process(redis_server, tmp_path)
        redis_client.set(redis_keys.run_state(RUN), "succeeded")
        wait_until(lambda: _written(redis_client) == total, "everything is stored", 150)
    finally:
        process.kill()
        process.wait(10)

    counts = Counter(row.trajectory.trajectory_id for row in stored(tmp_path))
    assert kills >= 2, "killed in the middle of its work"
    assert set(counts) == {f"traj_SOURCE_HUMAN_{number}" for number in range(total)}
    assert set(counts.values()) == {1}


def _written(client: redis.Redis) -> int:
    found: Any = client.hget(redis_keys.replay_stored(RUN), "written")
    return int(found or 0)


def test_only_runs_with_something_unstored_are_looked_at(store: ReplayStore, tmp_path: Path) -> None:
    store.client.zadd(redis_keys.job_index(), {f"job_OLD{number}": number for number in range(3000)})
    store.append(RUN, [trajectory(number) for number in range(3)])
    spiller = spiller_of(store, tmp_path, rows_per_file=2)
    # As a version that kept no list leaves it.
    store.client.delete(redis_keys.replay_unstored())

    spiller.adopt()
    assert store.client.smembers(redis_keys.replay_unstored()) == {RUN.encode()}
    spiller.archive_when_due(RUN)
    assert len(stored(tmp_path)) == 3
    assert store.client.smembers(redis_keys.replay_unstored()) == set()

    store.client.set(redis_keys.run_state(RUN), "succeeded")
    store.append(RUN, [trajectory(3)])
    assert store.client.smembers(redis_keys.replay_unstored()) == {RUN.encode()}, "what was still in the pipeline"
    spiller.archive_when_due(RUN)
    assert len(stored(tmp_path)) == 4


def test_a_deleted_run_leaves_the_list(store: ReplayStore, tmp_path: Path) -> None:
    store.append(RUN, [trajectory(0)])
    store.client.delete(redis_keys.replay_counters(RUN), redis_keys.replay_stored(RUN), redis_keys.run_state(RUN))

    spiller_of(store, tmp_path).archive_when_due(RUN)

    assert store.client.scard(redis_keys.replay_unstored()) == 0


# --- Redis set back ---


@pytest.mark.parametrize(
    ("backup_at", "stored_at_backup", "same_process", "merged"),
    [
        (0, False, True, False),
        (16, True, True, False),
        (20, True, False, False),
        (20, False, False, True),
        (40, True, True, True),
    ],
)
def test_a_redis_that_was_set_back_doubles_no_row_and_replaces_none(
    store: ReplayStore, tmp_path: Path, backup_at: int, stored_at_backup: bool, same_process: bool, merged: bool
) -> None:
    spiller = spiller_of(store, tmp_path)
    samples = [trajectory(number, SOURCE_REFERENCE) for number in range(60)]
    store.append(RUN, samples[:backup_at])
    if stored_at_backup:
        spiller.archive(RUN)
    backup = {key: store.client.dump(key) for key in store.client.scan_iter(f"spo:{RUN}:*")}
    store.append(RUN, samples[backup_at:50])
    spiller.archive(RUN)
    if merged:
        experience = ExperienceStore(str(tmp_path))
        for files in plan(experience.files()):
            merge(experience, files)
    store.client.delete(*store.client.scan_iter(f"spo:{RUN}:*"))
    for key, dumped in backup.items():
        store.client.restore(key, 0, dumped)

    # Other work comes first now, then the same work again under the same ids.
    again = [*samples[50:], *samples[backup_at:50]]
    later = spiller if same_process else spiller_of(store, tmp_path)
    for start in range(0, len(again), 13):
        store.append(RUN, again[start : start + 13])
        later.archive(RUN)

    assert Counter(row.trajectory.trajectory_id for row in stored(tmp_path)) == Counter(
        sample.trajectory_id for sample in samples
    )
