"""GRPO's relatives in the real learner: cuts into forwards, several updates per batch, rates by effective samples."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.batches import ForwardLimits, TrainingSample, cut_into_minibatches
from services.trainer.learner import Learner, StepResult
from services.trainer.ranks import Ranks
from spo.algorithm.objectives import effective_sample_share
from spo.testing.runs import toy_spec
from spo.testing.trainer import sampled_trajectories
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, Trajectory

# DeepSpeed 0.19 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*:FutureWarning")
RATE = 3e-3


@pytest.fixture(scope="module")
def rows(tiny_model_path: Path) -> list[TrainingSample]:
    """Two groups of four online trajectories whose sampler was a little hotter or colder than the policy."""
    found = sampled_trajectories(tiny_model_path, 8)
    for index, each in enumerate(found):
        each.trajectory.source = SOURCE_ONLINE
        each.trajectory.temperature = each.trajectory.top_p = 1.0
        each.trajectory.reward = -float(index % 4 != 0)
        each.trajectory.sampling_logprobs[:] = [
            (0.97 if place % 2 else 1.02) * logprob for place, logprob in enumerate(each.trajectory.reference_logprobs)
        ]
    return [TrainingSample(each.trajectory, each.qhat_0, index // 4) for index, each in enumerate(found)]


def learned(
    ranks: Ranks,
    model_path: Path,
    rows: list[TrainingSample],
    term: dict[str, Any],
    overlong: dict[str, Any] | None = None,
    **trainer: Any,
) -> tuple[StepResult, dict[str, Tensor]]:
    spec = toy_spec(
        {
            "model": {"path": str(model_path)},
            "algorithm": {"beta": 0.1, "losses": [term], "overlong": overlong},
            "value": None,
            "rollout": {"temperature": 1.0, "top_p": 1.0},
            "offline": {"human_solutions": False, "keep_reference_samples": False},
            "replay": {"mix": [{"source": "online", "share": 1.0}], "unit": "group"},
            "trainer": {"batch_size": 8, "learning_rate": RATE, **trainer},
        }
    )
    limits = ForwardLimits.of(spec.trainer, packed=True)
    whole_groups = spec.algorithm.needs_groups
    (share,) = cut_into_minibatches(rows, spec.trainer.minibatches, 1, limits, whole_groups=whole_groups)
    with closing(Learner(ranks, spec)) as learner:
        result = learner.learn(share, RATE)
        return result, {name: tensor.clone() for name, tensor in learner.engine.full_parameters()}


def test_the_whole_batchs_numbers_reach_every_forward(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample]
) -> None:
    term = {"objective": "reinforce_plus_plus_baseline"}
    whole, _ = learned(ranks, tiny_model_path, rows, term)
    parts, _ = learned(ranks, tiny_model_path, rows, term, micro_batch_size=4)
    assert (whole.refused, parts.refused) == ("", "")
    assert parts.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)
    assert parts.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("objective", ["dr_grpo", "dapo"])
def test_rows_without_gradient_are_skipped_and_the_update_is_the_same(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample], objective: str
) -> None:
    without = [
        TrainingSample(Trajectory.FromString(row.trajectory.SerializeToString()), 0.0, row.group) for row in rows
    ]
    for row in without[4:]:
        row.trajectory.reward = -1.0
    term = {"objective": objective}
    whole, weights = learned(ranks, tiny_model_path, without, term)
    skipping, same = learned(ranks, tiny_model_path, without, term, skip_rows="without_gradient")

    assert (skipping.refused, skipping.metrics["skipped"]) == ("", 0.5)
    for name in ("loss", "grad_norm"):
        assert skipping.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-4)
    assert all(torch.allclose(weights[name], same[name], atol=1e-6) for name in weights)


def test_the_ratio_of_a_corrected_loss_counts_from_the_policy_before_the_first_update(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample]
) -> None:
    """Of the first update the ratio is 1, so that a narrow clip takes nothing; of the second one it takes most."""
    term = {"objective": "dr_grpo", "correction": "truncate", "clip": 1e-9}
    once, first = learned(ranks, tiny_model_path, rows, term)
    twice, second = learned(ranks, tiny_model_path, rows, term, epochs=2)
    assert (once.updates, twice.updates, twice.refused) == (1, 2, "")
    assert once.metrics["grad_norm"] > 0
    # The mean over both updates: the second one's tokens are mostly past the clip.
    assert twice.metrics["grad_norm"] < once.metrics["grad_norm"]
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_the_rate_follows_the_root_of_the_effective_sample_share(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample]
) -> None:
    term = {"objective": "dapo"}
    plain, _ = learned(ranks, tiny_model_path, rows, term)
    scaled, _ = learned(ranks, tiny_model_path, rows, term, scale_rate_by_effective_samples=True)
    # Before the first step the policy is the reference.
    weights = [sum(row.trajectory.reference_logprobs) - sum(row.trajectory.sampling_logprobs) for row in rows]
    share = effective_sample_share(weights)
    assert 0.2 < share < 0.999
    assert scaled.metrics["effective_sample_share"] == pytest.approx(share, rel=1e-3)
    assert plain.metrics["learning_rate"] == RATE
    assert scaled.metrics["learning_rate"] == pytest.approx(RATE * math.sqrt(share), rel=1e-3)
    assert {
        "residual_positive",
        "residual_large",
        "log_ratio_per_token",
        "kl_to_sampler",
        "entropy",
    } <= scaled.metrics.keys()


@pytest.mark.parametrize("kind", ["filter", "shape"])
def test_responses_that_were_cut_off_teach_nothing_or_less(
    ranks: Ranks, tiny_model_path: Path, rows: list[TrainingSample], kind: str
) -> None:
    term = {"objective": "dr_grpo"}
    whole, _ = learned(ranks, tiny_model_path, rows, term)
    cut = []
    for row in rows:
        trajectory = Trajectory.FromString(row.trajectory.SerializeToString())
        trajectory.finish_reason = FINISH_REASON_LENGTH
        cut.append(TrainingSample(trajectory, row.qhat_0, row.group))
    overlong = {"kind": kind, "buffer_tokens": 44}

    found, _ = learned(ranks, tiny_model_path, cut, term, overlong=overlong)

    assert [row.trajectory.reward for row in cut] == [row.trajectory.reward for row in rows]
    if kind == "filter":
        assert (found.metrics["loss"], found.metrics["grad_norm"]) == (0.0, 0.0)
    else:
        assert found.metrics["grad_norm"] != pytest.approx(whole.metrics["grad_norm"])
        rewards = [result.metrics["q_terminal"] - result.metrics["residual"] for result in (found, whole)]
        assert rewards[0] < rewards[1]
