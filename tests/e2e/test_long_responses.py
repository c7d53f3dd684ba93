"""Responses of 32,000 tokens through a whole platform whose trainer's ranks hold a stretch of each.

The engine decodes them one by one: ten minutes of a core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spo.client import Client
from spo.experience.store import ExperienceStore
from spo.local.launcher import LocalPlatform
from spo.messaging.redis_client import connect
from spo.tasks.toy_tokenizer import EOS, build_tokenizer, save_tokenizer
from spo.testing.peers import check_ledger
from tests.e2e.conftest import demo_spec
from tests.support.platform import running_platform

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(2400)]

PROMPT, RESPONSE = 64, 32_000
JOB_SECONDS = 1500
SAMPLES = 2
# What a rank holds at once: two of them share a response.
STRETCH = 16_100
JOB: dict[str, Any] = {
    "model": {"max_prompt_tokens": PROMPT, "max_response_tokens": RESPONSE},
    "tasks": {"train_problems": 2, "evaluation_problems": 1},
    # All responses are wrong, and a group of equal rewards moves nothing.
    "algorithm": {
        "losses": [{"objective": "group_centred_squared"}, {"objective": "supervised", "coefficient": 0.1}],
        "beta": 0.1,
    },
    "value": None,
    "rollout": {"samples_per_prompt": SAMPLES},
    "offline": {"human_solutions": False, "keep_reference_samples": False},
    "replay": {"unit": "group", "mix": [{"source": "online", "share": 1.0}], "min_online": 2, "error_buffer": 2},
    "trainer": {
        "steps": 1,
        "batch_size": 2,
        "zero_stage": 3,
        "sequence_parallel": 2,
        "max_tokens_per_micro_batch": STRETCH,
        "activation_checkpointing": True,
        "learning_rate": 1e-4,
        "update_interval": 1,
        "checkpoint_interval": 1,
    },
    "evaluation": {"interval_steps": 1, "samples": 1, "ks": [1]},
}


@pytest.fixture
def endless_model(tmp_path: Path) -> Path:
    """A model that never ends a response: what all tokens have in common speaks against the token that does."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=PROMPT + RESPONSE,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(EOS), 0] = -20.0
    folder = tmp_path / "pi0"
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[LocalPlatform]:
    with running_platform(tmp_path, {"SPO_INFERENCE_MAX_SEQUENCES": "4"}, trainer_ranks=2) as started:
        yield started


def test_responses_longer_than_a_rank_may_hold_are_sampled_judged_kept_and_learned_from(
    platform: LocalPlatform, endless_model: Path
) -> None:
    with Client(platform.http_url, retry_seconds=120) as client:
        job_id = client.submit(demo_spec(endless_model, JOB)).id
        job = client.wait(job_id, JOB_SECONDS)
        assert job.state == "succeeded", job.failure
        series = client.metrics(job_id).series
        assert [found.version for found in client.evaluations(job_id)] == [0, 1]
        sampled = list(client.trajectories(job_id, limit=100))
    with connect(platform.redis_url) as redis:
        experience = ExperienceStore(str(platform.state_path / "experience"))
        check_ledger(redis, job_id, samples_per_prompt=SAMPLES, experience=experience)

    assert len(sampled) >= 2
    assert series["response_length/online"] == [RESPONSE] * 1
    assert series["truncated/online"] == [1.0] * 1
    # Whole rows in one forward of value-estimation, and stretches of two ranks in the trainer: the same log-probs.
    assert series["kl_to_reference"][0] == pytest.approx(0, abs=1e-3)
    assert all(norm is not None and norm > 0 for norm in series["grad_norm"])
