"""The real trainer under an anchor that moves: each trajectory is learned from by the numbers of its own anchor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from services.trainer.batches import ReplayClient
from spo.model.logprobs import load_policy, response_logprobs
from spo.rpc.client import RpcClient
from spo.spec.job_spec import JobSpec
from spo.spec.reward import qhat_0_of_group
from spo.testing.runs import toy_spec
from spo.testing.trainer import TrajectoryPool, served
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2 import SampleBatchResponse
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.weights.store import WeightStore
from tests.integration.trainer.trainer_bench import Bench

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")

REWARDS = [0.0, 0.0, -1.0, -1.0]


def anchored_spec(model_path: Path, reference: str) -> JobSpec:
    return toy_spec(
        {
            "model": {"path": str(model_path)},
            "algorithm": {
                "beta": 0.05,
                "value_beta": 1.0,
                "reference_refresh": {"interval_steps": 3, "values": "rollouts"},
            },
            "rollout": {"temperature": 1.0, "top_p": 1.0},
            "trainer": {
                "steps": 6,
                "batch_size": 8,
                "micro_batch_size": 4,
                "learning_rate": 3e-3,
                "warmup_steps": 1,
                "update_interval": 3,
                "checkpoint_interval": 6,
                "reference": reference,
            },
        }
    )


class Sampled:
    """Makes every trajectory of a batch one that version 1 sampled, in a group of four with REWARDS."""

    def __init__(self, bench: Bench, model_path: Path) -> None:
        self.store = WeightStore(bench.job.state_path / "weights")
        self.run_id, self.model = bench.job.run_id, load_policy(model_path, "float32")

    def __call__(self, step: int, batch: SampleBatchResponse) -> None:
        if step != 4:
            return
        files = self.store.open(self.run_id, 1).files
        self.model.load_state_dict({name: tensor for file in files for name, tensor in load_file(file).items()})
        sequences = [(each.trajectory.prompt_token_ids, each.trajectory.response_token_ids) for each in batch.batch]
        prompts, responses = zip(*sequences, strict=True)
        logprobs = response_logprobs(self.model, prompts, responses, max_tokens_per_batch=4096)
        for sampled, own in zip(batch.batch, logprobs, strict=True):
            trajectory = sampled.trajectory
            trajectory.source = SOURCE_ONLINE
            trajectory.policy_version_first = trajectory.policy_version_last = 1
            trajectory.sampling_logprobs[:] = own
            trajectory.reference_logprobs[:] = own
            trajectory.anchor.policy_version = 1
            trajectory.anchor.rewards[:] = REWARDS


@pytest.mark.parametrize("reference", ["cached", "in_trainer"])
def test_rollouts_of_a_version_begin_at_its_value_and_old_ones_keep_pi0s(
    bench: Bench, tiny_model_path: Path, reference: str
) -> None:
    spec = anchored_spec(tiny_model_path, reference)
    bench.job.spec, bench.pool.spoil = spec, Sampled(bench, tiny_model_path)

    assert not bench.train_until_finished().error_code

    metrics, of_group = bench.job.metrics, qhat_0_of_group(REWARDS, spec.algorithm)
    # Step 3 still learns from pi0's, by which the policy has moved.
    assert abs(metrics[3]["log_ratio"]) > 0.05
    assert metrics[3]["q_terminal"] == pytest.approx(-0.3 + 0.05 * metrics[3]["log_ratio"], abs=1e-4)
    # Version 1 is what step 4 begins with: nothing has moved from this anchor yet, and Qhat_0 is its group's.
    assert metrics[4]["log_ratio"] == pytest.approx(0, abs=1e-3)
    assert metrics[4]["q_terminal"] == pytest.approx(of_group, abs=1e-4)
    assert -0.5 < of_group < -0.3
    # A batch later old trajectories are learned from again, by their own numbers.
    assert metrics[5]["q_terminal"] == pytest.approx(-0.3 + 0.05 * metrics[5]["log_ratio"], abs=1e-4)


def test_a_prompt_without_a_value_under_the_reference_is_left_out_and_never_valued_by_pi0(
    trajectories: list[Any], tiny_model_path: Path
) -> None:
    pool = TrajectoryPool(trajectories)  # type: ignore[abstract]
    spec = anchored_spec(tiny_model_path, "in_trainer")
    with served(pool) as address:
        client = RpcClient("replay-buffer", address, ReplayServiceStub)
        replay = ReplayClient(client, "job_test", spec)
        everything = replay.sample(1, 0, 0.0, None)
        dropped = everything[0].trajectory.prompt_id
        kept = {row.trajectory.prompt_id: -0.1 for row in everything if row.trajectory.prompt_id != dropped}

        found, nothing = replay.sample(1, 0, 0.0, kept), replay.sample(1, 0, 0.0, {})
        client.close()

    assert [row.qhat_0 for row in everything] == pytest.approx([-0.3] * 8)
    assert [row.trajectory.trajectory_id for row in found] == [
        row.trajectory.trajectory_id for row in everything if row.trajectory.prompt_id != dropped
    ]
    assert {row.qhat_0 for row in found} == {-0.1}
    assert nothing == []
