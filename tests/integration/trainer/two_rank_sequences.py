"""Run by torchrun on two ranks: rows that both compute together, beside the same rows computed by each alone.

two_rank_sequences.py MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from services.trainer.batches import ForwardLimits, TrainingSample, cut_into_minibatches
from services.trainer.deepspeed_engine import SequenceGroup, leave_deepspeed, prepare_deepspeed
from services.trainer.learner import Learner
from services.trainer.ranks import Ranks, join_ranks
from spo.errors import InvalidInput
from spo.model.logprobs import ATTENTION, SharedRow, checkpoint_activations, token_logprobs
from spo.spec.job_spec import JobSpec
from spo.testing.runs import toy_spec
from spo.testing.trainer import sampled_trajectories
from tests.unit.model.test_packing import LENGTHS, padded, random_model

# By name: a model type, its changed fields, and whether its layers run again in the backward pass (and how).
MODELS: dict[str, tuple[str, dict[str, Any], bool | None]] = {
    "llama": ("llama", {}, None),
    "one head of keys": ("llama", {"num_key_value_heads": 1}, None),
    "windows": ("mistral", {}, None),
    "windows, one head of keys": ("mistral", {"num_key_value_heads": 1}, None),
    "experts": ("qwen3_moe", {}, None),
    "gemma": ("gemma3_text", {}, None),
    "layers run again": ("qwen3", {}, False),
    "layers run again, as at stage 3": ("qwen3", {}, True),
}
# What both compute together, by name, beside the same steps by each alone.
JOBS: dict[str, dict[str, Any]] = {
    "stage 0": {"trainer": {"zero_stage": 0}},
    "stage 1": {"trainer": {"zero_stage": 1}},
    "stage 3 with a reference of its own": {"trainer": {"zero_stage": 3, "reference": "in_trainer"}},
    "an adapter": {"trainer": {"zero_stage": 1}, "model": {"lora": {"rank": 4}}},
}
MOST_TOKENS = 40


def logprobs_and_gradients(
    model: nn.Module, ids_BL: Tensor, mask_BL: Tensor, shared: SharedRow | None
) -> tuple[Tensor, Tensor]:
    """The loss is no sum over tokens, as a residual's square is none."""
    model.zero_grad()
    # Prompts of most rows, so that a stretch may hold nothing that is wanted.
    wanted_BL = torch.arange(ids_BL.shape[1])[None] >= torch.arange(ids_BL.shape[0])[:, None]
    logprobs_BL = token_logprobs(model, ids_BL, mask_BL, wanted_BL, shared)
    (logprobs_BL.sum(dim=1) + 3).square().mean().backward()
    return logprobs_BL.detach(), torch.cat([found.grad.flatten() for found in model.parameters()])


def differences(shared: SequenceGroup, name: str) -> dict[str, float]:
    """Largest differences of log-probs (nats) and of gradients (a share of the largest) from those of one rank."""
    model_type, fields, reentrant = MODELS[name]
    model = random_model(model_type, ATTENTION, **fields)
    ids_BL, mask_BL = padded(LENGTHS)
    # The branches of an episode are numbered.
    mask_BL[3, 12:30] = 2
    alone = logprobs_and_gradients(model, ids_BL, mask_BL, None)
    if reentrant is not None:
        assert checkpoint_activations(model, reentrant=reentrant)
    together = logprobs_and_gradients(model, ids_BL, mask_BL, shared)
    own = float((together[1] - alone[1]).abs().max() / alone[1].abs().max())
    dist.all_reduce(together[1])
    return {
        "logprobs": float((together[0] - alone[0]).abs().max()),
        "gradients": float((together[1] - alone[1]).abs().max() / alone[1].abs().max()),
        "of one rank": own,
    }


def spec_for(path: Path, width: int, trainer: dict[str, Any], **sections: dict[str, Any]) -> JobSpec:
    """Of a job whose batch is several forwards, each of which `width` ranks compute together."""
    small = {"batch_size": 8, "warmup_steps": 0, "max_tokens_per_micro_batch": MOST_TOKENS}
    return toy_spec(
        {
            "model": {"path": str(path), **sections.get("model", {})},
            "trainer": {**small, "sequence_parallel": width, **trainer},
        }
    )


def learned(ranks: Ranks, spec: JobSpec, rows: list[TrainingSample]) -> tuple[dict[str, float], Tensor, int]:
    """What two steps measured, the parameters after them, and the tokens of this rank's largest forward."""
    width = spec.trainer.sequence_parallel
    learner = Learner(ranks, spec)
    limits = ForwardLimits.of(spec.trainer, packed=learner.packed)
    shares = cut_into_minibatches(rows, 1, ranks.world_size // width, limits, whole_groups=False)
    share = shares[ranks.rank // width]
    most = 0

    def note(_module: nn.Module, given: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal most
        most = max(most, (kwargs["input_ids"] if "input_ids" in kwargs else given[0]).shape[1])

    learner.engine.model.register_forward_pre_hook(note, with_kwargs=True)
    metrics = {
        f"{number}/{name}": value for number in (1, 2) for name, value in learner.learn(share, 1e-2).metrics.items()
    }
    parameters = torch.cat([tensor.flatten().clone() for _, tensor in learner.engine.full_parameters()])
    learner.close()
    return metrics, parameters, most


def refusal(ranks: Ranks, spec: JobSpec) -> str:
    try:
        Learner(ranks, spec).close()
    except InvalidInput as error:
        return f"{error.code}: {error.message}"
    return ""


def main(model: Path, folder: Path) -> None:
    ranks = join_ranks(timeout_seconds=60)
    prepare_deepspeed(folder)
    shared = SequenceGroup(ranks, 2)
    found: dict[str, Any] = {"models": {name: differences(shared, name) for name in MODELS}}
    rows = [
        TrainingSample(each.trajectory, each.qhat_0, index // 4)
        for index, each in enumerate(sampled_trajectories(model, 8))
    ]
    for name, sections in JOBS.items():
        alone, together = (learned(ranks, spec_for(model, width, **sections), rows) for width in (1, 2))
        found[name] = {
            "metrics": {curve: [alone[0][curve], value] for curve, value in together[0].items()},
            "parameters": float((alone[1] - together[1]).abs().max()),
            "most tokens": together[2],
        }
    found["refused"] = refusal(ranks, spec_for(model, 3, {}))
    (folder / f"sequences-{ranks.rank}.json").write_text(json.dumps(found))
    leave_deepspeed()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
