"""Whoever writes files says that the disk is full, leaves no half of anything, and writes once there is room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import redis

from services.orchestrator.datasets import DatasetFiles, Datasets
from services.orchestrator.jobs import IN_REDIS, JobStore
from services.orchestrator.stored_experience import exported
from spo.errors import ResourceExhausted
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.service.state import StateFolder
from spo.v1.prompt_pb2 import Prompt
from spo.v1.trajectory_pb2 import Trajectory


def trajectories(count: int) -> list[StoredTrajectory]:
    draw = np.random.default_rng(0)
    return [
        StoredTrajectory(
            Trajectory(
                trajectory_id=f"traj_{number}",
                prompt_id="p",
                response_token_ids=draw.integers(0, 1 << 30, 512),
                reference_logprobs=draw.random(512),
            ),
            Prompt(prompt_id="p", task_set="toy"),
            "float32",
        )
        for number in range(count)
    ]


def test_the_experience_store_names_the_full_folder_and_keeps_no_half_file(
    tiny_disk: Path, fill_disk: Callable[[], Path]
) -> None:
    store, origin, rows = ExperienceStore(str(tiny_disk)), Origin("run_a", "run", "toy"), trajectories(20)
    store.write(origin, "first", rows)
    ballast = fill_disk()

    with pytest.raises(ResourceExhausted, match=rf"no space is left in {tiny_disk}: \d+ bytes are needed") as full:
        store.write(origin, "second", rows)

    assert (full.value.code, full.value.retryable) == ("disk_full", True)
    assert not list(tiny_disk.rglob(".writing-*"))
    ballast.unlink()
    store.write(origin, "second", rows)
    assert [file.rows for file in store.files()] == [20, 20]


def test_an_upload_that_finds_no_room_goes_on_from_the_same_byte(
    redis_client: redis.Redis, tiny_disk: Path, tmp_path: Path, fill_disk: Callable[[], Path]
) -> None:
    datasets = Datasets(
        JobStore(redis_client, durable=IN_REDIS), DatasetFiles(StateFolder(tiny_disk), tiny_disk), 1 << 30
    )
    made = datasets.create("tasks", "taco", "jsonl", 100_000, "")
    part = tmp_path / "part"
    part.write_bytes(b"1" * 50_000)
    datasets.add_part(made.id, 0, part)
    ballast = fill_disk()

    with pytest.raises(ResourceExhausted, match="50000 bytes are needed"):
        datasets.add_part(made.id, 50_000, part)

    assert datasets.get(made.id).uploaded_bytes == 50_000
    ballast.unlink()
    assert datasets.add_part(made.id, 50_000, part).state == "validating"


def test_an_export_that_finds_no_room_for_its_footer_says_so(
    tiny_disk: Path, fill_disk: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tiny_disk))
    ballast = fill_disk()

    with pytest.raises(ResourceExhausted, match="no space is left"):
        b"".join(exported(trajectories(20), "parquet"))

    ballast.unlink()
    assert b"".join(exported(trajectories(20), "parquet")).startswith(b"PAR1")
