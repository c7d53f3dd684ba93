"""DPO, KTO and distillation against readings with loops and floats, in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from spo.algorithm.objectives import TokenBatch, spo_loss, trajectory_losses
from spo.algorithm.registry import LossTerm

BETA = 0.3
LENGTHS = (2, 3, 1, 4, 3, 2)
WIDTH = 6
REWARDS = (0.0, -1.0, -0.5, 0.0, 0.0, -1.0)
# A group of three with three pairs, one without contrast, one alone.
GROUPS = (7, 7, 7, 1, 1, 4)


def draw(seed: int) -> torch.Tensor:
    values_BL = -3 * torch.rand(len(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask(), values_BL, math.nan)


def mask() -> torch.Tensor:
    return torch.arange(WIDTH)[None, :] < torch.tensor(LENGTHS)[:, None]


def make_batch() -> TokenBatch:
    rows = len(LENGTHS)
    return TokenBatch(
        input_ids_BL=torch.zeros(rows, WIDTH, dtype=torch.long),
        attention_mask_BL=torch.ones(rows, WIDTH, dtype=torch.bool),
        response_mask_BL=mask(),
        reference_logprobs_BL=draw(1),
        sampling_logprobs_BL=draw(2),
        reward_B=torch.tensor(REWARDS, dtype=torch.float64),
        qhat_0_B=torch.zeros(rows, dtype=torch.float64),
        source_B=torch.ones(rows, dtype=torch.long),
        group_B=torch.tensor(GROUPS),
    )


def responses(values_BL: torch.Tensor) -> list[list[float]]:
    return [values_BL[row, :length].tolist() for row, length in enumerate(LENGTHS)]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def implicit_rewards(logprobs: list[list[float]]) -> list[float]:
    references = responses(draw(1))
    return [BETA * (sum(now) - sum(ref)) for now, ref in zip(logprobs, references, strict=True)]


def read_dpo(logprobs: list[list[float]], frozen: list[list[float]]) -> float:
    """Rafailov et al. 2023, Eq. 7: the mean over a prompt's pairs, each prompt with the weight of its trajectories."""
    h = implicit_rewards(logprobs)
    total = 0.0
    for group in set(GROUPS):
        members = [row for row in range(len(h)) if GROUPS[row] == group]
        pairs = [(w, loser) for w in members for loser in members if REWARDS[w] > REWARDS[loser]]
        if pairs:
            total += len(members) * sum(-math.log(sigmoid(h[w] - h[loser])) for w, loser in pairs) / len(pairs)
    return total / len(h)


def read_kto(logprobs: list[list[float]], frozen: list[list[float]]) -> float:
    """Ethayarajh et al. 2024, Eq. 7 and 8; the reference point is of the prompt's other responses."""
    h, fixed = implicit_rewards(logprobs), implicit_rewards(frozen)
    total = 0.0
    for row in range(len(h)):
        others = [fixed[other] for other in range(len(h)) if GROUPS[other] == GROUPS[row] and other != row]
        z = max(0.0, sum(others) / len(others)) if others else 0.0
        total += 1 - sigmoid(h[row] - z) if REWARDS[row] >= -0.5 else 1.5 * (1 - sigmoid(z - h[row]))
    return total / len(h)


def read_distillation(logprobs: list[list[float]], frozen: list[list[float]]) -> float:
    """Per token: reward ln pi_teacher - ln pi, no look ahead, PPO's clip over pi / pi_sampler."""
    total = 0.0
    given = zip(logprobs, frozen, responses(draw(1)), responses(draw(2)), strict=True)
    for now_T, frozen_T, teacher_T, old_T in given:
        row = 0.0
        for now, fixed, teacher, old in zip(now_T, frozen_T, teacher_T, old_T, strict=True):
            weight = math.exp(now - old)
            row -= min(weight * (teacher - fixed), min(max(weight, 0.8), 1.2) * (teacher - fixed))
        total += row / len(now_T)
    return total / len(logprobs)


Reading = Callable[[list[list[float]], list[list[float]]], float]
READINGS: dict[str, tuple[LossTerm, Reading]] = {
    "dpo": (LossTerm(objective="dpo"), read_dpo),
    "kto": (LossTerm(objective="kto", desirable_reward=-0.5, undesirable_weight=1.5), read_kto),
    "distillation": (LossTerm(objective="distillation"), read_distillation),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_loss_equals_the_reading_of_its_paper_in_value_and_gradient(name: str) -> None:
    term, read = READINGS[name]
    logprobs_BL = draw(3).requires_grad_()
    loss, _ = spo_loss(logprobs_BL, make_batch(), [term], BETA)
    loss.backward()
    frozen = responses(logprobs_BL.detach())
    assert loss.item() == pytest.approx(read(frozen, frozen), rel=1e-12)
    assert logprobs_BL.grad is not None
    for row, length in enumerate(LENGTHS):
        for position in range(length):
            values = []
            for step in (1e-6, -1e-6):
                moved = [list(each) for each in frozen]
                moved[row][position] += step
                values.append(read(moved, frozen))
            slope = (values[0] - values[1]) / 2e-6
            assert logprobs_BL.grad[row, position].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_dpo_on_one_pair_is_the_loss_of_the_pair() -> None:
    batch, logprobs_BL = make_batch().select(slice(0, 2)), draw(3)[:2]
    h = implicit_rewards(responses(draw(3)))
    loss, _ = spo_loss(logprobs_BL, batch, [LossTerm(objective="dpo")], BETA)
    assert loss.item() == pytest.approx(-math.log(sigmoid(h[0] - h[1])))


def test_preferences_shift_no_reference_point_of_a_prompt_whose_rewards_are_equal() -> None:
    batch = replace(make_batch(), reward_B=torch.full((len(LENGTHS),), -1.0, dtype=torch.float64))
    assert not trajectory_losses(draw(3), batch, LossTerm(objective="dpo"), BETA).any()


def test_a_teacher_of_its_own_takes_the_references_place() -> None:
    """The reading asks the reference: a batch whose two models have changed places must read the same."""
    batch, logprobs_BL = make_batch(), draw(3)
    swapped = replace(batch, reference_logprobs_BL=draw(5), teacher_logprobs_BL=batch.reference_logprobs_BL)
    loss, _ = spo_loss(logprobs_BL, swapped, [LossTerm(objective="distillation")], BETA)
    frozen = responses(logprobs_BL)
    assert loss.item() == pytest.approx(read_distillation(frozen, frozen), rel=1e-12)


def test_distillation_at_the_teacher_teaches_nothing_more() -> None:
    batch = make_batch()
    logprobs_BL = batch.reference_logprobs_BL.clone().requires_grad_()
    spo_loss(logprobs_BL, batch, [LossTerm(objective="distillation")], BETA)[0].backward()
    assert logprobs_BL.grad is not None
    assert not logprobs_BL.grad[mask()].any()
