"""The plan of a job on given devices: every role, whether it fits, and in words what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from spo.spec.job_spec import JobSpec
from spo.spec.plan.fit import USABLE_SHARE, what_fits
from spo.spec.plan.serving_memory import InferenceMemory, checkpoint_bytes, inference_memory, push_bytes, value_memory
from spo.spec.plan.shapes import ModelShape
from spo.spec.plan.speed import Device, sampled_tokens, training_tokens
from spo.spec.plan.trainer_memory import TrainerMemory, trainer_memory

GIGABYTE = 10**9
WIDTHS = (1, 2, 4, 8)


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

    def _help(self) -> str:
        return "no setting makes it fit, take more devices" if self.changes is None else words_of(self.changes)

    def document(self) -> dict[str, Any]:
        """As JSON, with the peak and the warnings."""
        return {**asdict(self), "trainer_peak": self.trainer.peak, "warnings": self.warnings}


def plan_job(spec: JobSpec, shape: ModelShape, ranks: int, device: Device) -> Plan:
    """So many ranks of the trainer, a device each; inference takes the fewest devices on which a replica fits."""
    widths = [width for width in WIDTHS if width <= ranks] or [1]
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
    ]
    return [{"role": role, "what": what, "needs": needs} for role, what, needs in found]
