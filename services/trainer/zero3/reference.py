"""The reference model that the trainer holds beside the policy: run, never trained."""

from __future__ import annotations

import deepspeed
import torch
from torch import nn
from transformers import PreTrainedModel

from services.trainer.zero3.loading import Offload, free_model, offloaded


class ReferenceModel:
    """`model` computes log-probs, on every rank alike; `weights` has the parameters, which may be given other values.

    Of a model that was cut over the ranks each layer is gathered while it runs: ZeRO-3 without an optimiser.
    """

    def __init__(self, weights: PreTrainedModel, offload: Offload) -> None:
        """weights: loaded within `partitioned_loading`, or whole. offload: what it was loaded for."""
        self.weights = weights.requires_grad_(requires_grad=False)
        self.model: nn.Module = weights
        self._engine: deepspeed.DeepSpeedEngine | None = None
        if hasattr(next(weights.parameters()), "ds_tensor"):
            kept = offloaded(offload)
            parameters_on_cpu = {"offload_param": kept["offload_param"]} if "offload_param" in kept else {}
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3, **parameters_on_cpu},
                "bf16": {"enabled": weights.dtype == torch.bfloat16},
            }
            self._engine, *_ = deepspeed.initialize(model=weights, config=config, dist_init_required=False)
            self._engine.eval()
            self.model = self._engine

    def close(self) -> None:
        """Free the model."""
        if self._engine is not None:
            self._engine.destroy()
        free_model(self.weights)
        del self.weights, self.model, self._engine
