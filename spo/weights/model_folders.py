"""Model folders: a job's pi0 again, or its model with published weights, an adapter merged into them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from spo.errors import IntegrityError
from spo.manifest_folder import link_files
from spo.model.adapter_folder import CONFIG_FILE, adapter_of, read_header
from spo.model.folder import INDEX_FILE, TOKENIZER_FILES, inspect_model_folder
from spo.weights.merge import merge_adapter
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
    """The model with a version's weights, those of an adapter merged: configuration, tokenizer and their files.

    Raises InvalidInput, and IntegrityError when the version is an adapter of another model.
    """
    inspect_model_folder(model)
    destination.mkdir(parents=True)
    # Copied: people may edit their model's folder, and links would change along.
    for file in _further(model):
        shutil.copy2(file, destination / file.name)
    adapter = adapter_of(version.files)
    if adapter:
        _write_merged(model, version, adapter, destination)
        return destination
    link_files(version.files, destination)
    if len(version.files) == 1:
        (destination / version.files[0].name).rename(destination / SINGLE_FILE)
    else:
        _write_index(destination, version.files)
    return destination


def write_export(model: Path, version: StoredVersion, out: Path, *, merge: bool) -> None:
    """A version as a folder: a model's, or an adapter's in peft's layout. Raises InvalidInput, IntegrityError."""
    adapter = adapter_of(version.files)
    if adapter is None or merge:
        model_of_version(model, version, out)
        return
    out.mkdir(parents=True)
    link_files([file for file in version.files if file.name != CONFIG_FILE], out)
    # The path of the model that this machine knows, for `PeftModel.from_pretrained` and its kin.
    config = json.loads((adapter / CONFIG_FILE).read_bytes()) | {"base_model_name_or_path": str(model)}
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))


def _write_merged(model: Path, version: StoredVersion, adapter: Path, destination: Path) -> None:
    """Raises IntegrityError when the adapter is another model's."""
    found = inspect_model_folder(model)
    if found.model_hash != version.base_model:
        raise IntegrityError(f"{version.uri} is an adapter of another model than the one at {model}")
    dtype = str(version.manifest["dtype"])
    for file in found.safetensors_files:
        merge_adapter(file, adapter, dtype, destination / file.name)
    if len(found.safetensors_files) > 1:
        _write_index(destination, [destination / file.name for file in found.safetensors_files])
    config = {name: value for name, value in found.config.items() if name != "torch_dtype"}
    (destination / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))


def _write_index(destination: Path, files: Sequence[Path]) -> None:
    names = {name: file.name for file in files for name in read_header(file)[0]}
    index = {"metadata": {"total_size": sum(file.stat().st_size for file in files)}, "weight_map": names}
    (destination / INDEX_FILE).write_text(json.dumps(index))


def _further(model: Path) -> list[Path]:
    return [model / name for name in FURTHER_FILES if (model / name).is_file()]
