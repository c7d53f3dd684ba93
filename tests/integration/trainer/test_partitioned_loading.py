"""At ZeRO stage 3 a model is cut over the ranks as it is read, and computes what it computes when loaded whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, core_model_loading

from services.trainer.critic import Critic
from services.trainer.deepspeed_engine import ONE_BY_ONE, SETTER, TAKEN, SetParameter, parameters_set_by, take_weights
from services.trainer.learner import Policy, load_model
from services.trainer.ranks import Ranks
from spo.errors import IntegrityError, PreconditionFailed
from spo.model.logprobs import load_policy, token_logprobs
from spo.spec.job_spec import JobSpec, parse_job_spec
from tests.integration.trainer.two_rank_faults import PPO
from tests.integration.trainer.two_rank_loading import TOKENS_BL

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

LIMIT_SECONDS = 240
SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
# By type and whether input and output embeddings are one; experts are stored one by one and held stacked.
KINDS = [("llama", False), ("llama", True), ("qwen3", True), ("gemma3_text", True), ("mixtral", False)]


def write_model(folder: Path, config: PreTrainedConfig, dtype: torch.dtype, seed: int = 0) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def spec_of(model: Path, dtype: str = "float32", **changes: Any) -> JobSpec:
    trainer = {"zero_stage": 3, **changes.pop("trainer", {})}
    return parse_job_spec({"model": {"path": str(model), "dtype": dtype}, "trainer": trainer, **changes})


def plain_logprobs(model: Path, dtype: str = "float32", weights: Path | None = None) -> Tensor:
    loaded = load_policy(model, dtype)
    if weights:
        take_weights(loaded, [weights])
    with torch.no_grad():
        return token_logprobs(loaded, TOKENS_BL, torch.ones_like(TOKENS_BL))


@contextmanager
def policy_of(spec: JobSpec, ranks: Ranks, start: list[Path]) -> Iterator[Policy]:
    policy = Policy(spec, ranks, start, passes=1)
    yield policy
    policy.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_log_probs_are_those_of_a_model_loaded_whole(
    ranks: Ranks, tmp_path: Path, kind: str, tied: bool, dtype: str
) -> None:
    config = AutoConfig.for_model(kind, **SHAPE, tie_word_embeddings=tied)
    model = write_model(tmp_path / "model", config, torch.bfloat16)
    mask_BL = torch.ones_like(TOKENS_BL)

    with policy_of(spec_of(model, dtype, trainer={"reference": "in_trainer"}), ranks, []) as policy, torch.no_grad():
        parameters = list(policy.engine.model.module.parameters())
        assert all(hasattr(parameter, "ds_tensor") for parameter in parameters)
        found = token_logprobs(policy.engine.model, TOKENS_BL, mask_BL)
        reference = policy.reference_logprobs(TOKENS_BL, mask_BL, mask_BL.bool())

    assert torch.equal(found, plain_logprobs(model, dtype))
    assert torch.equal(reference, found)


def test_it_begins_with_published_weights_and_its_reference_takes_them_too(ranks: Ranks, tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **SHAPE)
    model = write_model(tmp_path / "model", config, torch.float32)
    other = write_model(tmp_path / "other", config, torch.float32, seed=1) / "model.safetensors"
    mask_BL = torch.ones_like(TOKENS_BL)

    with policy_of(spec_of(model, trainer={"reference": "in_trainer"}), ranks, [other]) as policy, torch.no_grad():
        assert torch.equal(
            token_logprobs(policy.engine.model, TOKENS_BL, mask_BL), plain_logprobs(model, weights=other)
        )
        before = policy.reference_logprobs(TOKENS_BL, mask_BL, mask_BL.bool())
        policy.set_reference([other])
        after = policy.reference_logprobs(TOKENS_BL, mask_BL, mask_BL.bool())

    assert torch.equal(before, plain_logprobs(model))
    assert torch.equal(after, plain_logprobs(model, weights=other))


def test_weights_of_another_model_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", AutoConfig.for_model("llama", **SHAPE), torch.float32)
    save_file({"lm_head.weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")

    with pytest.raises(IntegrityError, match=r"lm_head.weight as \(3, 3\), not \(199, 64\)"):
        take_weights(load_model(spec_of(model), ranks.device), [tmp_path / "other.safetensors"])


def test_the_critic_learns_from_a_body_that_was_cut(ranks: Ranks, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", AutoConfig.for_model("llama", **SHAPE), torch.float32)
    spec = spec_of(model, **PPO)
    critic = Critic(load_model(spec, ranks.device), spec.algorithm, spec.trainer, 1)

    values_BL = critic.engine.model(TOKENS_BL, torch.ones_like(TOKENS_BL))
    critic.engine.backward((values_BL - 1).square().mean(), last=True)

    assert critic.step(1.0)
    assert critic.engine.model(TOKENS_BL, torch.ones_like(TOKENS_BL)).abs().sum() > 0
    critic.close()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_two_ranks_hold_half_of_the_model_each_and_never_more_than_a_tensor_beside_it(tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7, "num_attention_heads": 8}
    config = AutoConfig.for_model("llama", vocab_size=32_000, tie_word_embeddings=True, **shape)
    model = write_model(tmp_path / "model", config, torch.float32)
    other = tmp_path / "other.safetensors"
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor * (0.5 if "layers" in name else 1) for name, tensor in tensors.items()}, other)
    program = Path(__file__).with_name("two_rank_loading.py")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1"]
    arguments = [str(program), str(model), str(other), str(tmp_path)]
    subprocess.run([sys.executable, *launcher, *arguments], check=True, timeout=LIMIT_SECONDS)

    for rank in range(2):
        memory = json.loads((tmp_path / f"memory-{rank}.json").read_text())
        assert memory["whole"] > 450e6
        assert memory["loaded"] < 0.65 * memory["whole"]
        # Beside its half the one tensor that is read and not cut yet.
        assert memory["peak"] < 0.55 * memory["whole"] + max(tensor.nbytes for tensor in tensors.values())
        found = load_file(tmp_path / f"logprobs-{rank}.safetensors")
        expected, other_expected = plain_logprobs(model), plain_logprobs(model, weights=other)
        assert torch.equal(found["reference"], expected)
        assert torch.equal(found["policy"], other_expected)
        assert torch.equal(found["refreshed"], other_expected)


def test_transformers_is_as_before_after_a_model_was_cut_or_could_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONE_BY_ONE, "as before")
    own: SetParameter = getattr(core_model_loading, SETTER)

    found: list[object] = []

    def load() -> None:
        with parameters_set_by(lambda _: lambda *_: None):
            found.extend((getattr(core_model_loading, SETTER), os.environ[ONE_BY_ONE]))
            raise KeyError("torn")

    with pytest.raises(KeyError, match="torn"):
        load()

    assert found[0] is not own
    assert found[1] == "1"
    assert getattr(core_model_loading, SETTER) is own
    assert os.environ[ONE_BY_ONE] == "as before"


@pytest.mark.parametrize("other", [None, lambda model, name: None])
def test_another_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, other: SetParameter | None) -> None:
    monkeypatch.setattr(core_model_loading, SETTER, other)

    said = rf"transformers \d.* has no {SETTER}.{', '.join(TAKEN)}"
    with pytest.raises(PreconditionFailed, match=said) as refused, parameters_set_by(lambda own: own):
        pytest.fail("it went on")

    assert refused.value.code == "transformers_unsupported"
    assert getattr(core_model_loading, SETTER) is other
