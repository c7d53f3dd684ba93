"""Weight versions are whole or absent, verified when opened, and fenced by the epoch of their writer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spo.errors import Conflict, IntegrityError, InvalidInput, NotFound
from spo.weights.store import StoredVersion, WeightStore

Shards = list[tuple[str, dict[str, torch.Tensor]]]


def two_shards(value: float = 1.0) -> Shards:
    return [
        ("model-00001.safetensors", {"layer.weight": torch.full((8, 8), value)}),
        ("model-00002.safetensors", {"head.weight": torch.full((4,), value)}),
    ]


def write(store: WeightStore, version: int = 1, value: float = 1.0, epoch: int = 1) -> StoredVersion:
    return store.write(
        "job_a", version, parent=version - 1, step=10 * version, dtype="float32", shards=two_shards(value), epoch=epoch
    )


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path)


def test_a_written_version_opens_with_the_same_tensors(store: WeightStore) -> None:
    written = write(store)

    opened = store.open("job_a", 1)

    assert opened == written
    assert opened.path == Path(store.backend.name) / "job_a" / "00000001"
    assert (opened.manifest["version"], opened.manifest["parent"], opened.manifest["step"]) == (1, 0, 10)
    assert torch.equal(load_file(opened.files[0])["layer.weight"], torch.ones(8, 8))
    assert opened.size_bytes == sum(path.stat().st_size for path in opened.files)


def test_a_flipped_bit_is_refused_and_the_file_is_named(store: WeightStore) -> None:
    path = write(store).files[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(IntegrityError, match=r"model-00002\.safetensors does not match"):
        store.open("job_a", 1)


def test_a_truncated_file_is_refused_and_named(store: WeightStore) -> None:
    path = write(store).files[0]
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(IntegrityError, match=r"model-00001\.safetensors holds"):
        store.open("job_a", 1)


@pytest.mark.parametrize("name", ["model-00001.safetensors", "manifest.json"])
def test_a_missing_file_is_refused_and_named(store: WeightStore, name: str) -> None:
    (write(store).path / name).unlink()

    with pytest.raises(IntegrityError, match=f"{name} is missing"):
        store.open("job_a", 1)


def test_a_shard_replaced_by_a_link_is_refused(store: WeightStore, tmp_path: Path) -> None:
    path = write(store).files[0]
    copy = tmp_path / "elsewhere"
    copy.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(copy)

    with pytest.raises(IntegrityError, match="is missing"):
        store.open("job_a", 1)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", ".hidden", "a/b"])
def test_a_manifest_cannot_lead_out_of_its_folder(store: WeightStore, name: str) -> None:
    manifest_path = write(store).path / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    manifest["files"][0]["name"] = name
    manifest_path.write_text(json.dumps(manifest))

    with pytest.raises(IntegrityError, match="unsafe file name"):
        store.open("job_a", 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": [{"name": "x"}]}'])
def test_a_malformed_manifest_is_refused(store: WeightStore, text: str) -> None:
    (write(store).path / "manifest.json").write_text(text)

    with pytest.raises(IntegrityError, match="is not a manifest"):
        store.open("job_a", 1)


def test_a_version_under_another_number_is_refused(store: WeightStore) -> None:
    write(store).path.rename(Path(store.backend.uri("job_a", 2)))

    with pytest.raises(IntegrityError, match="holds version 1, not 2"):
        store.open("job_a", 2)


@pytest.mark.parametrize("run_id", ["../job_a", "", ".", "a/b", "a\x00b"])
def test_a_run_id_that_is_no_plain_name_is_refused(store: WeightStore, run_id: str) -> None:
    with pytest.raises(InvalidInput, match="is no run id"):
        store.open(run_id, 1)


def test_a_shard_name_with_a_path_is_refused(store: WeightStore) -> None:
    shards = [("../model.safetensors", {"w": torch.ones(1)})]

    with pytest.raises(InvalidInput, match="no name for a weight shard"):
        store.write("job_a", 1, parent=0, step=1, dtype="float32", shards=shards)


def test_an_absent_version_is_not_found(store: WeightStore) -> None:
    with pytest.raises(NotFound, match="run job_a has no weight version 7"):
        store.open("job_a", 7)


def test_a_writer_that_dies_between_the_shards_leaves_nothing_visible(store: WeightStore) -> None:
    def dying() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        yield two_shards()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write("job_a", 1, parent=0, step=1, dtype="float32", shards=dying())

    assert store.versions("job_a") == []
    assert list((Path(store.backend.name) / "job_a").iterdir()) == []


def test_writing_equal_content_twice_changes_nothing(store: WeightStore) -> None:
    first = write(store)
    modified = first.files[0].stat().st_mtime_ns

    assert write(store) == first
    assert first.files[0].stat().st_mtime_ns == modified


def test_only_a_newer_epoch_replaces_a_version(store: WeightStore) -> None:
    write(store, value=1.0, epoch=1)
    write(store, value=2.0, epoch=2)

    for stale_epoch in (1, 2):
        with pytest.raises(Conflict, match="another owner"):
            write(store, value=3.0, epoch=stale_epoch)

    assert load_file(store.open("job_a", 1).files[1])["head.weight"][0] == 2.0
    assert [path.name for path in (Path(store.backend.name) / "job_a").iterdir()] == ["00000001"]


def test_a_damaged_version_can_be_written_again(store: WeightStore) -> None:
    path = write(store).files[0]
    path.write_bytes(b"")

    write(store)

    assert store.open("job_a", 1).manifest["version"] == 1


def test_the_manifest_digest_tells_different_weights_apart(tmp_path: Path) -> None:
    stores = [WeightStore(tmp_path / name) for name in ("a", "b", "c")]

    digests = [write(store, value=value).manifest_digest for store, value in zip(stores, (1.0, 1.0, 2.0), strict=True)]

    assert digests[0] == digests[1] != digests[2]


def test_prune_keeps_the_newest(store: WeightStore) -> None:
    for version in (1, 2, 3):
        write(store, version)

    store.prune("job_a", keep=2)

    assert store.versions("job_a") == [2, 3]
    assert store.versions("job_of_nobody") == []


def bf16_model(version: int) -> Shards:
    """A bfloat16 and a float32 shard; a version moves one value in fifty."""
    values = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    for number in range(1, version + 1):
        values.view(-1)[number::50] *= 1.02
    return [
        ("model-00001.safetensors", {"layer.weight": values.bfloat16(), "norm.weight": values[0].bfloat16()}),
        ("model-00002.safetensors", {"head.weight": values.clone()}),
    ]


def publish(store: WeightStore, version: int) -> StoredVersion:
    shards = bf16_model(version)
    return store.write("job_a", version, parent=version - 1, step=version, dtype="bfloat16", shards=shards)


def assert_is(opened: StoredVersion, version: int) -> None:
    tensors = {name: tensor for path in opened.files for name, tensor in load_file(path).items()}
    for _, shard in bf16_model(version):
        for name, tensor in shard.items():
            assert torch.equal(tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_deltas_in_a_shared_folder_give_back_every_bit(tmp_path: Path) -> None:
    writer = WeightStore(tmp_path / "store", cache_path=str(tmp_path / "trainer"), anchor_interval=4)
    written = {version: publish(writer, version) for version in range(1, 7)}
    assert [version for version, each in written.items() if "delta" not in each.manifest] == [1, 5]
    assert [written[version].manifest["delta"]["base"] for version in (2, 3, 4, 6)] == [1, 2, 3, 5]
    assert written[3].stored_bytes < 0.1 * written[3].size_bytes

    reader = WeightStore(tmp_path / "store", cache_path=str(tmp_path / "replica"))
    for version in (2, 3, 4, 1, 6, 2, 5):
        opened = reader.open("job_a", version)
        assert_is(opened, version)
        assert opened.manifest_digest == written[version].manifest_digest


def test_a_writer_that_lost_its_cache_publishes_a_whole_version(tmp_path: Path) -> None:
    for number in (1, 2):
        publish(WeightStore(tmp_path / "store", cache_path=str(tmp_path / "one"), anchor_interval=4), number)
    after = publish(WeightStore(tmp_path / "store", cache_path=str(tmp_path / "other"), anchor_interval=4), 3)

    assert "delta" not in after.manifest
    assert_is(after, 3)


def test_a_damaged_delta_is_refused_and_found_whole_again_once_mended(tmp_path: Path) -> None:
    writer = WeightStore(tmp_path / "store", cache_path=str(tmp_path / "trainer"), anchor_interval=4)
    for number in (1, 2, 3):
        publish(writer, number)
    delta = tmp_path / "store" / "job_a" / "00000002" / "delta-model-00001.safetensors"
    content = delta.read_bytes()
    delta.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    reader = WeightStore(tmp_path / "store", cache_path=str(tmp_path / "replica"))

    with pytest.raises(IntegrityError, match=r"delta-model-00001\.safetensors does not match"):
        reader.open("job_a", 3)
    assert_is(reader.open("job_a", 1), 1)
    delta.write_bytes(content)

    assert_is(reader.open("job_a", 3), 3)


def test_a_damaged_cache_is_fetched_anew(tmp_path: Path) -> None:
    writer = WeightStore(tmp_path / "store", cache_path=str(tmp_path / "trainer"), anchor_interval=4)
    for number in (1, 2):
        publish(writer, number)
    reader = WeightStore(tmp_path / "store", cache_path=str(tmp_path / "replica"))
    cached = reader.open("job_a", 2).files[0]
    cached.write_bytes(b"")

    assert_is(reader.open("job_a", 2), 2)


def test_cached_versions_stay_while_somebody_may_load_them(tmp_path: Path) -> None:
    writer = WeightStore(tmp_path / "store", cache_path=str(tmp_path / "trainer"), anchor_interval=20)
    for number in range(1, 9):
        publish(writer, number)
    reader = WeightStore(tmp_path / "store", cache_path=str(tmp_path / "replica"))
    held = reader.open("job_a", 3)
    for number in range(4, 9):
        reader.open("job_a", number)

    assert held.files[0].is_file()
    kept = [path.name[:8] for path in held.path.parent.iterdir() if path.name[0] == "0"]
    assert sorted(kept) == ["00000003", "00000007", "00000008"]


def test_retention_keeps_what_deltas_are_based_on(tmp_path: Path) -> None:
    writer = WeightStore(tmp_path / "store", cache_path=str(tmp_path / "trainer"), anchor_interval=3)
    for number in range(1, 9):
        publish(writer, number)

    writer.prune("job_a", keep=1, spare={2})

    assert writer.versions("job_a") == [1, 2, 7, 8]
    assert_is(WeightStore(tmp_path / "store", cache_path=str(tmp_path / "replica")).open("job_a", 8), 8)
