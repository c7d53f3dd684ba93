"""Models fetched by the chart's Jobs from real servers: whole or absent, safetensors alone, the same command twice."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import obstore
import pytest
import torch
from safetensors.torch import save

from spo.errors import InvalidInput, NotFound, Unreachable
from spo.weights.download import download_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Site:
    """Files below an address, and the part of a hub's API that a snapshot needs."""

    files: dict[str, bytes]
    url: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    failures: int = 0


@pytest.fixture
def model() -> dict[str, bytes]:
    """The files of a model in two shards, and pickled weights beside them."""
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {f"layer.{at}": name for at, name in enumerate(shards)}}
    files = {
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "pytorch_model.bin": b"pickled",
    }
    return files | {name: _shard(f"layer.{at}") for at, name in enumerate(shards)}


def _shard(name: str) -> bytes:
    return save({name: torch.arange(8.0)})


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def site(model: dict[str, bytes]) -> Iterator[Site]:
    held = Site(model)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            held.asked.append((self.path, self.headers.get("Authorization", "")))
            name = self.path.rsplit("/", 1)[-1].partition("?")[0]
            if held.failures:
                held.failures -= 1
                self.send_error(503)
            elif self.path.startswith("/api/models/"):
                listed = [
                    {"type": "file", "path": each, "size": len(content), "oid": _digest(content)}
                    for each, content in held.files.items()
                ]
                whole = {"id": "own/model", "sha": COMMIT, "siblings": [{"rfilename": each} for each in held.files]}
                self.send(json.dumps(listed if "/tree/" in self.path else whole).encode(), body=body)
            elif name in held.files:
                self.send(held.files[name], body=body)
            else:
                self.send_error(404)

        def send(self, content: bytes, *, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{_digest(content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    held.url = f"http://127.0.0.1:{server.server_port}"
    yield held
    server.shutdown()
    server.server_close()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def wanted(model: dict[str, bytes]) -> set[str]:
    return {name for name in model if not name.endswith(".bin")}


def test_files_below_an_address_arrive_without_what_could_run(site: Site, tmp_path: Path) -> None:
    site.failures = 2

    assert download_model(f"{site.url}/models/own/", tmp_path / "own")

    assert names(tmp_path / "own") == wanted(site.files)
    assert not any(path.endswith(".bin") for path, _ in site.asked)
    assert oct((tmp_path / "own").stat().st_mode)[-3:] == "755"


def test_what_is_there_is_left_alone(site: Site, tmp_path: Path) -> None:
    download_model(site.url, tmp_path / "own")
    site.asked.clear()

    assert not download_model(site.url, tmp_path / "own")
    assert site.asked == []


@pytest.mark.parametrize(
    ("spoiled", "error"),
    [
        ({"config.json": None}, NotFound),
        ({"model-00002-of-00002.safetensors": None}, NotFound),
        ({"model-00002-of-00002.safetensors": b"not safetensors"}, InvalidInput),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../../etc/passwd"}}'}, InvalidInput),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "pytorch_model.bin"}}'}, InvalidInput),
        ({"config.json": b'{"auto_map": {"AutoModel": "code.Model"}}'}, InvalidInput),
    ],
)
def test_a_model_that_is_not_whole_leaves_nothing(
    site: Site, tmp_path: Path, spoiled: dict[str, bytes | None], error: type[Exception]
) -> None:
    for name, content in spoiled.items():
        if content is None:
            del site.files[name]
        else:
            site.files[name] = content

    with pytest.raises(error):
        download_model(site.url, tmp_path / "own")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_stays_away_is_named(site: Site, tmp_path: Path) -> None:
    site.failures = 1000

    with pytest.raises(Unreachable, match=r"config\.json cannot be fetched.*503"):
        download_model(site.url, tmp_path / "own")


@pytest.mark.parametrize("place", ["Qwen/Qwen2.5-0.5B", "ftp://there/x", "hf://", "/models/x"])
def test_an_address_of_another_kind_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is no place of a model"):
        download_model(place, tmp_path / "own")


def test_a_model_of_a_hub_is_asked_for_with_the_token_in_its_revision(site: Site, tmp_path: Path) -> None:
    # A process of its own: the hub's library reads its variables when it is imported.
    told = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": site.url, "HF_TOKEN": "hf_own", "HF_HOME": str(tmp_path / "cache")}
    told["HF_HUB_DISABLE_XET"] = "1"
    command = [sys.executable, "-m", "spo.weights.download", "hf://own/model@v1", str(tmp_path / "own")]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr + done.stdout
    assert names(tmp_path / "own") == wanted(site.files)
    assert any("/revision/v1" in path for path, _ in site.asked)
    assert {token for path, token in site.asked if "own/model" in path} == {"Bearer hf_own"}


def test_a_model_of_a_bucket_arrives(model: dict[str, bytes], tmp_path: Path, bucket_url: str) -> None:
    store = obstore.store.from_url(f"{bucket_url}/own", client_options={"allow_http": True})
    for name, content in model.items():
        obstore.put(store, name, content)

    assert download_model(f"{bucket_url}/own", tmp_path / "own")
    assert names(tmp_path / "own") == wanted(model)
