"""Model folders for forks: the parent's pi0 again, or pi0 with published weights in its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from spo.manifest_folder import link_files
from spo.model.folder import INDEX_FILE, TOKENIZER_FILES, inspect_model_folder
from spo.weights.store import StoredVersion

SINGLE_FILE = "model.safetensors"
# What may lie beside weights and tokenizer.
FURTHER_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)


def link_model(source: Path, destination: Path) -> Path:
    """The same model in another folder. Raises InvalidInput when the source is no model folder."""
    found = inspect_model_folder(source)
    destination.mkdir(parents=True)
    index = [source / INDEX_FILE] if (source / INDEX_FILE).is_file() else []
    link_files([*_further(source), *found.safetensors_files, *index], destination)
    return destination


def model_of_version(model: Path, version: StoredVersion, destination: Path) -> Path:
    """The model with a version's weights: its configuration and tokenizer, and their files. Raises InvalidInput."""
    inspect_model_folder(model)
    destination.mkdir(parents=True)
    # Copied: people may edit their model's folder, and links would change along.
    for file in _further(model):
        shutil.copy2(file, destination / file.name)
    link_files(version.files, destination)
    if len(version.files) == 1:
        (destination / version.files[0].name).rename(destination / SINGLE_FILE)
    else:
        files = {name: file.name for file in version.files for name in _tensors(file)}
        index = {"metadata": {"total_size": version.size_bytes}, "weight_map": files}
        (destination / INDEX_FILE).write_text(json.dumps(index))
    return destination


def _further(model: Path) -> list[Path]:
    return [model / name for name in FURTHER_FILES if (model / name).is_file()]


def _tensors(file: Path) -> list[str]:
    """Names of the tensors in a verified safetensors file, from its header."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
    return [name for name in header if name != "__metadata__"]
