"""What speaks against a spec: what nothing learns from, rate, temperature, and the plan on devices of live replicas.

Warnings, never a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.orchestrator.replicas.registry import LiveReplica, ReplicaRegistry
from spo.errors import FieldViolation, InvalidInput
from spo.spec.algorithm import LIVING_NATS_PER_TOKEN, AlgorithmSpec
from spo.spec.job_spec import JobSpec
from spo.spec.learning_rate import LEAST_OF_ADAPTERS
from spo.spec.plan.advice import memory_advice
from spo.spec.plan.fit import USABLE_SHARE
from spo.spec.plan.plan import in_gigabytes
from spo.spec.plan.serving_memory import inference_memory, value_memory
from spo.spec.plan.shapes import ModelShape, shape_of_folder
from spo.spec.plan.unlearned import unlearned_shares

# Responses are seldom as long as they may be, and seldom shorter than this share of it.
LIKELY_SHARE = 0.25


@dataclass(frozen=True)
class PlanWarnings:
    """Compares specs with the replicas that live now; a role that none has told of is left out."""

    replicas: ReplicaRegistry

    def of(self, spec: JobSpec, mean_tokens: float | None = None) -> list[FieldViolation]:
        """A pointer to a field that would help, and why, for each role in which the job fits nobody's devices.

        mean_tokens: length of the job's responses so far; None before any is known.
        """
        found = [*unlearned_shares(spec), *_of_rates(spec), *_of_temperature(spec, mean_tokens), *_of_sharpness(spec)]
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


def _of_sharpness(spec: JobSpec) -> Iterator[FieldViolation]:
    """Where Qhat_0 is that of a sharper policy than the one whose log-probs stand for pi0."""
    value = spec.value
    if value is None or not any(term.needs("value") for term in spec.algorithm.losses):
        return
    for name, usual in (("temperature", 1.0), ("top_p", 1.0)):
        if getattr(value, name) != usual:
            yield FieldViolation(
                f"/value/{name}",
                f"Qhat_0 is then that of pi0 as it is sampled here, and the loss's log pi0 is at {name} 1: "
                "their difference is a bias of every residual of the prompt",
            )


def _of_temperature(spec: JobSpec, mean_tokens: float | None) -> Iterator[FieldViolation]:
    """Where no likely length makes the nats per token those of runs that live."""
    if not spec.algorithm.regresses_log_ratios:
        return
    longest = mean_tokens or float(spec.model.max_response_tokens)
    shortest = mean_tokens or LIKELY_SHARE * longest
    span, (lowest, highest) = spec.tasks.reward.scale, LIVING_NATS_PER_TOKEN
    least, most = (spec.algorithm.nats_per_token(tokens, span) for tokens in (longest, shortest))
    if least <= highest and most >= lowest:
        return
    asked = f"{least:.2g}" if f"{least:.2g}" == f"{most:.2g}" else f"{least:.2g} to {most:.2g}"
    lengths = (
        f"{mean_tokens:.0f} tokens, the mean so far," if mean_tokens else f"{shortest:.0f} to {longest:.0f} tokens"
    )
    one = AlgorithmSpec(beta=1, beta_per=spec.algorithm.beta_per)
    low, high = one.nats_per_token(longest, span) / highest, one.nats_per_token(shortest, span) / lowest
    yield FieldViolation(
        "/algorithm/beta",
        f"asks each token of a response for {asked} nats of log-ratio; runs that stayed stable ask for {lowest:g} to "
        f"{highest:g}, which with responses of {lengths} is a beta of {low:.2g} to {high:.2g}",
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
