"""Models that are cut over the ranks as their files are read: no rank ever holds one whole, in memory or on a device.

transformers builds the model without memory and sets its parameters one by one, mapped from safetensors files. Each is
cut at that moment, and a rank touches only its own stretch of the file.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, cast

import deepspeed
import torch
import transformers
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Size, Tensor, nn
from transformers import PreTrainedModel, core_model_loading
from transformers.quantizers.base import HfQuantizer
from transformers.utils.loading_report import LoadStateDictInfo

from spo.errors import PreconditionFailed

# With threads transformers reads ahead, and what is converted to another dtype is in memory whole.
ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
# The function of transformers.core_model_loading that gives a module a parameter, and what it takes.
SETTER = "set_param_for_module"
TAKEN = ("model", "target_name", "param_value", "loading_info", "hf_quantizer")

SetParameter = Callable[[PreTrainedModel, str, Tensor, LoadStateDictInfo, HfQuantizer], None]

Offload = Literal["none", "optimizer", "optimizer_and_parameters"]


def offloaded(offload: Offload) -> dict[str, object]:
    """The part of DeepSpeed's `zero_optimization` that says what the CPU's memory holds."""
    on_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    names = {"none": (), "optimizer": ("offload_optimizer",)}.get(offload, ("offload_optimizer", "offload_param"))
    return dict.fromkeys(names, on_cpu)


@contextmanager
def partitioned_loading(dtype: torch.dtype, *, on_cpu: bool) -> Iterator[None]:
    """Within, `from_pretrained` gives models whose parameters are cut, a part on each rank.

    All ranks load the same files; nothing is sent between them. on_cpu: parts stay in the CPU's memory, else they are
    on the device of the rank.
    """
    # An empty module: DeepSpeed then takes its linear layer that keeps no gathered weights for the backward pass.
    zero = deepspeed.zero.Init(
        nn.Module(),
        dtype=dtype,
        remote_device="cpu" if on_cpu else None,
        pin_memory=on_cpu and torch.cuda.is_available(),
    )

    def cutting(set_parameter: SetParameter) -> SetParameter:
        def set_and_cut(
            model: PreTrainedModel, target_name: str, values: Tensor, info: LoadStateDictInfo, quantizer: HfQuantizer
        ) -> None:
            set_parameter(model, target_name, values, info, quantizer)
            owner, _, own_name = target_name.rpartition(".")
            parameter = model.get_submodule(owner)._parameters.get(own_name)
            if parameter is not None and not parameter.is_meta:
                _cut(zero, parameter)

        return set_and_cut

    with parameters_set_by(cutting):
        yield


@contextmanager
def parameters_set_by(changed: Callable[[SetParameter], SetParameter]) -> Iterator[None]:
    """Within, transformers reads parameters one by one and sets each by what `changed` makes of its own function.

    Raises PreconditionFailed (code "transformers_unsupported") where transformers has no such function.
    """
    own = getattr(core_model_loading, SETTER, None)
    if own is None or tuple(inspect.signature(own).parameters) != TAKEN:
        raise PreconditionFailed(
            f"transformers {transformers.__version__} has no {SETTER}({', '.join(TAKEN)}) in core_model_loading, which "
            "loading at trainer.zero_stage 3 goes through",
            code="transformers_unsupported",
        )
    before = os.environ.get(ONE_BY_ONE)
    setattr(core_model_loading, SETTER, changed(own))
    os.environ[ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        setattr(core_model_loading, SETTER, own)
        if before is None:
            del os.environ[ONE_BY_ONE]
        else:
            os.environ[ONE_BY_ONE] = before


def _cut(zero: deepspeed.zero.Init, parameter: nn.Parameter) -> None:
    # What `Init` does to a parameter, without rank 0's values being sent: every rank has read its own.
    zero._convert_to_deepspeed_param(parameter)
    cast(CutParameter, parameter).partition()


class CutParameter(Protocol):
    """What DeepSpeed makes of a parameter that it cuts, as far as it is used here."""

    ds_tensor: Tensor
    ds_shape: Size
    ds_status: ZeroParamStatus
    ds_zero_partition_rank: int

    def partition(self) -> None:
        """Free the whole, keep this rank's part."""


def _as_cut(parameter: nn.Parameter) -> CutParameter | None:
    return cast(CutParameter, parameter) if hasattr(parameter, "ds_tensor") else None


def put_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, whole on the CPU or mapped from a file; of one that is cut, this rank's part."""
    cut = _as_cut(parameter)
    if cut is None:
        parameter.copy_(values)
        return
    part = cut.ds_tensor
    start = cut.ds_zero_partition_rank * part.numel()
    own = values.flatten()[start : start + part.numel()]
    part[: own.numel()].copy_(own)
    # Small ones stay gathered between forwards: with what they were.
    if cut.ds_status == ZeroParamStatus.AVAILABLE:
        cut.partition()


def whole_shape(parameter: Tensor) -> Size:
    """The shape of a parameter, whether it is cut or not."""
    shape: Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def free_model(model: nn.Module) -> None:
    """Give back what the parameters of a model hold; it is of no use afterwards."""
    # ZeRO-3 leaves modules on a global stack and objects behind hooks held in C++, where no gc looks: what those hold
    # is freed here, their empty shells stay.
    FWD_MODULE_STACK.clear()
    for parameter in model.parameters():
        vars(parameter).clear()
        parameter.data = torch.empty(0)
