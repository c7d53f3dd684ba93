"""One toy model, shared by the tests of a module; what a test adds to it, it takes away."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.tinker.shared_model import SharedModel
from spo.testing.trainer import write_random_llama


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinker") / "pi0"
    write_random_llama(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def shared(toy_folder: Path) -> SharedModel:
    return SharedModel(toy_folder, "float32")
