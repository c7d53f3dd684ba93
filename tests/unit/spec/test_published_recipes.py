"""The published recipes are what their sources say, and learn from a batch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml

from services.trainer.batches import TrainingSample, token_batch
from spo.algorithm.objectives import spo_loss
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.reward import qhat_0, qhat_0_of_group
from spo.spec.section import learning_rate_at
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_REFERENCE
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_pb2 import PromptValue

FOLDER = Path(__file__).parents[3] / "deploy" / "recipes" / "published"
NAMES = ["a_star_po", "oapl_offline", "oapl_online", "pmd_mean", "qrpo", "tba"]
REWARDS = [0.0, -1.0, -1.0, -1.0]


def recipe(name: str) -> JobSpec:
    return parse_job_spec(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))


def value_of(spec: JobSpec) -> float:
    """Qhat_0 of a prompt of which a quarter of the samples are right, from where the job has it."""
    if spec.value is None:
        return qhat_0_of_group(REWARDS, spec.algorithm)
    found = qhat_0(PromptValue(samples=8, successes=2), spec)
    assert found
    return found.q


def test_these_are_all_of_them() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_pushes_what_is_right_up_and_what_is_wrong_down(name: str) -> None:
    spec = recipe(name)
    live = any(part.source == "online" for part in spec.replay.mix)
    rows = [
        TrainingSample(
            Trajectory(
                trajectory_id=str(number),
                source=SOURCE_ONLINE if live else SOURCE_REFERENCE,
                prompt_token_ids=[1, 2],
                response_token_ids=range(3, 7 + number),
                reference_logprobs=[-1.0] * (4 + number),
                sampling_logprobs=[-1.0] * (4 + number),
                reward=reward,
            ),
            value_of(spec),
            group=0,
        )
        for number, reward in enumerate(REWARDS)
    ]
    batch = token_batch(rows, spec.algorithm.temperature_of_values, spec.tasks.reward)
    if spec.algorithm.beta_per == "token":
        batch = batch.with_beta_per_token()
    logprobs_BL = batch.reference_logprobs_BL.clone().requires_grad_()

    loss, _ = spo_loss(logprobs_BL, batch, spec.algorithm.losses, spec.algorithm.beta)
    loss.backward()

    assert torch.isfinite(loss)
    assert logprobs_BL.grad is not None
    slope_B = logprobs_BL.grad.sum(dim=1) / batch.response_lengths
    # The policy is the anchor still, so that the slope of a log-prob is Qhat_0 - r, over the size of the batch.
    assert slope_B[0] < 0 < slope_B[1:].min()
    at = spec.algorithm.temperature_of_values
    assert value_of(spec) == pytest.approx(at * math.log(0.25 + 0.75 * math.exp(-1 / at)), abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_the_sources(name: str) -> None:
    spec = recipe(name)
    algorithm, trainer = spec.algorithm, spec.trainer
    assert (algorithm.beta, algorithm.value_beta, trainer.learning_rate, trainer.batch_size) == {
        "a_star_po": (0.001, 0.5, 1e-6, 256),
        "oapl_offline": (0.001, 1.0, 1e-6, 256),
        "oapl_online": (0.001, 1.0, 1e-6, 256),
        "pmd_mean": (0.01, 100.0, 1e-6, 512),
        "qrpo": (5.0, 0.03, 5e-7, 128),
        "tba": (0.012, None, 1e-5, 160),
    }[name]


def test_the_rate_of_the_offline_round_warms_up_for_two_percent_and_falls_to_five() -> None:
    trainer = recipe("oapl_offline").trainer
    rates = [learning_rate_at(step, trainer) for step in range(1, trainer.steps + 1)]
    assert rates.index(max(rates)) + 1 == 0.02 * trainer.steps
    assert rates[-1] == pytest.approx(0.05 * trainer.learning_rate, rel=0.01)
    assert trainer.adam_betas == (0.9, 0.95)
