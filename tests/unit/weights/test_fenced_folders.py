"""A folder of a newer lease epoch stays, whenever an older writer wakes up."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from spo import manifest_folder
from spo.errors import Conflict, IntegrityError
from spo.manifest_folder import numbered_folders, open_folder, prune_folders, seal_folder, staging_folder


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
