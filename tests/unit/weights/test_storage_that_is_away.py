"""A folder that cannot be read or written now is one error that names it, wherever it is met, until it is back."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.orchestrator.datasets import DatasetFiles
from services.trainer.checkpoints import CheckpointFolder
from spo.errors import InvalidInput, NotReady, SpoError, StorageUnavailable, storage_error, storage_faults_named
from spo.experience.store import ExperienceStore, Origin
from spo.manifest_folder import seal_folder, staging_folder
from spo.model.folder import inspect_model_folder
from spo.service.state import StateFolder
from spo.tasks.records import read_records
from spo.weights.store import WeightStore

AWAY = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO, errno.ETIMEDOUT)
BARRED = (errno.EROFS, errno.EACCES, errno.EPERM)
CALLS = ((os, "mkdir"), (os, "open"), (os, "listdir"), (os, "scandir"), (os, "rename"), (os, "replace"), (io, "open"))

Fail = Callable[[int], None]


@pytest.fixture
def fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Makes every call on what lies below the test's folder fail with an error number; 0: makes it work again."""
    failing = [0]

    def failing_or(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            if failing[0] and not isinstance(path, int) and str(path).startswith(str(tmp_path)):
                raise OSError(failing[0], os.strerror(failing[0]), str(path))
            return real(path, *rest, **named)

        return call

    for module, name in CALLS:
        monkeypatch.setattr(module, name, failing_or(getattr(module, name)))

    def fail_with(number: int) -> None:
        failing[0] = number

    return fail_with


def write(folder: Path, version: int = 1) -> None:
    shards = [("model-00001.safetensors", {"layer.weight": torch.ones(4)})]
    WeightStore(folder).write("job_a", version, parent=version - 1, step=version, dtype="float32", shards=shards)


def seal_checkpoint(folder: Path) -> None:
    destination = folder / "job_a" / "0000000001"
    with staging_folder(destination) as writing:
        (writing / "rank-00000.safetensors").write_bytes(b"state")
        seal_folder(writing, destination, {"epoch": 1})


def store_a_delta(folder: Path) -> None:
    store = WeightStore(folder / "weights", cache_path=str(folder / "cache"), anchor_interval=4)
    shards = [("model-00001.safetensors", {"layer.weight": torch.ones(4)})]
    store.write("job_a", 1, parent=0, step=1, dtype="float32", shards=shards)


PLACES: dict[str, Callable[[Path], object]] = {
    "a publication": lambda folder: write(folder, 3),
    "a publication by the cache": store_a_delta,
    "reading a version": lambda folder: WeightStore(folder).open("job_a", 1),
    "listing versions": lambda folder: WeightStore(folder).versions("job_a"),
    "pruning versions": lambda folder: WeightStore(folder).prune("job_a", 1),
    "listing checkpoints": lambda folder: CheckpointFolder(folder / "checkpoints" / "job_a").steps(),
    "reading a checkpoint": lambda folder: CheckpointFolder(folder / "checkpoints" / "job_a").manifest(1, ""),
    "pruning checkpoints": lambda folder: CheckpointFolder(folder / "checkpoints" / "job_a").prune([], 1),
    "stored experience": lambda folder: ExperienceStore(str(folder)).write(Origin("run_a", "run", "toy"), "first", []),
    "beginning an upload": lambda folder: DatasetFiles(StateFolder(folder), folder).begin("ds_a"),
}


@pytest.mark.parametrize("number", AWAY + BARRED, ids=errno.errorcode.get)
@pytest.mark.parametrize("place", PLACES)
def test_it_is_named_with_its_path_and_may_be_tried_again_until_it_is_back(
    tmp_path: Path, fail: Fail, place: str, number: int
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    seal_checkpoint(tmp_path / "checkpoints")
    fail(number)

    with pytest.raises(
        StorageUnavailable, match=f"{tmp_path}.*{errno.errorcode[number]}: {os.strerror(number)}"
    ) as met:
        PLACES[place](tmp_path)

    assert (met.value.code, met.value.retryable) == ("storage_unavailable", True)
    fail(0)
    PLACES[place](tmp_path)


def test_a_version_whose_last_fsync_failed_is_the_same_version_at_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("job_a"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageUnavailable, match="EIO"):
        write(tmp_path)
    monkeypatch.setattr(os, "fsync", real)
    write(tmp_path)

    assert WeightStore(tmp_path).versions("job_a") == [1]
    assert [path.name for path in (tmp_path / "job_a").iterdir()] == ["00000001"]


@pytest.mark.parametrize("number", AWAY, ids=errno.errorcode.get)
@pytest.mark.parametrize("read", [inspect_model_folder, lambda path: list(read_records(path / "tasks.jsonl", ()))])
def test_what_a_person_gave_is_not_refused_because_its_disk_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], number: int
) -> None:
    def stat(path: object, *rest: object, **named: object) -> os.stat_result:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        with pytest.raises(StorageUnavailable, match=str(tmp_path)):
            read(tmp_path)


def test_a_folder_that_a_person_may_not_read_is_still_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: object, *rest: object, **named: object) -> os.stat_result:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        with pytest.raises(InvalidInput, match="model"):
            inspect_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ESTALE, "stale", "/mnt/a"), "storage_unavailable"),
        (OSError(errno.EIO, "failing"), "storage_unavailable"),
        (OSError(errno.ENOSPC, "full"), "disk_full"),
        (
            RuntimeError("Error while serializing: I/O error: Read-only file system (os error 30)"),
            "storage_unavailable",
        ),
        # A socket's, which concerns no file.
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), None),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), None),
        (FileNotFoundError(errno.ENOENT, "absent", "/mnt/a"), None),
        (ValueError("another fault"), None),
    ],
)
def test_of_all_errors_of_a_service_those_of_files_alone_are_taken_for_a_place_that_is_away(
    error: Exception, code: str | None
) -> None:
    found = storage_error(error)

    assert (found.code if found else None) == code


def test_an_error_that_has_a_name_keeps_it_and_a_cause_is_found_below_what_a_library_made_of_it(tmp_path: Path) -> None:
    named: SpoError = NotReady("busy (os error 5)")
    with pytest.raises(NotReady) as kept, storage_faults_named(tmp_path):
        raise named
    assert kept.value is named

    with pytest.raises(StorageUnavailable, match="EIO"), storage_faults_named(tmp_path):
        raise OSError("the weights cannot be loaded") from OSError(errno.EIO, "failing")
