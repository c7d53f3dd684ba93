"""The numbers of a step: scores and their parts, over the verdicts that have them."""

from __future__ import annotations

import sys

import pytest
import torch

from services.trainer.batches import (
    MOST_PARTS,
    MOST_SOURCES,
    ForwardLimits,
    TrainingSample,
    WeightedMeans,
    batch_metrics,
    cut_into_minibatches,
    faults,
    policy_metrics,
    token_batch,
)
from spo.algorithm.objectives import TokenBatch
from spo.spec.job_spec import RewardSpec
from spo.spec.section import AlgorithmSpec
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2 import SampleBatchResponse, SampledTrajectory
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.verdict_pb2 import Outcome, PartScore, Verdict


class Row:
    """What the metrics read of a sample."""

    def __init__(self, score: float | None, **parts: float) -> None:
        named = [PartScore(name=name, score=value) for name, value in parts.items()]
        verdict = Verdict(outcome=Outcome.OUTCOME_WRONG_ANSWER, score=score, parts=named)
        self.trajectory = Trajectory(source=SOURCE_ONLINE, reward=-0.5, verdict=verdict, response_token_ids=[1])
        self.response_tokens = 1


def metrics_of(*rows: Row) -> dict[str, float]:
    samples: list[TrainingSample] = list(rows)  # type: ignore[arg-type]
    return batch_metrics(samples, 1)


def test_scores_and_parts_are_means_over_what_has_them() -> None:
    found = metrics_of(Row(0.5, right=1.0, style=0.0), Row(0.0, right=0.0), Row(None))

    assert found["score"] == 0.25
    assert found["score/right"] == pytest.approx(0.5)
    assert found["score/style"] == 0.0
    assert found["reward"] == -0.5
    assert not [name for name in metrics_of(Row(None)) if name.startswith("score")]


def test_a_function_that_names_a_score_for_each_response_makes_so_many_curves_and_no_more() -> None:
    found = metrics_of(*(Row(0.5, **{f"part{number:03}": 1.0}) for number in range(100)))

    assert sum(name.startswith("score/") for name in found) == MOST_PARTS


def test_residuals_are_told_by_the_source_that_said_the_reward() -> None:
    means = WeightedMeans()
    means.add_by_source(["west", "", "east", "west"], [0.5, 9.0, 0.25, 1.0])

    assert means.means([means]) == {"residual_abs/west": 0.75, "residual_abs/east": 0.25}
    means.add_by_source([f"source{number:03}" for number in range(100)], [1.0] * 100)
    assert len(means.sums) == 2 + MOST_SOURCES


def batch_of(groups: list[int], rewards: list[float], reference_nats: list[float]) -> TokenBatch:
    """Responses of one token each, whose reference log-probs are told."""
    rows = len(groups)
    one_B1 = torch.ones(rows, 1, dtype=torch.bool)
    return TokenBatch(
        input_ids_BL=torch.zeros(rows, 1, dtype=torch.long),
        attention_mask_BL=one_B1,
        response_mask_BL=one_B1,
        reference_logprobs_BL=torch.tensor(reference_nats)[:, None],
        sampling_logprobs_BL=torch.zeros(rows, 1),
        reward_B=torch.tensor(rewards),
        qhat_0_B=torch.zeros(rows),
        source_B=torch.ones(rows, dtype=torch.long),
        group_B=torch.tensor(groups),
    )


def test_a_job_of_preferences_tells_its_margin_and_how_many_pairs_it_has_right() -> None:
    dpo = AlgorithmSpec.model_validate({"beta": 0.5, "losses": [{"objective": "dpo"}]})
    # Two pairs and a row without one: log-ratios of 2 against 0, of 0 against 1, and 9.
    batch = batch_of([1, 1, 2, 2, 3], [0.0, -1.0, -1.0, 0.0, 0.0], [-3.0, -1.0, -2.0, -1.0, -10.0])
    logprobs_BL = torch.tensor([[-1.0], [-1.0], [-1.0], [-1.0], [-1.0]])

    found = policy_metrics(logprobs_BL, batch, dpo)

    assert found["preference_margin"] == pytest.approx(0.5 * (2.0 + (0.0 - 1.0)) / 2)
    assert found["preference_accuracy"] == 0.5
    assert "kl_to_reference" in found
    alone = batch_of([1, 2], [0.0, -1.0], [-1.0, -1.0])
    assert not [name for name in policy_metrics(logprobs_BL[:2], alone, dpo) if name.startswith("preference")]
    others = AlgorithmSpec.model_validate({"losses": [{"objective": "group_centred_squared"}]})
    assert not [name for name in policy_metrics(logprobs_BL, batch, others) if name.startswith("preference")]


def long_row(index: int, tokens: int) -> TrainingSample:
    trajectory = Trajectory(
        trajectory_id=str(index),
        prompt_id=str(index),
        source=SOURCE_ONLINE,
        reward=-1.0,
        prompt_token_ids=[1] * 8,
        response_token_ids=[2] * tokens,
        sampling_logprobs=[-0.5] * tokens,
        reference_logprobs=[-0.5] * tokens,
    )
    return TrainingSample(trajectory, -0.5, index)


@pytest.mark.parametrize("step", ["decoded and checked", "cut and made tensors", "measured"])
def test_what_a_batch_takes_before_its_first_forward_are_no_steps_of_python_for_each_token(step: str) -> None:
    def calls(tokens: int) -> int:
        rows = [long_row(index, tokens) for index in range(4)]
        message = SampleBatchResponse(batch=[SampledTrajectory(trajectory=row.trajectory) for row in rows])
        raw, found = message.SerializeToString(), 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            match step:
                case "decoded and checked":
                    batch = SampleBatchResponse.FromString(raw).batch
                    rows = [TrainingSample(each.trajectory, -0.5, index) for index, each in enumerate(batch)]
                    assert not faults(rows, cached_reference=True, behaviour=True)
                case "cut and made tensors":
                    (own,) = cut_into_minibatches(rows, 1, 1, ForwardLimits(2 * tokens), whole_groups=False)
                    for minibatch in own:
                        for micro_batch in minibatch.micro_batches:
                            token_batch(micro_batch.rows, 0.2, RewardSpec())
                case _:
                    batch_metrics(rows, 1)
        finally:
            sys.setprofile(None)
        return found

    assert calls(4096) <= calls(64) + 100
