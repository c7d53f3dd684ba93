"""A folder of a newer lease epoch stays, whenever an older writer wakes up."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from spo import manifest_folder
from spo.errors import Conflict, IntegrityError, SpoError
from spo.manifest_folder import numbered_folders, open_folder, prune_folders, seal_folder, staging_folder
from spo.service.state import StateFolder
from spo.weights import model_folders


def seal(destination: Path, epoch: int, content: str) -> None:
    with staging_folder(destination) as writing:
        (writing / "part").write_text(content)
        seal_folder(writing, destination, {"epoch": epoch})


def epoch_of(folder: Path) -> int:
    return int(open_folder(folder).manifest["epoch"])


def test_files_are_hashed_several_at_once_and_the_damaged_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    three, digest = threading.Barrier(3), manifest_folder.file_digest

    def together(path: Path) -> str:
        three.wait(30)
        return digest(path)

    monkeypatch.setattr(manifest_folder, "file_digest", together)
    with staging_folder(tmp_path / "1") as writing:
        for number in range(6):
            (writing / f"part-{number}").write_text("content" * number)
        sealed = seal_folder(writing, tmp_path / "1", {"epoch": 1})
    names = [entry["name"] for entry in sealed.manifest["files"]]
    assert names == [f"part-{number}" for number in range(6)]
    assert [entry["blake3"] for entry in sealed.manifest["files"]] == [
        blake3(("content" * number).encode()).hexdigest() for number in range(6)
    ]
    assert open_folder(tmp_path / "1").manifest == sealed.manifest
    for number in (3, 5):
        (tmp_path / "1" / f"part-{number}").write_text("CONTENT" * number)
    with pytest.raises(IntegrityError, match="part-3"):
        open_folder(tmp_path / "1")


def test_an_older_epoch_does_not_even_replace_a_damaged_folder_of_a_newer_one(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    seal(folder, 2, "new")
    (folder / "part").write_text("cut")

    with pytest.raises(Conflict):
        seal(folder, 1, "old")
    assert "2" in (folder / "manifest.json").read_text()
    seal(folder, 2, "new")
    assert epoch_of(folder) == 2


def test_a_writer_that_slept_after_it_judged_the_folder_puts_its_successors_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "1"
    seal(folder, 1, "first")
    take = manifest_folder._taken_away

    def wake_up_late(path: Path) -> Path:
        # Between the judgement and the removal the owner of epoch 3 replaces the folder.
        monkeypatch.setattr(manifest_folder, "_taken_away", take)
        seal(folder, 3, "owner")
        return take(path)

    monkeypatch.setattr(manifest_folder, "_taken_away", wake_up_late)

    with pytest.raises(Conflict):
        seal(folder, 2, "stale")
    assert (epoch_of(folder), (folder / "part").read_text()) == (3, "owner")


def test_pruning_with_an_outdated_list_leaves_what_a_newer_epoch_wrote(tmp_path: Path) -> None:
    for number, epoch in ((1, 1), (2, 1), (3, 2), (4, 1)):
        seal(tmp_path / f"{number:03d}", epoch, "state")
    shutil.rmtree(tmp_path / "004")
    (tmp_path / "004").mkdir()

    prune_folders(tmp_path, [2], epoch=1)

    assert [number for number, _ in numbered_folders(tmp_path)] == [2, 3]
    assert not list(tmp_path.glob(".writing-*"))


def test_of_exports_into_one_folder_one_is_there_whole_and_the_others_harm_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(4)

    def export_into(model: Path, version: object, out: Path, *, merge: bool) -> None:
        out.mkdir()
        (out / "config.json").write_text(str(version))
        together.wait(20)
        if version == 0:
            raise IntegrityError("the version is damaged")
        assert not (tmp_path / "out").exists() or (tmp_path / "out" / "config.json").exists()
        (out / "model.safetensors").write_text(str(version))

    def export(version: int) -> str:
        try:
            model_folders.write_export(tmp_path, version, tmp_path / "out", merge=False)  # type: ignore[arg-type]
        except SpoError as error:
            return error.code
        return "made"

    monkeypatch.setattr(model_folders, "_export_into", export_into)
    with ThreadPoolExecutor(4) as threads:
        found = Counter(threads.map(export, range(4)))

    assert found == {"made": 1, "unwritable_file": 2, "integrity": 1}
    assert len({file.read_text() for file in (tmp_path / "out").iterdir()}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_threads_that_write_one_file_of_the_state_leave_it_whole(tmp_path: Path) -> None:
    place = StateFolder(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: place.write("jobs/one.json", b"%d" % (number % 10) * 50_000), range(64)))
    written = place.read("jobs/one.json")
    assert written is not None
    assert (len(written), len(set(written))) == (50_000, 1)
    assert place.names("") == ["jobs/one.json"]
