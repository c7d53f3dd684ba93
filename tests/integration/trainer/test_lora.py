"""A job that trains an adapter: what learns, what is published and stored, and that pi0 is the model without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.trainer.batches import MicroBatch, TrainingSample
from services.trainer.learner import Learner, Policy
from services.trainer.ranks import Ranks
from spo.model.folder import inspect_model_folder
from spo.model.logprobs import load_policy, token_logprobs
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.weights.store import WeightStore
from tests.integration.trainer.test_engine import full_step, parameters
from tests.integration.trainer.trainer_bench import STAGES, Bench, job_spec

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

TOKENS_BL = torch.arange(4, 28).reshape(2, 12)


def lora_spec(model_path: Path, *, dtype: str = "float32", **trainer: Any) -> JobSpec:
    document = job_spec(model_path, **trainer).model_dump(mode="json")
    document["model"] |= {"lora": {"rank": 4, "alpha": 8}, "dtype": dtype}
    return parse_job_spec(document)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_only_the_adapter_learns_and_is_stored_at_every_zero_stage(
    ranks: Ranks, tiny_model_path: Path, stage: int, dtype: str
) -> None:
    spec = lora_spec(tiny_model_path, dtype=dtype, zero_stage=stage, activation_checkpointing=True)
    policy = Policy(spec, ranks, (), passes=2)
    engine = policy.engine
    before = parameters(engine)

    norms = [full_step(engine), full_step(engine)]
    after = parameters(engine)
    stored = sum(tensor.numel() for name, tensor in engine.state_tensors().items() if name.startswith("master."))
    policy.close()

    assert all(norm and norm > 0 for norm in norms)
    assert all(".lora_" in name for name in after)
    assert len(after) == 2 * 2 * 7
    assert all(not torch.equal(before[name], after[name]) for name in after)
    assert {tensor.dtype for tensor in after.values()} == {getattr(torch, dtype)}
    assert stored == sum(tensor.numel() for tensor in after.values())


@pytest.mark.parametrize("stage", [1, 3])
def test_the_reference_is_the_same_model_without_its_adapter(
    ranks: Ranks, tiny_model_path: Path, trajectories: list[Any], stage: int
) -> None:
    spec = lora_spec(tiny_model_path, zero_stage=stage, reference="in_trainer")
    policy = Policy(spec, ranks, (), passes=2)
    micro_batch = MicroBatch([TrainingSample(found.trajectory, found.qhat_0, 0) for found in trajectories[:4]])
    stored_BL = policy.batch(micro_batch).reference_logprobs_BL
    for _ in range(2):
        full_step(policy.engine)

    policy.add_reference(micro_batch)
    batch = policy.batch(micro_batch)
    with torch.no_grad():
        policy_BL = policy.logprobs(batch)
    policy.close()

    torch.testing.assert_close(batch.reference_logprobs_BL, stored_BL, atol=1e-5, rtol=0)
    assert (policy_BL - stored_BL).abs().max() > 0.01


def test_a_version_is_an_adapter_that_peft_loads_and_training_goes_on_from_its_checkpoint(
    bench: Bench, ranks: Ranks, tiny_model_path: Path
) -> None:
    bench.job.spec = lora_spec(tiny_model_path, reference="in_trainer")
    bench.stop_at_step(7)
    bench.job.lapse()
    finished = bench.train_until_finished()

    store = WeightStore(bench.job.state_path / "weights")
    versions = [store.open(bench.job.run_id, version) for version in store.versions(bench.job.run_id)]
    assert not finished.error_code, finished
    assert bench.job.epoch > 1
    assert {version.base_model for version in versions} == {inspect_model_folder(tiny_model_path).model_hash}
    last = versions[-1]
    ours = Policy(bench.job.spec, ranks, last.files, passes=2)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(last.path)).eval()
    pi0 = load_policy(tiny_model_path, "float32")
    with torch.no_grad():
        mask_BL = torch.ones_like(TOKENS_BL)
        ours_BL, theirs_BL, pi0_BL = (
            token_logprobs(model, TOKENS_BL, mask_BL) for model in (ours.engine.model, theirs, pi0)
        )
    ours.close()
    torch.testing.assert_close(ours_BL, theirs_BL, atol=1e-5, rtol=0)
    assert (ours_BL - pi0_BL).abs().max() > 0.01
    whole = sum(file.stat().st_size for file in tiny_model_path.glob("*.safetensors"))
    assert last.size_bytes < whole
    assert {name.split(".")[0] for name in load_file(last.path / "adapter_model.safetensors")} == {"base_model"}


def test_every_rank_draws_the_same_adapter(ranks: Ranks, tiny_model_path: Path) -> None:
    found = []
    for noise in (0, 1):
        torch.manual_seed(noise)
        learner = Learner(ranks, lora_spec(tiny_model_path))
        found.append(parameters(learner.engine))
        learner.close()

    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
