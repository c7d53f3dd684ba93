"""A model folder is refused as a whole when anything in it could run or cannot be read."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spo.errors import InvalidInput
from spo.model.folder import inspect_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text("{}")
    save_file({"weight": torch.arange(8.0)}, model / "model.safetensors")
    return model


def refusal(folder: Path) -> str:
    with pytest.raises(InvalidInput) as caught:
        inspect_model_folder(folder)
    (violation,) = caught.value.violations
    assert violation.pointer == "/model/path"
    return violation.message


def test_a_plain_folder_is_described(folder: Path) -> None:
    found = inspect_model_folder(folder)
    assert found.architecture == "LlamaForCausalLM"
    assert [file.name for file in found.safetensors_files] == ["model.safetensors"]
    assert found.weight_bytes == (folder / "model.safetensors").stat().st_size
    assert found.has_tokenizer


def test_a_folder_without_a_tokenizer_says_so(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert not inspect_model_folder(folder).has_tokenizer


@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "model.safetensors"])
def test_the_hash_follows_every_file_that_matters(folder: Path, changed: str) -> None:
    before = inspect_model_folder(folder).model_hash
    assert inspect_model_folder(folder).model_hash == before
    if changed == "model.safetensors":
        save_file({"weight": torch.arange(8.0) + 1}, folder / changed)
    else:
        (folder / changed).write_text((folder / changed).read_text()[:-1] + " }")
    assert inspect_model_folder(folder).model_hash != before


def test_the_hash_does_not_depend_on_where_the_folder_lies(folder: Path) -> None:
    before = inspect_model_folder(folder).model_hash
    assert inspect_model_folder(folder.rename(folder.parent / "elsewhere")).model_hash == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.pkl", "model.CKPT"])
def test_pickled_weights_are_refused_even_beside_safetensors(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")
    assert "pickled" in refusal(folder)


def test_pickled_weights_are_found_in_subfolders(folder: Path) -> None:
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"")
    assert "pickled" in refusal(folder)


def test_custom_code_is_refused(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text("")
    assert "custom code" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_request_for_custom_code_is_refused(folder: Path, name: str) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, "auto_map": {"AutoModel": "evil.Model"}}))
    assert "auto_map" in refusal(folder)


def test_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    outside = folder.parent / "secret"
    outside.write_text("secret")
    (folder / "vocab.json").symlink_to(outside)
    assert "leaves the folder" in refusal(folder)


def test_a_link_to_a_folder_outside_is_refused(folder: Path) -> None:
    (folder / "more").symlink_to(folder.parent, target_is_directory=True)
    assert "leaves the folder" in refusal(folder)


def test_a_link_to_nothing_is_refused(folder: Path) -> None:
    (folder / "vocab.json").symlink_to(folder / "absent")
    assert "link to nothing" in refusal(folder)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "no architecture"),
        (lambda folder: (folder / "tokenizer.json").write_text("nonsense"), "tokenizer.json is not valid JSON"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "truncated"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "truncated"),
        (lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{"), "unreadable"),
        (lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"), "unreadable"),
        (lambda folder: shorten(folder / "model.safetensors"), "its header says"),
        (lambda folder: name_missing_shard(folder), "model-00002.safetensors"),
    ],
)
def test_an_unreadable_folder_is_refused_with_the_reason(
    folder: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    spoil(folder)
    assert reason in refusal(folder)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def name_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert "not a folder" in refusal(tmp_path / "absent")
