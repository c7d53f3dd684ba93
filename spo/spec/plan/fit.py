"""Which settings make the trainer fit: those of the job first, then the change that costs the least speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spo.spec.job_spec import JobSpec
from spo.spec.lora import LoraSpec
from spo.spec.plan.shapes import ModelShape
from spo.spec.plan.trainer_memory import longest, trainer_memory

# Of a device's memory, for what fragments and the driver take.
USABLE_SHARE = 0.92


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
    return next((each for each in _changes(spec) if fits(changed(spec, each), shape, ranks, device_bytes)), None)


def _changes(spec: JobSpec) -> Iterator[dict[str, Any]]:
    stages = [stage for stage in (1, 2, 3) if stage > spec.trainer.zero_stage]
    tokens = spec.trainer.max_tokens_per_micro_batch
    least = longest(spec)
    smaller = [tokens // 2**power for power in range(1, 8) if tokens // 2**power > least]
    shorter: list[dict[str, Any]] = [{}] + [
        {"max_tokens_per_micro_batch": count} for count in [*smaller, *([least] if least < tokens else [])]
    ]
    for adapter in ({}, {"lora": 16}) if spec.model.lora is None else ({},):
        for held in ({}, {"offload": "optimizer"}) if spec.trainer.offload == "none" else ({},):
            for layers in ({}, {"activation_checkpointing": True}):
                for part in [{}, *({"zero_stage": stage} for stage in stages)]:
                    for batch in shorter:
                        yield {**part, **batch, **layers, **held, **adapter}
