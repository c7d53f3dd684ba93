"""What the plan says against a spec on the devices that live replicas have told of: warnings, never a refusal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.orchestrator.replicas.registry import LiveReplica, ReplicaRegistry
from spo.errors import FieldViolation, InvalidInput
from spo.spec.job_spec import JobSpec
from spo.spec.learning_rate import LEAST_OF_ADAPTERS
from spo.spec.plan.advice import memory_advice
from spo.spec.plan.fit import USABLE_SHARE
from spo.spec.plan.plan import in_gigabytes
from spo.spec.plan.serving_memory import inference_memory, value_memory
from spo.spec.plan.shapes import ModelShape, shape_of_folder


@dataclass(frozen=True)
class PlanWarnings:
    """Compares specs with the replicas that live now; a role that none has told of is left out."""

    replicas: ReplicaRegistry

    def of(self, spec: JobSpec) -> list[FieldViolation]:
        """A pointer to a field that would help, and why, for each role in which the job fits nobody's devices."""
        found = list(_of_rates(spec))
        try:
            shape = shape_of_folder(Path(spec.model.path))
        except InvalidInput:
            # An architecture that the plan does not know.
            return found
        live = [replica for replica in self.replicas.live() if replica.device_memory_bytes]
        pools = {pool: [each for each in live if each.pool == pool] for pool in {replica.pool for replica in live}}
        found += _of_trainers(spec, shape, pools.get("trainer", []))
        # What an engine may take on a CPU is a setting of its own.
        found += _of_engines(spec, shape, [each for each in pools.get("inference", []) if each.accelerated])
        found += _of_values(spec, shape, pools.get("value-estimation", []))
        return found


def _of_rates(spec: JobSpec) -> Iterator[FieldViolation]:
    if spec.model.lora and spec.trainer.learning_rate < LEAST_OF_ADAPTERS:
        yield FieldViolation(
            "/trainer/learning_rate",
            f"an adapter learns at about ten times the rate of all weights: {LEAST_OF_ADAPTERS:g} at least, and this "
            f"is {spec.trainer.learning_rate:g}",
        )


def _of_trainers(spec: JobSpec, shape: ModelShape, trainers: Sequence[LiveReplica]) -> Iterator[FieldViolation]:
    found = [
        memory_advice(spec, shape, len(trainer.device_memory_bytes), min(trainer.device_memory_bytes))
        for trainer in trainers
    ]
    if not found or any(advice.fits for advice in found):
        return
    # The one that lacks the least.
    advice = min(found, key=lambda each: each.needed_bytes / each.usable_bytes)
    helps = next(iter(advice.changes or {}), "")
    pointer = "/model/lora" if helps == "lora" else f"/trainer/{helps}".rstrip("/")
    yield FieldViolation(pointer, f"the job does not fit the trainer: {advice.words}")


def _of_engines(spec: JobSpec, shape: ModelShape, engines: Sequence[LiveReplica]) -> Iterator[FieldViolation]:
    found = [
        inference_memory(spec, shape, min(engine.device_memory_bytes), len(engine.device_memory_bytes))
        for engine in engines
    ]
    if found and not any(memory.fits for memory in found):
        best = max(found, key=lambda memory: memory.sequences)
        yield FieldViolation(
            "/model/max_response_tokens",
            f"by `spo plan` the largest inference replica (tensor_parallel_size {best.tensor_parallel}) has room for "
            f"{best.sequences} sequences of full length beside weights of {in_gigabytes(best.weights)} on each device: "
            "take more or larger devices, shorter responses, or a smaller model",
        )


def _of_values(spec: JobSpec, shape: ModelShape, estimators: Sequence[LiveReplica]) -> Iterator[FieldViolation]:
    if not estimators:
        return
    needed = value_memory(spec, shape)
    usable = USABLE_SHARE * max(max(each.device_memory_bytes) for each in estimators)
    if needed > usable:
        yield FieldViolation(
            "/model/path",
            f"by `spo plan` value-estimation needs {in_gigabytes(needed)} on one device and has "
            f"{in_gigabytes(usable)} to use: take a larger device, or a smaller model",
        )
