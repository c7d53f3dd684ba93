"""The policy as value: Q_t and A_t of stored trajectories under any weight version, and its calibration against pi0."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from services.replay_buffer.store import ReplayStore
from services.trainer.batches import TrainingSample, token_batch
from services.value_estimation.service import beta_of
from services.value_estimation.workers import ValueWorker
from spo import redis_keys
from spo.errors import IntegrityError, InvalidInput, NotFound, PreconditionFailed
from spo.model.logprobs import load_policy, token_logprobs
from spo.rpc.client import RpcClient
from spo.spec.job_spec import RewardSpec
from spo.testing.runs import EngineDouble, Surroundings, conversation, toy_spec, trajectory
from spo.testing.trainer import random_llama
from spo.v1 import value_service_pb2 as wire
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt, Sampling
from spo.v1.trajectory_pb2 import Anchor, Trajectory
from spo.v1.value_pb2 import EstimateRequest
from spo.v1.value_service_pb2_grpc import ValueServiceStub
from spo.weights.store import WeightStore

RUN = "job_VALUES"
BETA = 0.2
PROMPT = Prompt(prompt_id="e" * 64, text="sum of the even numbers", tests_digest="t", response_format="raw")


@dataclass
class Stage:
    """Value-estimation over gRPC with a run whose prompt has been estimated: 16 samples, 4 of them right."""

    values: RpcClient
    engine: EngineDouble
    store: ReplayStore
    weights: WeightStore
    model_path: Path

    def trajectories(self) -> list[Trajectory]:
        return list(self.store.newest_first(RUN, "", "", 50)[0])

    def publish(self, version: int, seed: int) -> None:
        """Another policy's weights as a version of the run."""
        state = {name: tensor.contiguous() for name, tensor in random_llama(seed).state_dict().items()}
        shards = [("model.safetensors", state)]
        self.weights.write(RUN, version, parent=version - 1, step=10 * version, dtype="float32", shards=shards)

    def token_values(self, **fields: Any) -> wire.GetTokenValuesResponse:
        ids = [sample.trajectory_id for sample in self.trajectories()]
        request = wire.GetTokenValuesRequest(run_id=RUN, trajectory_ids=ids, **fields)
        found: wire.GetTokenValuesResponse = self.values.call("GetTokenValues", request, 60)
        return found

    def calibration(self, **fields: Any) -> wire.GetCalibrationResponse:
        request = wire.GetCalibrationRequest(run_id=RUN, **fields)
        found: wire.GetCalibrationResponse = self.values.call("GetCalibration", request, 60)
        return found


@pytest.fixture
def stage(surroundings: Callable[..., Surroundings]) -> Iterator[Stage]:
    around = surroundings(chunk_samples=16, patience_seconds=5)
    around.start(RUN, algorithm={"beta": BETA})
    sampling = Sampling(samples=16, temperature_min=1, temperature_max=1, top_p=1, max_tokens=44)
    ValueWorker(around.client, around.references, around.clients, around.settings, "worker").estimate(
        EstimateRequest(run_id=RUN, prompt=PROMPT, sampling=sampling)
    )
    values = RpcClient("value-estimation", around.address, ValueServiceStub)
    yield Stage(values, around.engine, around.store, around.weights, around.model_path)
    values.close()


def test_under_pi0_every_q_is_qhat_0(stage: Stage) -> None:
    found = stage.token_values()

    assert found.policy_version == 0, "nothing has been published yet"
    for sample in found.trajectories:
        assert list(sample.advantages) == [0.0] * len(sample.advantages)
        assert list(sample.q) == pytest.approx([sample.qhat_0] * len(sample.q))


def test_q_t_is_qhat_0_plus_the_advantages_of_that_version(stage: Stage) -> None:
    stage.publish(1, seed=2)
    stage.publish(2, seed=3)

    found = stage.token_values(policy_version=1)

    stored = {sample.trajectory_id: sample for sample in stage.trajectories()}
    policy: Any = random_llama(2)
    for sample in found.trajectories:
        trajectory = stored[sample.trajectory_id]
        tokens = torch.tensor([[*trajectory.prompt_token_ids, *trajectory.response_token_ids]])
        with torch.no_grad():
            logprobs = token_logprobs(policy, tokens, torch.ones_like(tokens))[0, len(trajectory.prompt_token_ids) :]
        expected = BETA * (logprobs - torch.tensor(list(trajectory.reference_logprobs)))
        assert list(sample.advantages) == pytest.approx(expected.tolist(), abs=1e-5)
        assert list(sample.q) == pytest.approx((sample.qhat_0 + expected.cumsum(0)).tolist(), abs=1e-5)
    assert stage.token_values().policy_version == 2, "the newest is the default"


def test_under_an_anchor_of_its_own_a_trajectory_begins_at_its_groups_value(stage: Stage) -> None:
    stage.publish(1, seed=2)
    sampled = stage.trajectories()[0]
    anchored = Trajectory(
        trajectory_id="anchored",
        group_id="group-1",
        run_id=RUN,
        prompt_id="no value of its own",
        source=SOURCE_ONLINE,
        prompt_token_ids=sampled.prompt_token_ids,
        response_token_ids=sampled.response_token_ids,
        sampling_logprobs=[-1.0] * len(sampled.response_token_ids),
        reference_logprobs=[-1.0] * len(sampled.response_token_ids),
        verdict=sampled.verdict,
        reward=sampled.reward,
        policy_version_first=1,
        policy_version_last=1,
        anchor=Anchor(policy_version=1, rewards=[0.0, -1.0]),
    )
    stage.store.insert(RUN, [anchored])

    asked = wire.GetTokenValuesRequest(run_id=RUN, trajectory_ids=["anchored"], policy_version=1)
    (found,) = stage.values.call("GetTokenValues", asked, 60).trajectories

    assert found.qhat_0 == pytest.approx(BETA * math.log((1 + math.exp(-1 / BETA)) / 2))
    tokens = torch.tensor([[*sampled.prompt_token_ids, *sampled.response_token_ids]])
    policy: Any = random_llama(2)
    with torch.no_grad():
        logprobs = token_logprobs(policy, tokens, torch.ones_like(tokens))[0, len(sampled.prompt_token_ids) :]
    assert list(found.advantages) == pytest.approx((BETA * (logprobs + 1.0)).tolist(), abs=1e-5)


def test_a_damaged_newest_version_is_passed_over_and_refused_by_name(stage: Stage) -> None:
    stage.publish(1, seed=2)
    stage.publish(2, seed=3)
    (damaged,) = [path for path in stage.weights.open(RUN, 2).files if path.name == "model.safetensors"]
    damaged.write_bytes(damaged.read_bytes()[:-8] + b"damaged!")

    assert stage.token_values().policy_version == 1
    with pytest.raises(IntegrityError):
        stage.token_values(policy_version=2)


def test_a_version_that_is_not_kept_is_refused_by_name(stage: Stage) -> None:
    with pytest.raises(NotFound, match="version 7"):
        stage.token_values(policy_version=7)


def test_a_trajectory_that_is_not_there_is_refused(stage: Stage) -> None:
    request = wire.GetTokenValuesRequest(run_id=RUN, trajectory_ids=["traj_unknown"])

    with pytest.raises(NotFound):
        stage.values.call("GetTokenValues", request, 30)


def test_pi0_itself_is_calibrated_at_the_rate_of_the_prompt(stage: Stage) -> None:
    found = stage.calibration(positions=2)

    assert sum(curve_bin.outcomes for curve_bin in found.bins) == 16 * 2, (
        "equal samples are stored once and count as often"
    )
    assert len(found.bins) == 1, "Q_t is Qhat_0 everywhere"
    assert found.bins[0].observed == pytest.approx(4 / 16)
    assert found.expected_calibration_error == pytest.approx(0, abs=1e-6)
    assert found.brier_score == pytest.approx(found.brier_score_of_qhat_0)


def test_fresh_continuations_of_pi0_go_on_from_prefixes_and_enter_no_buffer(stage: Stage) -> None:
    before, calls = len(stage.trajectories()), len(stage.engine.calls)

    found = stage.calibration(positions=2, continuations=4, prompts=[PROMPT])

    asked = stage.engine.calls[calls:]
    assert found.prefixes == 2 * before
    assert {call.sampling.samples for call in asked} == {4}
    assert {len(call.response_prefix_token_ids) for call in asked} != {0}
    assert all(call.policy_version == 0 and call.HasField("policy_version") for call in asked)
    assert len(stage.trajectories()) == before


def test_a_run_that_has_ended_gives_no_fresh_continuations(stage: Stage) -> None:
    stage.store.client.set(redis_keys.run_state(RUN), "succeeded")

    with pytest.raises(PreconditionFailed, match="ended"):
        stage.calibration(continuations=2, prompts=[PROMPT])


@pytest.mark.parametrize(
    "fields", [{"positions": -1}, {"continuations": 2}, {"trajectories": -5}], ids=["positions", "prompts", "count"]
)
def test_an_impossible_calibration_is_refused(stage: Stage, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidInput):
        stage.calibration(**fields)


def test_a_run_without_samples_of_pi0_has_nothing_to_be_measured_by(stage: Stage) -> None:
    stage.store.client.delete(redis_keys.run_values(RUN))

    with pytest.raises(PreconditionFailed):
        stage.calibration()


def test_qhat_0_comes_with_its_interval_for_any_beta(stage: Stage) -> None:
    asked = wire.GetPromptValuesRequest(run_id=RUN)
    own = stage.values.call("GetPromptValues", asked).estimates[0]
    asked.beta = 0.1
    other = stage.values.call("GetPromptValues", asked).estimates[0]

    assert -1 <= own.low < own.q < own.high <= 0
    assert own.q < other.q < 0
    assert len(stage.engine.calls) == 1, "no new samples"


def test_cached_reference_logprobs_are_those_of_the_trainers_forward(stage: Stage) -> None:
    model: Any = load_policy(stage.model_path, "float32")

    for sample in stage.trajectories():
        tokens = torch.tensor([[*sample.prompt_token_ids, *sample.response_token_ids]])
        with torch.no_grad():
            logprobs = token_logprobs(model, tokens, torch.ones_like(tokens))[0, len(sample.prompt_token_ids) :]
        # Another batch shape may round differently in the last bit of a float32 sum.
        assert list(sample.reference_logprobs) == pytest.approx(logprobs.tolist(), rel=1e-6)


def test_reference_logprobs_are_those_of_the_trainers_forward_bit_for_bit(stage: Stage) -> None:
    """Sequences of one length, since another shape of batch may round differently."""
    rng = random.Random(0)
    sequences = [[rng.randrange(4, 20) for _ in range(24)] for _ in range(16)]
    asked = [
        wire.TokenSequence(prompt_token_ids=sequence[:8], response_token_ids=sequence[8:]) for sequence in sequences
    ]

    request = wire.ComputeReferenceLogprobsRequest(run_id=RUN, sequences=asked)
    scored = stage.values.call("ComputeReferenceLogprobs", request, 60).sequences

    trajectories = [
        Trajectory(prompt_token_ids=sequence[:8], response_token_ids=sequence[8:]) for sequence in sequences
    ]
    batch = token_batch([TrainingSample(sample, -0.5, 0) for sample in trajectories], BETA, RewardSpec())
    with torch.no_grad():
        own_BL = token_logprobs(load_policy(stage.model_path, "float32"), batch.input_ids_BL, batch.attention_mask_BL)
    assert torch.equal(torch.tensor([list(sample.logprobs) for sample in scored]), own_BL[:, 8:])


def test_a_beta_per_token_is_divided_by_the_tokens_that_the_policy_sampled() -> None:
    per_token, per_sequence = (
        toy_spec({"model": {"path": "/pi0"}, "algorithm": {"beta": 6.0, "beta_per": per}})
        for per in ("token", "sequence")
    )
    assert beta_of(trajectory(0), per_token) == 2.0
    # Of a conversation's six tokens the environment wrote two.
    assert beta_of(conversation(0), per_token) == 1.5
    assert beta_of(trajectory(0), per_sequence) == 6.0
