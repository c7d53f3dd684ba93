"""A trained model is downloaded over REST and loads with plain `from_pretrained`; only by those whose job it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from spo.client import Client
from spo.errors import InternalError, NotFound
from spo.spec.job_spec import parse_job_spec
from spo.tasks.toy_tokenizer import build_tokenizer, save_tokenizer
from tests.support import command_line

OPERATOR_KEY = "the-operators-own-key"


@pytest.fixture
def context(open_context: Callable[..., AppContext]) -> AppContext:
    return open_context(api_key=OPERATOR_KEY)


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(build_tokenizer()), max_position_embeddings=64, **shape))


@pytest.fixture
def trained() -> LlamaForCausalLM:
    return model(seed=1)


@pytest.fixture
def job_id(context: AppContext, document: dict[str, Any], tmp_path: Path, trained: LlamaForCausalLM) -> str:
    """A job of the tenant red that has published version 1."""
    pi0 = tmp_path / "tiny"
    model(seed=0).save_pretrained(pi0)
    save_tokenizer(pi0)
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(pi0)
    job_id = context.jobs.submit(parse_job_spec(document | {"model": {"path": str(pi0)}}), tenant="red")
    shard = ("model-00001.safetensors", {name: each.clone() for name, each in trained.state_dict().items()})
    stored = context.weight_store.write(job_id, 1, parent=0, step=10, dtype="float32", shards=[shard])
    told = {"version": 1, "step": 10, "uri": stored.uri, "manifest_digest": stored.manifest_digest}
    record = json.dumps(told | {"size_bytes": stored.size_bytes, "published_at": "2026-01-01T00:00:00Z"})
    context.redis.hset(own_keys.job_weights(job_id), "1", record)
    return job_id


def test_plain_from_pretrained_takes_what_was_downloaded(
    context: AppContext, api: httpx.Client, job_id: str, trained: LlamaForCausalLM, tmp_path: Path
) -> None:
    with Client(str(api.base_url), OPERATOR_KEY) as client:
        folder = client.download_weights(job_id, 1, tmp_path / "got")

    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("print", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(loaded(ids).logits, trained(ids).logits)
    assert loaded.generation_config.temperature == 0.25
    assert list((context.settings.state_path / "downloads").iterdir()) == []


def test_the_command_takes_the_newest_or_the_version_that_is_named(
    api: httpx.Client, job_id: str, tmp_path: Path
) -> None:
    environment = {"SPO_API_URL": str(api.base_url), "SPO_API_KEY": OPERATOR_KEY}
    codes = [
        command_line.spo("weights", "export", job_id, *places, environment=environment, folder=tmp_path).returncode
        for places in (["newest"], ["1", "named"], ["2", "absent"], ["one", "absent"])
    ]
    # The name that it had before, with its option.
    older = ("export", job_id, "older", "--version", "1")
    codes.append(command_line.spo(*older, environment=environment, folder=tmp_path).returncode)

    assert codes == [0, 0, 4, 2, 0]
    newest, named, as_before = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("newest", "named", "older")
    )
    assert newest == named == as_before
    assert not (tmp_path / "absent").exists()


def test_only_the_jobs_own_tenant_may_download(context: AppContext, api: httpx.Client, job_id: str) -> None:
    tokens = [context.authenticator.keys.create("k", tenant, ("jobs:read",))[1] for tenant in ("red", "blue")]
    tokens.append(context.authenticator.keys.create("k", "red", ("jobs:write",))[1])
    path = f"/v1/jobs/{job_id}/weights/1/download"

    found = [api.get(path, headers={"Authorization": f"Bearer {token}"}).status_code for token in tokens]

    assert [*found, api.get(path).status_code] == [200, 404, 403, 401]


def test_a_damaged_version_is_not_sent(context: AppContext, api: httpx.Client, job_id: str, tmp_path: Path) -> None:
    with Client(str(api.base_url), OPERATOR_KEY) as client:
        with pytest.raises(NotFound):
            client.download_weights(job_id, 2, tmp_path / "got")
        (file,) = context.weight_store.open(job_id, 1).files
        file.write_bytes(b"other" + file.read_bytes()[5:])
        with pytest.raises(InternalError) as refused:
            client.download_weights(job_id, 1, tmp_path / "got")

    assert refused.value.code == "integrity"
    assert not (tmp_path / "got").exists()
