"""Weight versions in an S3 bucket: whole or absent, fetched once per machine, in parts, and checked before use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import obstore
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.inference.weights import PolicyVersions, reference_weights
from spo.errors import Conflict, IntegrityError, NotFound, Unreachable
from spo.testing.runs import write_model_without_weights
from spo.weights import s3_backend
from spo.weights.store import StoredVersion, WeightStore
from tests.support.s3_server import S3Server

RUN = "job_a"


@pytest.fixture
def url(bucket_url: str) -> str:
    return f"{bucket_url}/policies"


def weights_of(version: int) -> torch.Tensor:
    """Of which a version changes one in a hundred."""
    values = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    for number in range(1, version + 1):
        values.view(-1)[number::100] += 0.01 * number
    return values


def write(store: WeightStore, version: int, epoch: int = 1, shift: float = 0.0) -> StoredVersion:
    shards = [("model-00001.safetensors", {"layer.weight": weights_of(version) + shift})]
    return store.write(RUN, version, parent=version - 1, step=version, dtype="float32", shards=shards, epoch=epoch)


def tensor(version: StoredVersion) -> torch.Tensor:
    return load_file(version.files[0])["layer.weight"]


def test_a_version_published_on_one_machine_opens_on_another(url: str, tmp_path: Path) -> None:
    written = write(WeightStore(url, cache_path=str(tmp_path / "a")), 1)

    opened = WeightStore(url, cache_path=str(tmp_path / "b")).open(RUN, 1)

    assert opened.manifest_digest == written.manifest_digest
    assert opened.path.is_relative_to(tmp_path / "b")
    assert torch.equal(tensor(opened), weights_of(1))
    assert WeightStore(url).versions(RUN) == [1]


def test_the_default_cache_is_in_shared_memory_and_private(url: str, tmp_path: Path) -> None:
    write(WeightStore(url, cache_path=str(tmp_path / "a")), 1)

    opened = WeightStore(url).open(RUN, 1)

    assert opened.path.is_relative_to(f"/dev/shm/spo-weights-{os.getuid()}")
    assert opened.path.parents[1].stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
def test_a_damaged_object_is_refused_and_the_old_version_keeps_serving(url: str, tmp_path: Path, damage: str) -> None:
    writer = WeightStore(url, cache_path=str(tmp_path / "a"))
    first, second = write(writer, 1), write(writer, 2)
    write_model_without_weights(tmp_path / "model")
    save_file({"layer.weight": weights_of(0)}, tmp_path / "model" / "model.safetensors")
    versions = PolicyVersions(
        WeightStore(url, cache_path=str(tmp_path / "b")), reference_weights(tmp_path / "model", "hash")
    )
    serving = versions.resolve(RUN, 1, first.manifest_digest)
    entry = second.manifest["files"][0]
    path = f"{RUN}/00000002/{entry['blake3'][:16]}-{entry['name']}"
    bucket = obstore.store.from_url(url, client_options={"allow_http": True})
    content = bytes(obstore.get(bucket, path).bytes())
    match damage:
        case "flipped":
            obstore.put(bucket, path, bytes([*content[:-1], content[-1] ^ 1]))
        case "truncated":
            obstore.put(bucket, path, content[:-1])
        case "removed":
            obstore.delete(bucket, path)

    with pytest.raises(IntegrityError, match=r"model-00001\.safetensors"):
        versions.resolve(RUN, 2, second.manifest_digest)

    assert torch.equal(load_file(serving.paths[0])["layer.weight"], weights_of(1))
    obstore.put(bucket, path, content)
    assert versions.resolve(RUN, 2, second.manifest_digest).version == 2


def test_many_replicas_of_a_machine_download_a_version_once(s3_server: S3Server, url: str, tmp_path: Path) -> None:
    write(WeightStore(url, cache_path=str(tmp_path / "a")), 1)
    program = (
        "import sys; from spo.weights.store import WeightStore; "
        f"print(WeightStore({url!r}, cache_path={str(tmp_path / 'b')!r}).open({RUN!r}, 1).manifest_digest)"
    )
    replicas = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {replica.communicate(timeout=120)[0].strip() for replica in replicas}

    assert len(digests) == 1
    assert len(digests.pop()) == 64
    assert s3_server.requests(f"GET /{url.split('/')[2]}/", ".safetensors") == 1


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_backend, "PART_BYTES", 10)
    monkeypatch.setattr(s3_backend, "PAUSE_SECONDS", 0.0)
    content = bytes(range(95))
    asked: list[int] = []

    def read(start: int, length: int) -> bytes:
        asked.append(start)
        if start >= 50 and len(asked) < 40:
            raise OSError("the line is cut")
        return content[start : start + length]

    with pytest.raises(OSError, match="the line is cut"):
        s3_backend.download(read, len(content), tmp_path / "file")
    assert not (tmp_path / "file").exists()
    asked[:] = [-1] * 40
    s3_backend.download(read, len(content), tmp_path / "file")

    assert (tmp_path / "file").read_bytes() == content
    assert sorted(asked[40:]) == [50, 60, 70, 80, 90]


def test_only_a_newer_lease_replaces_a_version(url: str, tmp_path: Path) -> None:
    store = WeightStore(url, cache_path=str(tmp_path / "a"))
    write(store, 1, epoch=1)
    write(store, 1, epoch=1)
    newer = write(store, 1, epoch=2, shift=1.0)

    for stale in (1, 2):
        with pytest.raises(Conflict, match="another owner"):
            write(store, 1, epoch=stale, shift=2.0)

    assert WeightStore(url, cache_path=str(tmp_path / "b")).open(RUN, 1).manifest_digest == newer.manifest_digest


def test_deltas_travel_and_their_anchors_stay_until_nobody_needs_them(url: str, tmp_path: Path) -> None:
    writer = WeightStore(url, cache_path=str(tmp_path / "a"), anchor_interval=3)
    written = {version: write(writer, version) for version in range(1, 9)}
    assert ["delta" in written[version].manifest for version in range(1, 9)] == [False, True, True] * 2 + [False, True]
    assert written[2].stored_bytes < 0.1 * written[2].size_bytes

    writer.prune(RUN, keep=1, spare={3})

    late = WeightStore(url, cache_path=str(tmp_path / "b"))
    assert late.versions(RUN) == [1, 2, 3, 7, 8]
    # Forth, back and forth again: from the anchor, from what is here, and after a rollback.
    for version in (8, 3, 7, 2, 8):
        assert torch.equal(tensor(late.open(RUN, version)), weights_of(version))
    with pytest.raises(NotFound):
        late.open(RUN, 5)
    late.remove_run(RUN)
    assert late.versions(RUN) == []


def test_a_store_that_does_not_answer_is_unreachable(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    with pytest.raises(Unreachable, match="does not answer"):
        WeightStore(url).versions(RUN)


def test_pruning_at_every_push_reads_each_manifest_once(url: str, s3_server: S3Server, tmp_path: Path) -> None:
    writer = WeightStore(url, cache_path=str(tmp_path / "a"), anchor_interval=4)
    for number in range(1, 9):
        write(writer, number)
        before = s3_server.requests("GET", "/manifest.json")
        writer.prune(RUN, keep=20)

        assert s3_server.requests("GET", "/manifest.json") - before <= 1

    assert WeightStore(url).versions(RUN) == list(range(1, 9))
