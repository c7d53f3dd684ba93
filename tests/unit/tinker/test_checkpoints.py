"""Saved adapters: whole or absent, one tenant's own, and no path leads elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from services.tinker.sessions import AdapterCheckpoint, CheckpointPath, CheckpointStore, SavedAdapter, checked_name
from services.tinker.shared_model import LoraShape
from spo.errors import Conflict, IntegrityError, InvalidInput, NotFound, ResourceExhausted
from spo.model.folder import TENSORS_FILE, Adapter

MODEL = "tnk_01M84V14PDXG1G2ACJASA3ANCC:train:0"
TENSORS = {"a": torch.arange(4.0)}
MOMENTS = {"exp_avg:a": torch.ones(4)}


def store(folder: Path, most: int = 10) -> CheckpointStore:
    return CheckpointStore(folder / "tinker", "hash", most)


def save(kept: CheckpointStore, name: str = "one", *, tenant: str = "t", overwrite: bool = False, ttl: int = 0) -> str:
    now = time.time_ns() // 1_000_000
    path = CheckpointPath(MODEL, "weights", name)
    head = AdapterCheckpoint(path, tenant, LoraShape(4), 3, now, now + ttl if ttl else 0, 0)
    kept.write(head, Adapter("hash", {}), SavedAdapter(head, TENSORS, MOMENTS), overwrite=overwrite)
    return str(path)


def test_what_is_saved_is_loaded_by_another_process(tmp_path: Path) -> None:
    path = save(store(tmp_path))
    assert path == f"tinker://{MODEL}/weights/one"
    found = store(tmp_path).load("t", path)
    torch.testing.assert_close(found.tensors, TENSORS)
    torch.testing.assert_close(found.moments, MOMENTS)
    assert (found.checkpoint.shape, found.checkpoint.steps) == (LoraShape(4), 3)


def test_to_another_tenant_it_is_not_there(tmp_path: Path) -> None:
    kept = store(tmp_path)
    path = save(kept)
    for attempt in (kept.find, kept.load, kept.delete):
        with pytest.raises(NotFound) as told:
            attempt("other", path)
        with pytest.raises(NotFound) as absent:
            attempt("other", path.replace("one", "two"))
        assert told.value.message.replace("one", "two") == absent.value.message
    assert kept.all("other") == []
    assert [str(each.path) for each in kept.all("t")] == [path]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "tinker://../../etc/weights/one",
        f"tinker://{MODEL}/weights/../one",
        f"tinker://{MODEL}/x/one",
    ],
)
def test_no_path_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(NotFound):
        store(tmp_path).find("t", path)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "x" * 200, "session-1", "a b"])
def test_a_name_that_is_no_plain_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        checked_name(name)


def test_a_taken_name_is_kept_unless_it_is_to_be_overwritten(tmp_path: Path) -> None:
    kept = store(tmp_path)
    path = save(kept)
    first = kept.find("t", path).created_unix_ms
    with pytest.raises(Conflict):
        save(kept)
    time.sleep(0.002)  # Another millisecond, so that it is later.
    save(kept, overwrite=True)
    assert kept.find("t", path).created_unix_ms > first


def test_a_tenant_has_so_many_and_no_more(tmp_path: Path) -> None:
    kept = store(tmp_path, most=2)
    save(kept, "one")
    save(kept, "two")
    with pytest.raises(ResourceExhausted):
        save(kept, "three")


def test_what_has_expired_is_gone(tmp_path: Path) -> None:
    kept = store(tmp_path)
    path = save(kept, ttl=-1)
    with pytest.raises(NotFound):
        kept.find("t", path)
    kept.sweep()
    assert not list((tmp_path / "tinker").glob("*/*/one"))


def test_damage_is_told(tmp_path: Path) -> None:
    kept = store(tmp_path)
    path = save(kept)
    tensors = tmp_path / "tinker" / MODEL / "weights" / "one" / TENSORS_FILE
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError):
        kept.load("t", path)
