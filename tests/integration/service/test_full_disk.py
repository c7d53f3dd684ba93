"""Whoever writes files says that the disk is full, leaves no half of anything, and writes once there is room."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import redis
import torch

from services.orchestrator.datasets import DatasetFiles, Datasets
from services.orchestrator.jobs import IN_REDIS, JobStore
from services.orchestrator.stored_experience import exported
from services.tinker.sessions import AdapterCheckpoint, CheckpointPath, CheckpointStore, SavedAdapter
from services.tinker.shared_model import LoraShape
from spo.errors import ResourceExhausted
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.model.folder import Adapter
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


def test_a_file_of_the_orchestrator_leaves_no_half_on_a_full_disk_and_the_one_before_stays(
    tiny_disk: Path, fill_disk: Callable[[], Path]
) -> None:
    folder = StateFolder(tiny_disk)
    folder.write("evaluations/job_a.json", b"before")
    ballast = fill_disk()

    for name in ("evaluations/job_a.json", "events/job_a/00000000.jsonl"):
        with pytest.raises(OSError, match="No space left"):
            folder.write(name, bytes(64 << 10))

    assert not list(tiny_disk.rglob(".writing-*"))
    assert folder.read("evaluations/job_a.json") == b"before"
    ballast.unlink()
    folder.write("events/job_a/00000000.jsonl", bytes(64 << 10))
    assert folder.names("events") == ["events/job_a/00000000.jsonl"]


def test_an_adapter_that_finds_no_room_is_refused_by_name_and_saved_when_there_is_some(
    tiny_disk: Path, fill_disk: Callable[[], Path]
) -> None:
    kept = CheckpointStore(tiny_disk / "tinker", "hash", 10)
    tensors = {"a": torch.ones(16 << 10)}

    def save(name: str) -> None:
        path = CheckpointPath("tnk_01M84V14PDXG1G2ACJASA3ANCC:train:0", "weights", name)
        head = AdapterCheckpoint(path, "t", LoraShape(4), 3, 1, 0, 0)
        kept.write(head, Adapter("hash", {}), SavedAdapter(head, tensors, {}), overwrite=False)

    save("one")
    ballast = fill_disk()
    with pytest.raises(ResourceExhausted, match=f"no space is left in {kept.root}") as full:
        save("two")

    assert (full.value.code, full.value.retryable) == ("disk_full", True)
    assert [each.path.name for each in kept.all("t")] == ["one"]
    ballast.unlink()
    save("two")
    assert sorted(each.path.name for each in kept.all("t")) == ["one", "two"]


TALKS = """
import sys
from spo.observability import configure_logs, get_logger
configure_logs("talker")
for line in sys.stdin:
    get_logger("test").info(line.strip(), filler="x" * 5000)
    print("went on after", line.strip(), flush=True)
"""


def test_a_service_goes_on_while_its_log_finds_no_room_and_says_how_many_lines_were_lost(
    tiny_disk: Path, fill_disk: Callable[[], Path]
) -> None:
    log = tiny_disk / "service.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", TALKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
        )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None

        def say(word: str) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"went on after {word}\n"

        say("before")
        ballast = fill_disk()
        for number in range(8):
            say(f"full{number}")
        ballast.unlink()
        say("after")
        process.stdin.close()
        assert process.wait(30) == 0
    lines = log.read_text().splitlines()
    # What found no room half way is no document.
    events = [json.loads(line) for line in lines if re.fullmatch(r'\{"[^{}]*"\}', line)]
    assert next(event["lost"] for event in events if event["event"] == "lines of the log were lost") >= 6
    assert [event["event"] for event in events][-1] == "after"
