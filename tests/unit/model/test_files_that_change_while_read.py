"""No reader maps a file: one that is cut, or goes away, under its reader is an error with a name and not a SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors import SafetensorError
from safetensors.numpy import save_file

from spo.errors import storage_errno
from spo.model import logprobs
from spo.model.folder import open_tensors, read_tensors
from spo.weights.delta import apply_delta, write_delta

BYTES = 1 << 20
MAPPERS = "update_mmap", "memory_map(", "np.memmap", "mmap.mmap", "load_file(", "safe_open("


def test_a_file_that_is_cut_under_its_reader_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": np.ones(BYTES, np.uint8)}, file)
    with open_tensors(file) as tensors:
        os.truncate(file, BYTES // 2)
        for read in (lambda: tensors.get_tensor("weight"), lambda: tensors.get_slice("weight")[BYTES // 2 :]):
            with pytest.raises(SafetensorError):
                read()
    with pytest.raises(SafetensorError):
        read_tensors(file)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        read_tensors(file)


def test_errors_of_the_storage_keep_their_number() -> None:
    assert storage_errno(SafetensorError("Could not read tensor: Input/output error (os error 5)")) == 5


def test_a_delta_of_files_that_are_read_gives_the_new_file_to_the_byte(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    old, new, delta = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "delta"))
    words = random.integers(0, 1 << 16, 70_000, np.uint16)
    save_file({"a": words}, old)
    words[::97] += 3
    save_file({"a": words}, new)
    assert write_delta(old, new, delta)
    apply_delta(old, delta)
    assert old.read_bytes() == new.read_bytes()


def test_transformers_has_been_told_to_read() -> None:
    assert transformers.modeling_utils.safe_open is open_tensors
    assert logprobs.open_tensors is open_tensors


def test_no_module_maps_a_file() -> None:
    root = Path(__file__).parents[3]
    found = [
        f"{path.relative_to(root)}: {mapper}"
        for folder in ("spo", "services")
        for path in (root / folder).rglob("*.py")
        for mapper in MAPPERS
        if mapper in path.read_text() and path.name != "folder.py"
    ]
    assert found == []
