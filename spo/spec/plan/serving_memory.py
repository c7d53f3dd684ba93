"""What an inference replica and value-estimation hold on one device, and what a job writes, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from spo.spec.job_spec import JobSpec
from spo.spec.plan.shapes import ModelShape
from spo.spec.plan.trainer_memory import FLOAT, LOGITS_BLOCK_BYTES, LOGITS_COPIES, bytes_of, longest, trained_parameters

# vLLM's gpu_memory_utilization, and what its graphs and workspace take of that.
ENGINE_SHARE, ENGINE_WORKSPACE_BYTES = 0.9, 3 << 30
# Sequences of full length that an engine should hold at once, to be worth its device.
FEWEST_SEQUENCES = 16
# Tokens of one forward of value-estimation.
SCORED_TOKENS = 16_384


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes on each of `tensor_parallel` devices; kv_cache is what is left for it, sequences what it holds."""

    tensor_parallel: int
    weights: int
    kv_cache: int
    sequences: int

    @property
    def fits(self) -> bool:
        """Whether enough sequences of full length are sampled at once."""
        return self.sequences >= FEWEST_SEQUENCES


def inference_memory(spec: JobSpec, shape: ModelShape, device_bytes: int, tensor_parallel: int) -> InferenceMemory:
    """One replica over so many devices."""
    width = bytes_of(spec.model.dtype)
    weights = width * shape.parameters // tensor_parallel
    if spec.model.lora:
        weights += width * trained_parameters(spec, shape)
    # Heads are cut over the devices until each has one.
    heads = max(1, shape.kv_heads // tensor_parallel)
    per_token = 2 * width * shape.layers * heads * shape.head_size
    cache = max(0, int(ENGINE_SHARE * device_bytes) - weights - ENGINE_WORKSPACE_BYTES)
    return InferenceMemory(tensor_parallel, weights, cache, cache // (per_token * longest(spec)))


def value_memory(spec: JobSpec, shape: ModelShape) -> int:
    """The reference on one device, and the forward of a batch without gradients."""
    width = bytes_of(spec.model.dtype)
    layer = width * (8 * shape.hidden + 3 * shape.intermediate) + FLOAT * shape.hidden
    tokens = max(SCORED_TOKENS, longest(spec))
    return width * shape.parameters + tokens * layer + LOGITS_COPIES * LOGITS_BLOCK_BYTES


def push_bytes(spec: JobSpec, shape: ModelShape) -> int:
    """Of one weight version: all weights, or the adapter."""
    return bytes_of(spec.model.dtype) * trained_parameters(spec, shape)


def checkpoint_bytes(spec: JobSpec, shape: ModelShape) -> int:
    """Of one checkpoint over all ranks: float32 weights and both moments of what is trained, and the critic's."""
    return (2 if spec.algorithm.critic else 1) * 3 * FLOAT * trained_parameters(spec, shape)
