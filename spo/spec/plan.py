"""The plan of a job on given devices: sizes of the model, memory of every role, speed, whether it fits, and what
would make it fit.

What one rank of the trainer holds at its worst moment, in bytes.
Two moments compete: the backward pass of the last micro-batch (activations, logits) and the optimiser's step (float32
gradients and AdamW's own temporaries of the rank's part). The sums follow DeepSpeed's ZeRO and `spo.model.logprobs`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import ENTRY_BYTES, JobSpec, longest_trajectory_bytes
from spo.spec.section import LIVE_SOURCES
from spo.spec.tasks import LoraSpec

# Of DeepSpeed's reduction, elements; its default.
BUCKET_ELEMENTS = 500_000_000
# spo.model.logprobs: a block of float32 logits, and the copies of it that are alive at once.
LOGITS_BLOCK_BYTES, LOGITS_COPIES = 64 << 20, 4
# spo.model.logprobs: from here on layers run again in the backward pass.
LARGE_MODEL_PARAMETERS = 50_000_000
FLOAT = 4

# vLLM's gpu_memory_utilization, and what its graphs and workspace take of that.
ENGINE_SHARE, ENGINE_WORKSPACE_BYTES = 0.9, 3 << 30
# Sequences of full length that an engine should hold at once, to be worth its device.
FEWEST_SEQUENCES = 16
# Tokens of one forward of value-estimation.
SCORED_TOKENS = 16_384

# Sequences beyond which an engine computes rather than reads memory.
MOST_SEQUENCES = 256

# Of a device's memory, for what fragments and the driver take.
USABLE_SHARE = 0.92

GIGABYTE = 10**9
WIDTHS = (1, 2, 4, 8)

# A trajectory alone, with what is added to it on its way (spo.rpc.client).
MESSAGE_BYTES = 32 << 20
# Of a trajectory in Redis: an id and two log-probs a token, and its places in the ledger; both measured.
STORED_TOKEN_BYTES, STORED_BYTES = 14, 1000
# Responses are seldom as long as they may be, and seldom shorter than this share of it.
LIKELY_SHARE = 0.25
# Steps whose batches are kept: since the oldest of the trainer's checkpoints, and until the next.
CHECKPOINTS = 3
# Where Redis stops taking work, of its maxmemory (the replay buffer's stop_memory_share).
STOP_SHARE = 0.9
MOST_RANKS = 4096
# Ranks of one trajectory, as `trainer.sequence_parallel` has it.
MOST_SHARING = 64

# The plan errs by less than this; where it says that a trainer fits which does not, so much less is asked for.
PLAN_ERROR = 0.15


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated feed-forward layers, as Llama, Qwen and Mistral have it; all counts of one model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    head_size: int
    # Tokens of prompt and response that it was made for; 0: not known.
    positions: int = field(default=0, compare=False)

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of each linear layer of one block."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = ((self.hidden, query), (self.hidden, key), (self.hidden, key), (query, self.hidden))
        return (*attention, *((self.hidden, self.intermediate),) * 2, (self.intermediate, self.hidden))

    @property
    def parameters(self) -> int:
        """Of the whole model, biases left out."""
        block = sum(width * height for width, height in self.linears) + 2 * self.hidden
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * block + tables + self.hidden

    def can_be_cut(self, devices: int) -> bool:
        """Whether vLLM cuts it over so many: whole heads on each, those of keys and values repeated if they are few."""
        few, many = sorted((self.kv_heads, devices))
        return self.heads % devices == 0 and many % few == 0

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on every linear layer of the blocks."""
        return self.layers * rank * sum(width + height for width, height in self.linears)


NAMED = {
    "smollm2-135m": ModelShape(576, 30, 9, 3, 1536, 49152, tied=True, head_size=64, positions=8192),
    "qwen2.5-0.5b": ModelShape(896, 24, 14, 2, 4864, 151936, tied=True, head_size=64, positions=32768),
    "qwen2.5-1.5b": ModelShape(1536, 28, 12, 2, 8960, 151936, tied=True, head_size=128, positions=32768),
    "llama-3-8b": ModelShape(4096, 32, 32, 8, 14336, 128256, tied=False, head_size=128, positions=131072),
    "llama-3-70b": ModelShape(8192, 80, 64, 8, 28672, 128256, tied=False, head_size=128, positions=131072),
}


def named_shape(name: str) -> ModelShape:
    """A published model's. Raises InvalidInput naming those there are."""
    if name not in NAMED:
        raise InvalidInput(f"there is no shape {name}; there are {', '.join(NAMED)}")
    return NAMED[name]


def shape_of_folder(folder: Path) -> ModelShape:
    """From the config.json of a model folder. Raises InvalidInput when it is absent, or of another architecture."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return shape_of_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{folder} has no config.json that tells the model's sizes: {error!r}") from None


def known_shape(folder: Path) -> ModelShape | None:
    """None where the folder is not here, or of an architecture that the plan does not know."""
    try:
        return shape_of_folder(folder)
    except InvalidInput:
        return None


def shape_of_config(config: Mapping[str, object]) -> ModelShape:
    """Raises KeyError, TypeError for a configuration without the sizes of a decoder."""

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name) if default is not None else config[name]
        found = default if value is None else value
        if not isinstance(found, int):
            raise TypeError(f"{name} is no number")
        return found

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    return ModelShape(
        hidden=hidden,
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        intermediate=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        head_size=number("head_dim", hidden // heads),
        positions=number("max_position_embeddings", 0),
    )


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
    """Tokens of the longest sequence."""
    return spec.model.max_prompt_tokens + spec.model.max_response_tokens


def most_trained(spec: JobSpec) -> int:
    """Tokens of the longest trajectory: of an episode all its branches."""
    return spec.model.max_prompt_tokens + spec.most_response_tokens


@dataclass(frozen=True)
class SystemLimit:
    """What bounds a job whatever its devices; pointer: the field that changes `needed`."""

    name: str
    pointer: str
    needed: int
    most: int
    unit: str = "bytes"

    @property
    def is_met(self) -> bool:
        """Whether the job stays within it."""
        return self.needed <= self.most

    @property
    def words(self) -> str:
        """As people write it."""
        if self.unit == "bytes":
            return f"{self.name}: {in_gigabytes(self.needed)} of {in_gigabytes(self.most)}"
        return f"{self.name}: {self.needed:,} of {self.most:,} {self.unit}"


def system_limits(spec: JobSpec, shape: ModelShape | None = None, redis_bytes: int = 0) -> list[SystemLimit]:
    """Every bound that is not a device's: of messages, of Redis, of the model, of the batch.

    What travels in parts (batches, answers of engines, judges and value-estimation, pages) has none. redis_bytes: its
    maxmemory, 0: not known or without one.
    """
    trajectory = longest_trajectory_bytes(spec)
    found = [
        SystemLimit("a trajectory in a message", "/model/max_response_tokens", trajectory, MESSAGE_BYTES),
        SystemLimit(
            "a prompt's samples in an entry of Redis",
            "/rollout/samples_per_prompt",
            spec.rollout.samples_per_prompt * trajectory,
            ENTRY_BYTES,
        ),
    ]
    if shape and shape.positions:
        found.append(
            SystemLimit(
                "prompt and response in the model's positions",
                "/model/max_response_tokens",
                longest(spec),
                shape.positions,
                "tokens",
            )
        )
    width = spec.trainer.sequence_parallel
    if shape and width > 1:
        whole = max(count for count in range(1, width + 1) if not shape.heads % count)
        found.append(SystemLimit("attention heads over ranks", "/trainer/sequence_parallel", width, whole, "ranks"))
    if redis_bytes:
        window, batches = stored_bytes(spec)
        pointer = "/trainer/checkpoint_interval" if batches > window else "/replay/online_capacity"
        most = int(STOP_SHARE * redis_bytes)
        found.append(SystemLimit("trajectories in Redis", pointer, window + batches, most))
    return found


def stored_bytes(spec: JobSpec) -> tuple[int, int]:
    """What Redis holds of the job's live trajectories at a quarter of their length: the window, and batches.

    Batches are those that a trainer which resumes from its oldest checkpoint takes again.
    """
    if not spec.trainer.steps:
        return 0, 0
    one = STORED_BYTES + int(STORED_TOKEN_BYTES * LIKELY_SHARE * most_trained(spec))
    live = sum(part.share for part in spec.replay.mix if part.source in LIVE_SOURCES)
    steps = min(spec.trainer.steps, CHECKPOINTS * spec.trainer.checkpoint_interval)
    # A trajectory is in several batches.
    fresh = steps * spec.trainer.batch_size * live / max(1.0, spec.replay.samples_per_insert)
    return (spec.replay.online_capacity * one if live else 0), int(fresh) * one


def tokens_of_a_forward(spec: JobSpec) -> int:
    """The most tokens that a rank has of a micro-batch; ranks that share their rows have a stretch each."""
    own = -(-most_trained(spec) // spec.trainer.sequence_parallel)
    most = max(spec.trainer.max_tokens_per_micro_batch, own)
    return min(most, (spec.trainer.micro_batch_size or most) * own)


def teacher_parameters(spec: JobSpec, shape: ModelShape) -> int:
    """Of the job's teacher, 0 without one; one whose folder is not here or tells no sizes is taken as the student's."""
    if spec.algorithm.teacher is None:
        return 0
    return (known_shape(Path(spec.algorithm.teacher.path)) or shape).parameters


def trainer_memory(spec: JobSpec, shape: ModelShape, ranks: int) -> TrainerMemory:
    """What each of so many ranks needs for this job; PPO's critic is a second model of the same size."""
    width, trained = bytes_of(spec.model.dtype), trained_parameters(spec, shape)
    half = width < FLOAT
    stage = max(spec.trainer.zero_stage, 1) if half else spec.trainer.zero_stage
    gradient = FLOAT if spec.trainer.gradient_dtype == "float32" else width
    if half and gradient == FLOAT:
        stage = max(stage, 2)
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
        gradients=int(models * gradient * trained * (part if stage >= 2 else whole)),
        buckets=gradient * min(trained, BUCKET_ELEMENTS) if stage else 0,
        activations=int(activations),
        logits=LOGITS_COPIES * LOGITS_BLOCK_BYTES + FLOAT * tokens * shape.hidden,
        step=int((2 if half else 1) * FLOAT * trained * own),
    )


def _bytes_per_token(spec: JobSpec, shape: ModelShape) -> int:
    """Of activations kept for the backward pass: layers' inputs and one whole layer, or all layers whole."""
    width = bytes_of(spec.model.dtype)
    # Keys and values that cannot be cut over the ranks of a row are one for each query.
    keys = shape.heads if shape.kv_heads % spec.trainer.sequence_parallel else shape.kv_heads
    attention = 8 * shape.hidden + 2 * keys * shape.head_size
    layer = width * (attention + 4 * shape.intermediate)
    if recomputes(spec, shape):
        # The gradients of the layer at work are as large as what it keeps.
        return width * shape.hidden * shape.layers + 2 * layer
    return shape.layers * layer


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


def fits(spec: JobSpec, shape: ModelShape, ranks: int, device_bytes: int) -> bool:
    """Whether a rank's peak is within what a device has to give."""
    return trainer_memory(spec, shape, ranks).peak <= USABLE_SHARE * device_bytes


def changed(spec: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    """The spec with other settings of `trainer`, and with an adapter where they say lora."""
    trainer = {name: value for name, value in changes.items() if name != "lora"}
    found = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=trainer)})
    if "lora" not in changes:
        return found
    adapter = LoraSpec(rank=changes["lora"])
    return found.model_copy(update={"model": spec.model.model_copy(update={"lora": adapter})})


def what_fits(spec: JobSpec, shape: ModelShape, ranks: int, device_bytes: int) -> dict[str, Any] | None:
    """The cheapest changes after which it fits: none of them, where it does; None where nothing helps."""
    for each in _changes(spec, shape, ranks):
        found = changed(spec, each)
        # Others would have nothing to do.
        at_work = ranks <= spec.trainer.batch_size * found.trainer.sequence_parallel
        if at_work and fits(found, shape, ranks, device_bytes):
            return each
    return None


def fewest_ranks(spec: JobSpec, shape: ModelShape, device_bytes: int) -> tuple[int, dict[str, Any]] | None:
    """The least number of ranks on which all weights train, and the settings with it; None where none is enough.

    No more ranks than a batch has trajectories, times those that share one.
    """
    ranks = 1
    while ranks <= MOST_RANKS:
        changes = what_fits(spec, shape, ranks, device_bytes)
        if changes is not None and "lora" not in changes:
            return ranks, changes
        ranks *= 2
    return None


def what_is_not_cut(spec: JobSpec, shape: ModelShape) -> str:
    """What a rank holds however many there are, in words."""
    width = max([spec.trainer.sequence_parallel, *_wider(spec, shape, MOST_RANKS)])
    least = {"zero_stage": 3, "activation_checkpointing": True, "offload": "optimizer", "sequence_parallel": width}
    cut = changed(spec, least)
    memory = trainer_memory(
        changed(cut, {"max_tokens_per_micro_batch": -(-most_trained(spec) // width)}), shape, MOST_RANKS
    )
    alone = in_gigabytes(memory.activations + memory.logits)
    cut_over = f", cut over {width} of them" if width > 1 else ", which share none of this job"
    return (
        f"one trajectory of {most_trained(spec):,} tokens alone takes {alone} on each of its ranks{cut_over}: shorter "
        "responses, or larger devices"
    )


def _wider(spec: JobSpec, shape: ModelShape, ranks: int) -> list[int]:
    """More ranks to a trajectory than the job has, as far as rows can be shared."""
    if not spec.trainer.packing or spec.algorithm.critic:
        return []
    widths = (spec.trainer.sequence_parallel * 2**power for power in range(1, 7))
    return [width for width in widths if width <= MOST_SHARING and not ranks % width and not shape.heads % width]


def _shorter(spec: JobSpec, width: int) -> Iterator[dict[str, Any]]:
    """Fewer tokens in a forward, down to those of one trajectory."""
    tokens, least = spec.trainer.max_tokens_per_micro_batch, -(-most_trained(spec) // width)
    smaller = [tokens // 2**power for power in range(1, 8) if tokens // 2**power > least]
    yield {}
    for count in [*smaller, *([least] if least < tokens else [])]:
        yield {"max_tokens_per_micro_batch": count}


def _changes(spec: JobSpec, shape: ModelShape, ranks: int) -> Iterator[dict[str, Any]]:
    stages = [stage for stage in (1, 2, 3) if stage > spec.trainer.zero_stage]
    shared: list[dict[str, Any]] = [{}, *({"sequence_parallel": width} for width in _wider(spec, shape, ranks))]
    for adapter in ({}, {"lora": 16}) if spec.model.lora is None else ({},):
        for held in ({}, {"offload": "optimizer"}) if spec.trainer.offload == "none" else ({},):
            # Exchanges between cards cost less than a step on the CPU, more than a layer twice.
            for row, layers in product(shared, ({}, {"activation_checkpointing": True})):
                for part in [{}, *({"zero_stage": stage} for stage in stages)]:
                    for batch in _shorter(spec, row.get("sequence_parallel", spec.trainer.sequence_parallel)):
                        yield {**part, **batch, **layers, **row, **held, **adapter}


@dataclass(frozen=True)
class Plan:
    """Bytes and tokens per second of each role; `changes` make the trainer fit, None: nothing does."""

    parameters: int
    ranks: int
    device_bytes: int
    trainer: TrainerMemory
    changes: dict[str, Any] | None
    inference: InferenceMemory
    value_bytes: int
    push_bytes: int
    checkpoint_bytes: int
    trained_tokens_per_second: float
    sampled_tokens_per_second: float
    stored_bytes: int
    limits: list[SystemLimit]
    # The least number of ranks that train all weights, and with what settings; None: none is enough, and why.
    fewest: tuple[int, dict[str, Any]] | None
    not_cut: str

    @property
    def warnings(self) -> list[str]:
        """What does not fit, each with what would help."""
        return list(self._warnings())

    def _warnings(self) -> Iterator[str]:
        usable = USABLE_SHARE * self.device_bytes
        if self.changes != {}:
            needed = f"the trainer needs {in_gigabytes(self.trainer.peak)} on each of {self.ranks} devices, which have "
            yield f"{needed}{in_gigabytes(usable)} to give: {self._help()}"
        if not self.inference.fits:
            yield f"an inference replica over {self.inference.tensor_parallel} devices has no room for 16 sequences"
        if self.value_bytes > usable:
            yield f"value-estimation needs {in_gigabytes(self.value_bytes)} on one device"
        for limit in self.limits:
            if not limit.is_met:
                yield f"{limit.pointer}: {limit.words}"

    def _help(self) -> str:
        if self.changes is not None:
            return words_of(self.changes)
        if self.fewest is None:
            return f"no setting makes it fit, and no number of devices: {self.not_cut}"
        ranks, changes = self.fewest
        return f"no setting makes it fit, take {ranks} devices" + (f" {words_of(changes)}" if changes else "")

    def document(self) -> dict[str, Any]:
        """As JSON, with the peak and the warnings."""
        return {**asdict(self), "trainer_peak": self.trainer.peak, "warnings": self.warnings}


def plan_job(spec: JobSpec, shape: ModelShape, ranks: int, device: Device, redis_bytes: int = 0) -> Plan:
    """So many ranks of the trainer, a device each; inference takes the fewest devices on which a replica fits.

    redis_bytes: maxmemory of Redis, 0: not known.
    """
    # Each device has whole heads.
    widths = [width for width in WIDTHS if width <= ranks and shape.can_be_cut(width)]
    replicas = [inference_memory(spec, shape, device.memory_bytes, width) for width in widths]
    replica = next((found for found in replicas if found.fits), replicas[-1])
    return Plan(
        parameters=shape.parameters,
        ranks=ranks,
        device_bytes=device.memory_bytes,
        trainer=trainer_memory(spec, shape, ranks),
        changes=what_fits(spec, shape, ranks, device.memory_bytes),
        inference=replica,
        value_bytes=value_memory(spec, shape),
        push_bytes=push_bytes(spec, shape),
        checkpoint_bytes=checkpoint_bytes(spec, shape),
        trained_tokens_per_second=training_tokens(spec, shape, device, ranks),
        sampled_tokens_per_second=sampled_tokens(spec, shape, device, replica),
        stored_bytes=sum(stored_bytes(spec)),
        limits=system_limits(spec, shape, redis_bytes),
        fewest=fewest_ranks(spec, shape, device.memory_bytes),
        not_cut=what_is_not_cut(spec, shape),
    )


def words_of(changes: Mapping[str, Any]) -> str:
    """Changes of a spec as people write them."""
    words = {"lora": "model.lora.rank"}
    return "with " + ", ".join(f"{words.get(name, f'trainer.{name}')}: {value}" for name, value in changes.items())


def in_gigabytes(count: float) -> str:
    """As people write it."""
    return f"{count / GIGABYTE:.1f} GB"


def rows(plan: Plan) -> list[dict[str, str]]:
    """One line per quantity, for a table."""
    found = [("trainer, each rank", name, in_gigabytes(count)) for name, count in asdict(plan.trainer).items() if count]
    found += [
        ("trainer, each rank", "peak", in_gigabytes(plan.trainer.peak)),
        ("trainer", "tokens per second, modelled", f"{plan.trained_tokens_per_second:,.0f}"),
        (f"inference, each of {plan.inference.tensor_parallel}", "weights", in_gigabytes(plan.inference.weights)),
        (f"inference, each of {plan.inference.tensor_parallel}", "kv_cache", in_gigabytes(plan.inference.kv_cache)),
        ("inference, a replica", "sequences of full length", str(plan.inference.sequences)),
        ("inference, a replica", "tokens per second, modelled", f"{plan.sampled_tokens_per_second:,.0f}"),
        ("value-estimation", "peak", in_gigabytes(plan.value_bytes)),
        ("weights", "a push", in_gigabytes(plan.push_bytes)),
        ("weights", "a checkpoint", in_gigabytes(plan.checkpoint_bytes)),
        ("Redis", "window and batches, of a quarter of the length", in_gigabytes(plan.stored_bytes)),
    ]
    found += [("limits", limit.name, limit.words.removeprefix(f"{limit.name}: ")) for limit in plan.limits]
    if plan.fewest:
        found.append(("trainer", "fewest devices, all weights", str(plan.fewest[0])))
    return [{"role": role, "what": what, "needs": needs} for role, what, needs in found]


@dataclass(frozen=True)
class MemoryAdvice:
    """Bytes of a rank: needed by the plan and usable; `changes` of settings make it fit, None: nothing does."""

    ranks: int
    needed_bytes: int
    usable_bytes: int
    changes: Mapping[str, Any] | None

    @property
    def fits(self) -> bool:
        """Whether the plan says that there is enough."""
        return self.needed_bytes <= self.usable_bytes

    @property
    def words(self) -> str:
        """All of it in one sentence."""
        needs = f"by `spo plan` each of {self.ranks} ranks needs {in_gigabytes(self.needed_bytes)}"
        has = f"{needs} and has {in_gigabytes(self.usable_bytes)} to use"
        if self.changes is None:
            return f"{has}; no setting makes it fit: take more or larger devices, or a smaller model"
        helps = words_of(self.changes)
        if self.fits:
            return f"{has}, so something else takes memory there too; less is needed {helps}"
        return f"{has}; it fits {helps}"


def memory_advice(spec: JobSpec, shape: ModelShape, ranks: int, device_bytes: int) -> MemoryAdvice:
    """For so many ranks with so much memory each; where it fits, the cheapest settings that need clearly less."""
    needed = trainer_memory(spec, shape, ranks).peak
    usable = int(USABLE_SHARE * device_bytes)
    wanted = device_bytes if needed > usable else int((1 - PLAN_ERROR) * needed / USABLE_SHARE)
    return MemoryAdvice(ranks, needed, usable, what_fits(spec, shape, ranks, wanted))


def limit_warnings(spec: JobSpec, shape: ModelShape | None, redis_bytes: int) -> Iterator[FieldViolation]:
    """Each limit of the system that the job goes beyond; shape: None where the plan does not know the architecture."""
    for limit in system_limits(spec, shape, redis_bytes):
        if not limit.is_met:
            yield FieldViolation(limit.pointer, limit.words)


def engine_warnings(spec: JobSpec, shape: ModelShape, engines: Sequence[Sequence[int]]) -> Iterator[FieldViolation]:
    """Where no inference replica can serve the job; engines: bytes of each device of each."""
    widths = sorted({len(devices) for devices in engines})
    if widths and not any(map(shape.can_be_cut, widths)):
        yield FieldViolation(
            "/model/path",
            f"its {shape.heads} attention heads ({shape.kv_heads} of keys and values) cannot be cut over the "
            f"{' or '.join(map(str, widths))} devices of an inference replica: another tensor_parallel_size",
        )
    found = [inference_memory(spec, shape, min(devices), len(devices)) for devices in engines]
    if found and not any(memory.fits for memory in found):
        best = max(found, key=lambda memory: memory.sequences)
        yield FieldViolation(
            "/model/max_response_tokens",
            f"by `spo plan` the largest inference replica (tensor_parallel_size {best.tensor_parallel}) has room for "
            f"{best.sequences} sequences of full length beside weights of {in_gigabytes(best.weights)} on each device: "
            "take more or larger devices, shorter responses, or a smaller model",
        )


def value_warnings(spec: JobSpec, shape: ModelShape, estimators: Sequence[Sequence[int]]) -> Iterator[FieldViolation]:
    """Where the reference fits no device of value-estimation; estimators: bytes of each device of each."""
    if not estimators:
        return
    needed = value_memory(spec, shape)
    usable = USABLE_SHARE * max(max(devices) for devices in estimators)
    if needed > usable:
        yield FieldViolation(
            "/model/path",
            f"by `spo plan` value-estimation needs {in_gigabytes(needed)} on one device and has "
            f"{in_gigabytes(usable)} to use: take a larger device, or a smaller model",
        )


def unlearned_shares(spec: JobSpec) -> Iterator[FieldViolation]:
    """Each part of `replay.mix` that every term leaves out; where all of them are, the spec itself is refused."""
    if not spec.trainer.steps:
        return
    drawn = {part.source for part in spec.replay.mix if part.share > 0}
    learned = set[str]()
    for term in spec.algorithm.losses:
        # Without annotations such a term is 0.
        able = {"annotated"} if term.needs("annotations") else drawn
        learned |= able if term.sources is None else able & set(term.sources)
    for index, part in enumerate(spec.replay.mix):
        if part.share > 0 and part.source not in learned:
            yield FieldViolation(
                f"/replay/mix/{index}/source",
                f"no term of algorithm.losses learns from {part.source}: {part.share:.0%} of each batch changes no "
                "weight. Name it in a term's `sources`, or drop the share",
            )
