"""A model folder is refused as a whole when anything in it could run or cannot be read."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spo.errors import InvalidInput
from spo.model.folder import inspect_model_folder, open_regular


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


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.CKPT", "original/consolidated.00.pth", "checkpoint/optimizer.pt"]
)
def test_pickled_weights_beside_safetensors_are_as_if_they_were_not_there(folder: Path, name: str) -> None:
    before = inspect_model_folder(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"not even pickled")

    found = inspect_model_folder(folder)

    assert (found.safetensors_files, found.model_hash) == (before.safetensors_files, before.model_hash)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "original/consolidated.00.pth"])
def test_pickled_weights_that_a_library_might_prefer_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"")
    assert "pickled" in refusal(folder)


def test_an_adapter_is_refused_since_it_names_another_place_for_the_weights(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/somewhere/else"}))
    assert "adapter" in refusal(folder)


def test_where_there_is_an_index_its_files_are_the_weights(folder: Path) -> None:
    save_file({"tok_embeddings": torch.arange(9.0)}, folder / "consolidated.safetensors")
    assert "which of consolidated.safetensors, model.safetensors" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "model.safetensors"}}))

    assert [file.name for file in inspect_model_folder(folder).safetensors_files] == ["model.safetensors"]


def test_weights_in_subfolders_are_no_weights(folder: Path) -> None:
    (folder / "original").mkdir()
    (folder / "model.safetensors").rename(folder / "original" / "model.safetensors")
    assert "no *.safetensors" in refusal(folder)


@pytest.fixture
def snapshot(folder: Path) -> Path:
    """The folder as Hugging Face's cache keeps it: a snapshot of links to blobs."""
    cached = folder.parent / "models--org--name"
    found = cached / "snapshots" / "abc123"
    found.mkdir(parents=True)
    (cached / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(cached / "blobs" / str(number))
        (found / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return found


def test_a_snapshot_of_the_cache_is_the_same_model_as_the_folder(folder: Path, snapshot: Path) -> None:
    cached = inspect_model_folder(snapshot)

    assert cached.has_tokenizer
    assert [file.name for file in cached.safetensors_files] == ["model.safetensors"]
    for file in snapshot.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert inspect_model_folder(folder).model_hash == cached.model_hash


def test_the_cached_repository_itself_is_refused_with_a_hint(snapshot: Path) -> None:
    assert "name the snapshot in it" in refusal(snapshot.parent.parent)


@pytest.mark.parametrize(
    "target", ["../../../secret", "../../refs/main", "../../blobs/more/deep", "../other/vocab.json"]
)
def test_a_snapshots_links_lead_to_its_blobs_only(snapshot: Path, target: str) -> None:
    place = Path(os.path.normpath(snapshot / target))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("secret")
    (snapshot / "vocab.json").symlink_to(target)
    assert "leaves the folder" in refusal(snapshot)


def test_a_blob_that_leads_elsewhere_is_refused(snapshot: Path) -> None:
    secret = snapshot.parent.parent.parent / "secret"
    secret.write_text("{}")
    (snapshot.parent.parent / "blobs" / "9").symlink_to(secret)
    (snapshot / "vocab.json").symlink_to("../../blobs/9")
    assert "leaves the folder" in refusal(snapshot)


@pytest.mark.parametrize("name", ["modeling_evil.py", "pytorch_model.bin"])
def test_links_of_a_snapshot_are_judged_by_their_own_names(snapshot: Path, name: str) -> None:
    (snapshot.parent.parent / "blobs" / "9").write_text("")
    (snapshot / name).symlink_to("../../blobs/9")
    (snapshot / "model.safetensors").rename(snapshot / "other.safetensors")
    assert name in refusal(snapshot)


def test_end_tokens_are_those_of_both_files(folder: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    before = inspect_model_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6}))
    same = inspect_model_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, True, -1, "x"]}))
    found = inspect_model_folder(folder)

    assert (before.end_token_ids, same.end_token_ids, found.end_token_ids) == ((2,), (2,), (2, 7))
    assert before.model_hash == same.model_hash
    assert before.model_hash != found.model_hash, "another end is another policy"


def test_the_text_part_of_a_config_has_the_end_token_too(folder: Path) -> None:
    config = {"architectures": ["x"], "text_config": {"eos_token_id": [5, 6]}}
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect_model_folder(folder).end_token_ids == (5, 6)


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
        (
            lambda folder: (folder / "tokenizer_config.json").write_text("nonsense"),
            "tokenizer_config.json is not valid",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "truncated"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "truncated"),
        (lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{"), "unreadable"),
        (lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"), "unreadable"),
        (lambda folder: shorten(folder / "model.safetensors"), "its header says"),
        (lambda folder: name_missing_shard(folder), "model-00002.safetensors"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json is not valid"),
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


@pytest.mark.parametrize("path", ["/", "/usr", "/proc", "/dev", "x" * 5000, "/" + "x" * 300, "/a\0b", "/dev/zero"])
def test_a_path_to_anything_else_is_refused_at_once(path: str) -> None:
    began = time.monotonic()

    refusal(Path(path))

    assert time.monotonic() - began < 0.5


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "README", "model.extra.json"])
def test_a_fifo_is_refused_and_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)

    assert "no regular file" in refusal(folder)


@pytest.mark.timeout(10)
def test_a_fifo_that_took_a_files_place_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "late.json")

    with pytest.raises(InvalidInput, match="model folder"):
        open_regular(folder / "late.json")


def test_a_tree_is_not_walked(folder: Path) -> None:
    for number in range(2001):
        (folder / f"{number}.txt").touch()
    assert "more than 2000" in refusal(folder)


def test_a_deep_tree_is_not_walked(folder: Path) -> None:
    (folder / "a" / "b" / "c" / "d").mkdir(parents=True)
    assert "deeper" in refusal(folder)


def test_a_circle_of_links_is_refused(folder: Path) -> None:
    (folder / "vocab.json").symlink_to(folder / "merges.txt")
    (folder / "merges.txt").symlink_to(folder / "vocab.json")
    assert "link" in refusal(folder)


def test_large_json_is_not_parsed(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["a"], "x": " " * (17 << 20)}))
    assert "larger than" in refusal(folder)


def test_weights_are_not_read_until_somebody_asks_for_their_hash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("spo.model.folder._digest", refuse)
    found = inspect_model_folder(folder)

    with pytest.raises(AssertionError, match="were read"):
        _ = found.model_hash
