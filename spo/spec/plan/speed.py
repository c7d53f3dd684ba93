"""Tokens per second by a stated model: what to expect within a factor of two, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from spo.spec.job_spec import JobSpec
from spo.spec.plan.serving_memory import InferenceMemory
from spo.spec.plan.shapes import ModelShape
from spo.spec.plan.trainer_memory import bytes_of, longest, recomputes

# Sequences beyond which an engine computes rather than reads memory.
MOST_SEQUENCES = 256


@dataclass(frozen=True)
class Device:
    """One accelerator, an H100 unless told: memory, bf16 peak and bandwidth, and the share of each that is reached."""

    memory_bytes: int = 80 * 10**9
    flops: float = 989e12
    bandwidth: float = 3.35e12
    training_share: float = 0.35
    reading_share: float = 0.6


def training_tokens(spec: JobSpec, shape: ModelShape, device: Device, ranks: int) -> float:
    """Tokens per second of the trainer: 6 operations a weight and token, 8 with recomputation, 2 less with LoRA."""
    operations = (8 if recomputes(spec, shape) else 6) - (2 if spec.model.lora else 0)
    return ranks * device.training_share * device.flops / (operations * shape.parameters)


def sampled_tokens(spec: JobSpec, shape: ModelShape, device: Device, memory: InferenceMemory) -> float:
    """Tokens per second of one replica: a pass reads the weights and half of each sequence's cache."""
    sequences = min(memory.sequences, MOST_SEQUENCES)
    width = bytes_of(spec.model.dtype)
    cache = width * shape.layers * max(1, shape.kv_heads // memory.tensor_parallel) * shape.head_size * longest(spec)
    return sequences * device.reading_share * device.bandwidth / (memory.weights + sequences * cache)
