"""Each field of DeepSpeed that `deepspeed_fields` reads is there, in the version that it was read in."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from services.trainer.deepspeed_engine import DeepSpeedEngine, partitioned_loading
from services.trainer.deepspeed_fields import READ_IN, SHARED_MEMORY_OP, is_cut, put_values
from services.trainer.ranks import Ranks
from spo.model.folder_names import whole_shape
from spo.model.logprobs import load_policy, token_logprobs
from spo.spec.job_spec import TrainerSpec

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

TOKENS_BL = torch.arange(4, 28).reshape(2, 12)

# Where a name stands that is no field of an optimiser.
NAMES = (
    ("deepspeed.ops", "__compatible_ops__"),
    ("deepspeed.runtime.zero.parameter_offload", "FWD_MODULE_STACK"),
    ("deepspeed.runtime.zero.stage_1_and_2", "INITIAL_MICRO_STEP_ID"),
    ("deepspeed.runtime.zero.partition_parameters", "ZeroParamStatus"),
)
# Field of the optimiser -> stages that have it.
FIELDS = {
    "optimizer": (1, 2, 3),
    "param_groups": (0, 1, 2, 3),
    "single_partition_of_fp32_groups": (1, 2),
    "update_lp_params": (1, 2),
    "all_grad_tensors": (1, 2),
    "micro_step_id": (1, 2),
    "averaged_gradients": (1, 2, 3),
    "fp32_partitioned_groups_flat": (3,),
    "fp16_partitioned_groups_flat": (3,),
    "fp16_groups": (3,),
    "_reassign_or_swap_out_partitioned_parameters": (3,),
}
OF_A_CUT_PARAMETER = ("ds_tensor", "ds_shape", "ds_status", "ds_zero_partition_rank", "partition")


@contextmanager
def engine_for(path: Path, stage: int) -> Iterator[DeepSpeedEngine]:
    engine = DeepSpeedEngine(load_policy(path, "float32"), TrainerSpec(zero_stage=stage), passes=1)
    yield engine
    engine.close()


def learn(engine: DeepSpeedEngine) -> None:
    engine.backward(-token_logprobs(engine.model, TOKENS_BL, torch.ones_like(TOKENS_BL)).mean(), last=True)
    assert engine.step(learning_rate=1e-2)


def weights(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_parameters()}


def test_the_fields_were_read_in_the_version_that_is_installed() -> None:
    assert deepspeed.__version__.partition("+")[0] == READ_IN


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_name_that_no_document_promises_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_operation_that_is_left_out_has_its_name() -> None:
    assert SHARED_MEMORY_OP in deepspeed.ops.__compatible_ops__


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_optimiser_of_a_stage_has_its_fields(ranks: Ranks, tiny_model_path: Path, stage: int) -> None:
    with engine_for(tiny_model_path, stage) as engine:
        made = engine._optimizer._made
        assert [field for field, stages in FIELDS.items() if stage in stages and not hasattr(made, field)] == []


@pytest.mark.parametrize("field", OF_A_CUT_PARAMETER)
def test_a_cut_parameter_has_the_field(ranks: Ranks, tiny_model_path: Path, field: str) -> None:
    with partitioned_loading(torch.float32, on_cpu=True):
        model = load_policy(tiny_model_path, "float32")
    found: Any = next(model.parameters())
    assert is_cut(found)
    assert hasattr(found, field)
    assert whole_shape(found).numel() == found.ds_numel


def test_values_put_into_a_cut_parameter_are_its_own_part(ranks: Ranks, tiny_model_path: Path) -> None:
    with partitioned_loading(torch.float32, on_cpu=True):
        model = load_policy(tiny_model_path, "float32")
    name, found = next(iter(model.named_parameters()))
    wanted = torch.randn(whole_shape(found))
    with torch.no_grad():
        put_values(found, wanted)
    with deepspeed.zero.GatheredParameters([found]):
        assert torch.equal(found.detach(), wanted), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_put_into_the_masters_is_what_the_model_computes_with(
    ranks: Ranks, tiny_model_path: Path, stage: int
) -> None:
    with engine_for(tiny_model_path, stage) as engine:
        before = weights(engine)
        learn(engine)
        learned = weights(engine)
        optimizer = engine._optimizer
        assert sum(master.numel() for master in optimizer.masters()) >= sum(found.numel() for found in before.values())
        assert any(not torch.equal(before[name], learned[name]) for name in before)
        with torch.no_grad():
            for master in optimizer.masters():
                master.fill_(0.25)
        optimizer.spread_masters()
        assert all(torch.all(found == 0.25) for found in weights(engine).values())
