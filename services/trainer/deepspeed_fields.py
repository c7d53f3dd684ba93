"""What is read of DeepSpeed that its documents do not promise: each such field stands in this file and nowhere else.

Read in DeepSpeed 0.19.8 (`READ_IN`). tests/integration/trainer/test_deepspeed_fields.py reads each field at each ZeRO
stage that has it and fails with its name, so a new version of DeepSpeed is taken by making that test pass. `ds_shape`
of a cut parameter is the exception: what knows models without DeepSpeed reads it too, in `spo.model.folder_names`.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import deepspeed
import deepspeed.ops
import torch
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from torch import Size, Tensor, nn

from spo.errors import PreconditionFailed
from spo.model.folder_names import whole_shape

READ_IN = "0.19.8"

# The operation that `init_distributed` compiles when it is there.
SHARED_MEMORY_OP = "deepspeed_shm_comm"


class CutParameter(Protocol):
    """A parameter that ZeRO-3 has cut. ds_tensor: this rank's part, flat. ds_status: whether the whole is here."""

    ds_tensor: Tensor
    ds_shape: Size
    ds_status: ZeroParamStatus
    ds_zero_partition_rank: int

    def partition(self) -> None:
        """Free the whole, keep this rank's part."""


def is_cut(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has cut this parameter over the ranks."""
    return hasattr(parameter, "ds_tensor")


def cut(zero: deepspeed.zero.Init, parameter: nn.Parameter) -> None:
    """Cut a parameter that every rank has read: what `Init` does, without rank 0's values being sent."""
    zero._convert_to_deepspeed_param(parameter)
    cast(CutParameter, parameter).partition()


def put_values(parameter: Tensor, values: Tensor) -> None:
    """Give a parameter or buffer other values, whole on the CPU or mapped from a file; of one that is cut, our part."""
    if not is_cut(parameter):
        parameter.copy_(values)
        return
    found = cast(CutParameter, parameter)
    part = found.ds_tensor
    start = found.ds_zero_partition_rank * part.numel()
    own = values.flatten()[start : start + part.numel()]
    part[: own.numel()].copy_(own)
    # Small ones stay gathered between forwards: with what they were.
    if found.ds_status == ZeroParamStatus.AVAILABLE:
        found.partition()


def free_model(model: nn.Module) -> None:
    """Free what the parameters of a model hold; it is of no use afterwards."""
    # ZeRO-3 leaves modules on a global stack and objects behind hooks held in C++, where no gc looks: what those hold
    # is freed here, their empty shells stay.
    FWD_MODULE_STACK.clear()
    for parameter in model.parameters():
        vars(parameter).clear()
        parameter.data = torch.empty(0)


def leave_out_shared_memory_op() -> None:
    """Before `init_distributed`, which compiles it for a minute; a build killed half-way blocks later starts."""
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False


class ZeroOptimizer:
    """What `deepspeed.initialize` made of torch's optimiser at a ZeRO stage: `adam`, its weights and gradients.

    Raises PreconditionFailed for a stage that there is not.
    """

    def __init__(self, stage: int, made: object) -> None:
        if stage not in range(4):
            raise PreconditionFailed(f"there is no ZeRO stage {stage}")
        self.stage = stage
        self._made: Any = made

    @property
    def adam(self) -> torch.optim.Optimizer:
        """Torch's own, with the moments."""
        optimizer: torch.optim.Optimizer = self._made.optimizer if self.stage else self._made
        return optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As of torch's optimisers; what is set here counts from the next step on."""
        groups: list[dict[str, Any]] = self._made.param_groups
        return groups

    def masters(self) -> list[Tensor]:
        """The fp32 weights of this rank: whole parameters at stage 0, flat parts of parameter groups else."""
        match self.stage:
            case 0:
                return [parameter for group in self.adam.param_groups for parameter in group["params"]]
            case 1 | 2:
                return list(self._made.single_partition_of_fp32_groups)
            case _:
                return list(self._made.fp32_partitioned_groups_flat)

    def share_masters(self) -> None:
        """At stage 3, of float32 weights: keep them once, as weights and fp32 weights alike.

        DeepSpeed means to, but compares a device with its name and copies them.
        """
        for master, weights in zip(self.masters(), self._made.fp16_partitioned_groups_flat, strict=True):
            if master.device == weights.device:
                master.data = weights.data

    def spread_masters(self) -> None:
        """Bring the model's parameters in line with the fp32 weights of all ranks."""
        if self.stage == 3:
            for group in range(len(self.masters())):
                self._made._reassign_or_swap_out_partitioned_parameters(group)
        elif self.stage:
            self._made.update_lp_params()

    def parameter_sizes(self) -> list[int]:
        """At stage 3: values of each parameter, in the order in which the flat parts have them."""
        return [whole_shape(found).numel() for group in self._made.fp16_groups for found in group]

    def forget_gradients(self) -> None:
        """From stage 1 on: what `backward` accumulated is as if it had never been."""
        self._made.zero_grad()
        self._made.averaged_gradients = {}
        if self.stage < 3:
            self._made.all_grad_tensors = {}
            # The next gradients replace what the CPU keeps of these, as after a step.
            self._made.micro_step_id = INITIAL_MICRO_STEP_ID

    def close(self) -> None:
        """Free the weights, the moments and the gradients."""
        adam = self.adam
        adam.state.clear()
        adam.param_groups.clear()
        vars(self._made).clear()
