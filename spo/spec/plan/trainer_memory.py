"""What one rank of the trainer holds at its worst moment, in bytes.

Two moments compete: the backward pass of the last micro-batch (activations, logits) and the optimiser's step (float32
gradients and AdamW's own temporaries of the rank's part). The sums follow DeepSpeed's ZeRO and `spo.model.head`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from spo.errors import InvalidInput
from spo.spec.job_spec import JobSpec
from spo.spec.plan.shapes import ModelShape, shape_of_folder

# Of DeepSpeed's reduction, elements; its default.
BUCKET_ELEMENTS = 500_000_000
# spo.model.head: a block of float32 logits, and the copies of it that are alive at once.
LOGITS_BLOCK_BYTES, LOGITS_COPIES = 64 << 20, 4
# spo.model.activations: from here on layers run again in the backward pass.
LARGE_MODEL_PARAMETERS = 50_000_000
FLOAT = 4


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one rank; `step` and `activations` with `logits` are not alive together."""

    weights: int
    reference: int
    teacher: int
    masters: int
    moments: int
    gradients: int
    buckets: int
    activations: int
    logits: int
    step: int

    @property
    def peak(self) -> int:
        """The larger of the two moments."""
        sizes: dict[str, int] = {each.name: getattr(self, each.name) for each in fields(self)}
        held = sum(sizes.values()) - self.activations - self.logits - self.step
        return held + max(self.activations + self.logits, self.step)


def bytes_of(dtype: str) -> int:
    """Of one number."""
    return 2 if dtype == "bfloat16" else 4


def trained_parameters(spec: JobSpec, shape: ModelShape) -> int:
    """Of the adapter where there is one, else all."""
    return shape.adapter_parameters(spec.model.lora.rank) if spec.model.lora else shape.parameters


def recomputes(spec: JobSpec, shape: ModelShape) -> bool:
    """Whether activations are checkpointed."""
    wanted = spec.trainer.activation_checkpointing
    return shape.parameters >= LARGE_MODEL_PARAMETERS if wanted is None else wanted


def longest(spec: JobSpec) -> int:
    """Tokens of the longest trajectory."""
    return spec.model.max_prompt_tokens + spec.model.max_response_tokens


def tokens_of_a_forward(spec: JobSpec) -> int:
    """The most tokens of a micro-batch."""
    most = max(spec.trainer.max_tokens_per_micro_batch, longest(spec))
    return min(most, (spec.trainer.micro_batch_size or most) * longest(spec))


def teacher_parameters(spec: JobSpec, shape: ModelShape) -> int:
    """Of the job's teacher, 0 without one; one whose folder is not here or tells no sizes is taken as the student's."""
    if spec.algorithm.teacher is None:
        return 0
    try:
        return shape_of_folder(Path(spec.algorithm.teacher.path)).parameters
    except InvalidInput:
        return shape.parameters


def trainer_memory(spec: JobSpec, shape: ModelShape, ranks: int) -> TrainerMemory:
    """What each of so many ranks needs for this job; PPO's critic is a second model of the same size."""
    width, trained = bytes_of(spec.model.dtype), trained_parameters(spec, shape)
    half = width < FLOAT
    stage = max(spec.trainer.zero_stage, 1) if half else spec.trainer.zero_stage
    models = 2 if spec.algorithm.critic else 1
    whole, part = 1.0, 1 / ranks
    own = part if stage else whole
    masters = FLOAT * trained * own if half or stage in (1, 2) else 0
    # The tied table is a gradient of the head and of the embedding before they are one.
    tokens = tokens_of_a_forward(spec)
    activations = tokens * _bytes_per_token(spec, shape)
    if stage == 3:
        # The layer at work is gathered whole, and so is the next one, and the tables.
        block = sum(inner * outer for inner, outer in shape.linears)
        activations += width * (2 * block + shape.vocabulary * shape.hidden)
    weights = width * shape.parameters * (part if stage == 3 else whole) + (width * trained if spec.model.lora else 0)
    if spec.trainer.offload != "none":
        # The CPU holds the optimiser's states and steps on them.
        masters = own = 0
    teacher = width * teacher_parameters(spec, shape) * (part if stage == 3 else whole)
    if spec.trainer.offload == "optimizer_and_parameters":
        weights = teacher = 0
    in_trainer = spec.trainer.reference == "in_trainer" and not spec.model.lora
    return TrainerMemory(
        weights=int(models * weights),
        reference=int(weights) if in_trainer else 0,
        teacher=int(teacher),
        masters=int(models * masters),
        moments=int(models * 2 * FLOAT * trained * own),
        gradients=int(models * width * trained * (part if stage >= 2 else whole)),
        buckets=width * min(trained, BUCKET_ELEMENTS) if stage else 0,
        activations=int(activations),
        logits=LOGITS_COPIES * LOGITS_BLOCK_BYTES + FLOAT * tokens * shape.hidden,
        step=int((2 if half else 1) * FLOAT * trained * own),
    )


def _bytes_per_token(spec: JobSpec, shape: ModelShape) -> int:
    """Of activations kept for the backward pass: layers' inputs and one whole layer, or all layers whole."""
    width = bytes_of(spec.model.dtype)
    attention = 8 * shape.hidden + 2 * shape.kv_heads * shape.head_size
    layer = width * (attention + 4 * shape.intermediate)
    if recomputes(spec, shape):
        # The gradients of the layer at work are as large as what it keeps.
        return width * shape.hidden * shape.layers + 2 * layer
    return shape.layers * layer
