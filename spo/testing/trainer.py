"""Doubles of what the trainer talks to, over real gRPC, and tiny random models that transformers and vLLM load."""

# ruff: noqa: N802  (gRPC method names come from the proto)

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spo.errors import LeaseLost, NotReady
from spo.model.logprobs import load_policy, response_logprobs
from spo.rpc.server import RpcServer
from spo.spec.job_spec import JobSpec, spec_to_json
from spo.tasks.toy_tokenizer import MAXIMUM_TOKENS, build_tokenizer, save_tokenizer
from spo.v1 import orchestrator_service_pb2 as wire, replay_service_pb2 as replay_wire
from spo.v1.orchestrator_service_pb2_grpc import (
    OrchestratorServiceServicer,
    add_OrchestratorServiceServicer_to_server,
)
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_REFERENCE
from spo.v1.replay_service_pb2_grpc import ReplayServiceServicer, add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import Trajectory

# Wide enough that greedy choices differ from token to token instead of repeating one.
WEIGHT_SCALE = 0.25


def write_random_llama(folder: Path, seed: int, *, width: int = 96, layers: int = 2) -> None:
    """Write a Llama with the toy contest's tokenizer and weights drawn from `seed`."""
    random_llama(seed, width=width, layers=layers).save_pretrained(folder, safe_serialization=True)
    save_tokenizer(folder)


def random_llama(seed: int, *, width: int = 96, layers: int = 2) -> LlamaForCausalLM:
    """The model of `write_random_llama`, float32, in evaluation mode; leaves the global random state alone."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        num_key_value_heads=max(1, width // 32),
        # vLLM's CPU attention has no head narrower than 32.
        head_dim=32,
        max_position_embeddings=MAXIMUM_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, WEIGHT_SCALE, generator=generator)
    model.eval()
    return model


@dataclass
class OneJob(OrchestratorServiceServicer):
    """Leases one job to whoever asks, again after `lapse`, and records what it is told; `changed` wakes waiters."""

    spec: JobSpec
    state_path: Path
    run_id: str = "job_test"
    checkpoint_place: str = ""
    weight_place: str = ""
    lease_seconds: float = 5.0
    away: bool = False
    directive: wire.Directive.ValueType = wire.DIRECTIVE_CONTINUE
    reference_version: int = 0
    reference_values: dict[str, float] = field(default_factory=dict)
    epoch: int = 0
    renewals: int = 0
    refused: int = 0
    leased: bool = False
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    alarms: dict[int, dict[str, str]] = field(default_factory=dict)
    quarantined: dict[int, wire.StepReport] = field(default_factory=dict)
    published: list[wire.PublishWeightsRequest] = field(default_factory=list)
    checkpoints: list[wire.ReportCheckpointRequest] = field(default_factory=list)
    recorded: list[wire.ReportCheckpointRequest] = field(default_factory=list)
    finished: list[wire.FinishRunRequest] = field(default_factory=list)
    deaths: list[wire.TrainerDeath] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Block until a recorded fact holds; AssertionError naming it otherwise."""
        with self.changed:
            assert self.changed.wait_for(condition, seconds), f"not within {seconds:g} s: {what}"

    def wait_for_renewals(self, count: int) -> None:
        """Block until the lease was renewed so many times more: the trainer then knows the directive."""
        target = self.renewals + count
        self.wait_until(lambda: self.renewals >= target, 30, f"{count} renewals")

    def reset(self, spec: JobSpec, run_id: str) -> None:
        """Offer another job, with nothing recorded."""
        with self.changed:
            for records in (
                self.metrics,
                self.alarms,
                self.quarantined,
                self.published,
                self.checkpoints,
                self.finished,
                self.deaths,
            ):
                records.clear()
            self.recorded = []
            self.spec, self.run_id, self.leased = spec, run_id, False

    def lapse(self) -> None:
        """The lease ran out: its holder is refused from now on and the job can be leased again."""
        with self.changed:
            self.leased, self.epoch = False, self.epoch + 1

    def LeaseJob(self, request: wire.LeaseJobRequest, context: grpc.ServicerContext) -> wire.LeaseJobResponse:
        if self.away:
            raise NotReady("away")
        with self.changed:
            if self.leased or self.finished:
                self.changed.wait(min(0.1, request.wait_seconds))
                return wire.LeaseJobResponse()
            self.leased, self.epoch = True, self.epoch + 1
        return wire.LeaseJobResponse(
            run_id=self.run_id,
            spec_json=spec_to_json(self.spec),
            epoch=self.epoch,
            lease_seconds=self.lease_seconds,
            next_weight_version=max((weights.version for weights in self.published), default=0) + 1,
            checkpoint_path=f"{self.checkpoint_place or self.state_path / 'checkpoints'}/{self.run_id}",
            weight_store_path=f"{self.weight_place or self.state_path / 'weights'}/{self.run_id}",
            checkpoints=wire.RecordedCheckpoints(
                items=[
                    wire.RecordedCheckpoint(step=kept.step, epoch=kept.epoch, manifest_digest=kept.manifest_digest)
                    for kept in reversed(self.recorded)
                ]
            ),
        )

    def Heartbeat(self, request: wire.HeartbeatRequest, context: grpc.ServicerContext) -> wire.HeartbeatResponse:
        return wire.HeartbeatResponse(next_heartbeat_seconds=1)

    def RenewLease(self, request: wire.RenewLeaseRequest, context: grpc.ServicerContext) -> wire.RenewLeaseResponse:
        with self._from_owner(request):
            self.renewals += 1
            if request.HasField("death"):
                self.deaths.append(request.death)
            for report in request.reports:
                self.metrics[report.step] = dict(report.metrics)
                if report.alarms:
                    self.alarms[report.step] = dict(report.alarms)
                if report.quarantine_reason:
                    self.quarantined[report.step] = report
        return wire.RenewLeaseResponse(directive=self.directive, reference_version=self.reference_version)

    def GetReferenceValues(
        self, request: wire.GetReferenceValuesRequest, context: grpc.ServicerContext
    ) -> wire.GetReferenceValuesResponse:
        return wire.GetReferenceValuesResponse(qhat_0=self.reference_values)

    def PublishWeights(
        self, request: wire.PublishWeightsRequest, context: grpc.ServicerContext
    ) -> wire.PublishWeightsResponse:
        with self._from_owner(request):
            if request not in self.published:
                self.published.append(request)
        return wire.PublishWeightsResponse(announced=True)

    def ReportCheckpoint(
        self, request: wire.ReportCheckpointRequest, context: grpc.ServicerContext
    ) -> wire.ReportCheckpointResponse:
        with self._from_owner(request):
            self.checkpoints.append(request)
            line = [kept for kept in self.recorded if kept.step < request.step]
            self.recorded = [*line, request][-request.keep :]
        return wire.ReportCheckpointResponse(kept_steps=[kept.step for kept in self.recorded])

    def FinishRun(self, request: wire.FinishRunRequest, context: grpc.ServicerContext) -> wire.FinishRunResponse:
        with self._from_owner(request):
            self.finished.append(request)
        return wire.FinishRunResponse()

    @contextmanager
    def _from_owner(self, request: Any) -> Iterator[None]:
        if self.away:
            raise NotReady("away")
        with self.changed:
            if request.epoch != self.epoch:
                self.refused += 1
                self.changed.notify_all()
                raise LeaseLost(f"epoch {request.epoch} is over")
            yield
            self.changed.notify_all()


@dataclass
class TrajectoryPool(ReplayServiceServicer):
    """Serves each step a batch drawn from fixed trajectories; `spoil` may change a batch before it is sent."""

    trajectories: Sequence[replay_wire.SampledTrajectory]
    spoil: Callable[[int, replay_wire.SampleBatchResponse], None] = lambda step, batch: None
    ready: bool = True
    asked: list[replay_wire.SampleBatchRequest] = field(default_factory=list)

    def SampleBatch(
        self, request: replay_wire.SampleBatchRequest, context: grpc.ServicerContext
    ) -> replay_wire.SampleBatchResponse:
        self.asked.append(request)
        if not self.ready:
            raise NotReady("0 of 64 online trajectories")
        draw = random.Random(f"{request.seed}:{request.step}")
        batch = replay_wire.SampleBatchResponse(batch=draw.choices(self.trajectories, k=request.batch_size))
        self.spoil(request.step, batch)
        return batch

    def StreamBatch(
        self, request: replay_wire.StreamBatchRequest, context: grpc.ServicerContext
    ) -> Iterator[replay_wire.SampleBatchResponse]:
        batch = self.SampleBatch(request.batch, context).batch
        for sampled in [batch[position] for position in request.positions] or batch:
            if request.outlines:
                trajectory = sampled.trajectory
                sampled.outline.prompt_tokens = len(trajectory.prompt_token_ids)
                sampled.outline.response_tokens = len(trajectory.response_token_ids)
                for name in ("prompt_token_ids", "response_token_ids", "sampling_logprobs", "reference_logprobs"):
                    trajectory.ClearField(name)
            yield replay_wire.SampleBatchResponse(batch=[sampled])


def sampled_trajectories(
    model_path: Path, count: int, *, qhat_0: float = -0.3, seed: int = 0, longest: int = 12
) -> list[Any]:
    """Trajectories of random tokens with true reference log-probs; those with an even first token are right.

    Prompts and responses have up to `longest` tokens each.
    """
    draw = random.Random(seed)
    model = load_policy(model_path, "float32")
    prompts = [[draw.randrange(4, 20) for _ in range(draw.randrange(longest // 4, longest))] for _ in range(count)]
    responses = [[draw.randrange(4, 20) for _ in range(draw.randrange(longest // 4, longest))] for _ in range(count)]
    references = response_logprobs(model, prompts, responses, max_tokens_per_batch=4096)
    return [
        replay_wire.SampledTrajectory(
            qhat_0=qhat_0,
            trajectory=Trajectory(
                trajectory_id=f"traj_{index:04d}",
                prompt_id=f"prompt_{index // 4}",
                source=SOURCE_ONLINE if index % 2 else SOURCE_REFERENCE,
                prompt_token_ids=prompt,
                response_token_ids=response,
                reward=0.0 if response[0] % 2 == 0 else -1.0,
                reference_logprobs=reference,
                sampling_logprobs=reference,
                temperature=1.0,
                top_p=1.0,
            ),
        )
        for index, (prompt, response, reference) in enumerate(zip(prompts, responses, references, strict=True))
    ]


@contextmanager
def served(servicer: OneJob | TrajectoryPool) -> Iterator[str]:
    """The address of a running server with this double."""
    server = RpcServer("127.0.0.1", 0)
    if isinstance(servicer, OneJob):
        add_OrchestratorServiceServicer_to_server(servicer, server.server)
    else:
        add_ReplayServiceServicer_to_server(servicer, server.server)
    server.start()
    try:
        yield server.address
    finally:
        server.stop(1)
