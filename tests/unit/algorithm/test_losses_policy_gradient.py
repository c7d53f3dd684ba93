"""The policy-gradient baselines against readings with loops and floats, on padded random trajectories."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from spo.algorithm.baselines import (
    clipped_surrogate,
    generalised_advantages,
    group_advantages,
    kl_regularised_rewards,
    soft_policy_gradient,
    supervised,
    value_loss,
)
from spo.algorithm.objectives import TokenBatch, spo_loss, terminal_squared, trajectory_losses
from spo.algorithm.registry import LossTerm
from spo.errors import InvalidInput

BETA = 0.3
LENGTHS = (4, 1, 6, 3)
STARTS = (2, 0, 1, 3)
WIDTH = 8


def draw(seed: int, low: float, high: float) -> torch.Tensor:
    """Random numbers on response tokens, nan elsewhere: whoever reads padding, shows it."""
    generator = torch.Generator().manual_seed(seed)
    values_BL = low + (high - low) * torch.rand(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    return torch.where(response_mask(), values_BL, math.nan)


def response_mask() -> torch.Tensor:
    mask_BL = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.bool)
    for row, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        mask_BL[row, start : start + length] = True
    return mask_BL


def make_batch() -> TokenBatch:
    rows = len(LENGTHS)
    return TokenBatch(
        input_ids_BL=torch.zeros(rows, WIDTH, dtype=torch.long),
        attention_mask_BL=torch.ones(rows, WIDTH, dtype=torch.bool),
        response_mask_BL=response_mask(),
        reference_logprobs_BL=draw(1, -3, 0),
        sampling_logprobs_BL=draw(2, -3, 0),
        reward_B=torch.tensor([0.0, -1.0, -0.25, -0.5], dtype=torch.float64),
        qhat_0_B=torch.tensor([-0.3, -0.3, -0.7, -0.7], dtype=torch.float64),
        source_B=torch.ones(rows, dtype=torch.long),
        group_B=torch.tensor([5, 5, 2, 2]),
        critic_advantage_BL=draw(4, -1, 1),
    )


def responses(values_BL: torch.Tensor) -> list[list[float]]:
    return [values_BL[row, s : s + n].tolist() for row, (s, n) in enumerate(zip(STARTS, LENGTHS, strict=True))]


def assert_equals_reading(found_BL: torch.Tensor, read: list[list[float]]) -> None:
    for found, expected in zip(responses(found_BL), read, strict=True):
        assert found == pytest.approx(expected, abs=1e-12)
    assert not found_BL[~response_mask()].any()


def read_surrogate(logprobs: list[float], behaviour: list[float], advantage: list[float], clip: float) -> list[float]:
    losses = []
    for lp, old, a in zip(logprobs, behaviour, advantage, strict=True):
        weight = math.exp(lp - old)
        losses.append(-min(weight * a, min(max(weight, 1 - clip), 1 + clip) * a))
    return losses


def test_the_clipped_surrogate_equals_its_reading() -> None:
    batch, logprobs_BL, advantage_BL = make_batch(), draw(3, -3, 0), draw(4, -1, 1)
    rows = zip(*map(responses, (logprobs_BL, batch.sampling_logprobs_BL, advantage_BL)), strict=True)
    read = [read_surrogate(*row, clip=0.2) for row in rows]
    assert_equals_reading(clipped_surrogate(logprobs_BL, batch, advantage_BL, clip=0.2), read)


def test_the_surrogate_stops_pulling_once_the_policy_has_moved_past_the_clip() -> None:
    batch = make_batch()
    for shift, advantage, pulls in [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False)]:
        logprobs_BL = (batch.sampling_logprobs_BL + shift).requires_grad_()
        advantage_BL = torch.full_like(logprobs_BL, advantage)
        clipped_surrogate(logprobs_BL, batch, advantage_BL, clip=0.2).sum().backward()
        assert logprobs_BL.grad is not None
        expected = -advantage * math.exp(shift) if pulls else 0.0
        torch.testing.assert_close(logprobs_BL.grad, torch.where(response_mask(), expected, 0.0).double())


def test_on_policy_the_surrogate_has_the_gradient_of_the_plain_policy_gradient() -> None:
    batch, advantage_BL = make_batch(), draw(4, -1, 1)
    logprobs_BL = batch.sampling_logprobs_BL.clone().requires_grad_()
    clipped_surrogate(logprobs_BL, batch, advantage_BL, clip=0.2).sum().backward()
    torch.testing.assert_close(logprobs_BL.grad, torch.where(response_mask(), -advantage_BL, 0.0))


def test_kl_regularised_rewards_equal_their_reading_and_sum_to_the_regularised_return() -> None:
    batch, logprobs_BL = make_batch(), draw(3, -3, 0)
    read = []
    for row, (lp, ref) in enumerate(zip(responses(logprobs_BL), responses(batch.reference_logprobs_BL), strict=True)):
        rewards = [-BETA * (p - p0) for p, p0 in zip(lp, ref, strict=True)]
        rewards[-1] += batch.reward_B[row].item()
        read.append(rewards)
    assert_equals_reading(kl_regularised_rewards(logprobs_BL, batch, BETA), read)


def test_a_response_without_tokens_has_no_place_for_its_reward() -> None:
    batch = replace(make_batch(), response_mask_BL=torch.zeros(len(LENGTHS), WIDTH, dtype=torch.bool))
    with pytest.raises(InvalidInput, match="without response"):
        kl_regularised_rewards(draw(3, -3, 0), batch, BETA)


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0)])
def test_generalised_advantages_equal_the_sum_of_discounted_errors(discount: float, trace: float) -> None:
    reward_BL, value_BL = draw(5, -1, 0), draw(6, -1, 0)
    read_advantages, read_returns = [], []
    for rewards, values in zip(responses(reward_BL), responses(value_BL), strict=True):
        after = [*values[1:], 0.0]
        errors = [r + discount * v2 - v for r, v, v2 in zip(rewards, values, after, strict=True)]
        row = [
            sum((discount * trace) ** (s - t) * errors[s] for s in range(t, len(errors))) for t in range(len(errors))
        ]
        read_advantages.append(row)
        read_returns.append([a + v for a, v in zip(row, values, strict=True)])

    advantage_BL, return_BL = generalised_advantages(
        reward_BL, value_BL, response_mask(), discount=discount, trace=trace
    )

    assert_equals_reading(advantage_BL, read_advantages)
    assert_equals_reading(return_BL, read_returns)


def test_the_value_loss_pulls_the_value_towards_the_return_and_nothing_else() -> None:
    value_BL, return_BL = draw(6, -1, 0).requires_grad_(), draw(7, -1, 0).requires_grad_()
    value_loss(value_BL, return_BL, response_mask()).sum().backward()
    torch.testing.assert_close(value_BL.grad, torch.where(response_mask(), value_BL - return_BL, 0.0).detach())
    assert return_BL.grad is None


def test_group_relative_advantages_equal_their_reading() -> None:
    batch = make_batch()
    deviations = [statistics.stdev([0.0, -1.0])] * 2 + [statistics.stdev([-0.25, -0.5])] * 2
    centred = [0.5, -0.5, 0.125, -0.125]
    rows = batch.reward_B, batch.group_B
    assert group_advantages(*rows, "group", "none").tolist() == pytest.approx(centred)
    scaled = [c / d for c, d in zip(centred, deviations, strict=True)]
    assert group_advantages(*rows, "group", "deviation").tolist() == pytest.approx(scaled)
    assert group_advantages(*rows, "leave_one_out", "none").tolist() == pytest.approx([1.0, -1.0, 0.25, -0.25])


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    reward_B = torch.tensor([-0.1, -0.1, -1.0, 0.0], dtype=torch.float32)
    assert group_advantages(reward_B, make_batch().group_B, "group", "deviation")[:2].tolist() == [0.0, 0.0]


def test_a_prompt_with_one_trajectory_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(InvalidInput) as refused:
        group_advantages(make_batch().reward_B, torch.tensor([0, 0, 1, 2]), "group", "deviation")
    assert refused.value.code == "lone_group"


def test_the_kl_of_grpo_pulls_back_a_policy_that_left_pi0_by_any_distance() -> None:
    batch = replace(make_batch(), reward_B=torch.zeros(len(LENGTHS), dtype=torch.float64))
    for distance in (0.5, 100.0, 1e5):
        logprobs_BL = (batch.reference_logprobs_BL - distance).requires_grad_()
        trajectory_losses(logprobs_BL, batch, LossTerm(objective="grpo"), BETA).sum().backward()
        assert logprobs_BL.grad is not None
        assert (logprobs_BL.grad[response_mask()] < -0.01).all()
        assert torch.isfinite(logprobs_BL.grad).all()


def test_on_policy_the_soft_policy_gradient_is_the_gradient_of_the_terminal_squared_loss() -> None:
    batch = make_batch()
    gradients = []
    for loss in (
        lambda lp: soft_policy_gradient(lp, batch, BETA, clip=0.2),
        lambda lp: terminal_squared(lp, batch, BETA),
    ):
        logprobs_BL = batch.sampling_logprobs_BL.clone().requires_grad_()
        loss(logprobs_BL).sum().backward()
        gradients.append(logprobs_BL.grad)
    assert gradients[0].abs().max() > 0.1
    torch.testing.assert_close(gradients[0], gradients[1])


def test_off_policy_the_soft_policy_gradient_equals_its_reading() -> None:
    batch, logprobs_BL = make_batch(), draw(3, -3, 0)
    read = []
    for row, lp in enumerate(responses(logprobs_BL)):
        ref, old = responses(batch.reference_logprobs_BL)[row], responses(batch.sampling_logprobs_BL)[row]
        q_terminal = batch.qhat_0_B[row].item() + BETA * (sum(lp) - sum(ref))
        read.append(sum(read_surrogate(lp, old, [batch.reward_B[row].item() - q_terminal] * len(lp), 0.2)))
    assert soft_policy_gradient(logprobs_BL, batch, BETA, clip=0.2).tolist() == pytest.approx(read)


def test_a_star_po_is_the_plain_terminal_squared_loss_with_a_value_of_its_own_temperature() -> None:
    # Brantley et al. 2025: V* = beta1 ln mean exp(r / beta1) of pi0's samples; (beta2 ln pi / pi0 - (r - V*))^2.
    rewards_of_pi0, beta_1 = [0.0, -1.0, -1.0, 0.0, -1.0], 0.5
    value = beta_1 * math.log(sum(math.exp(r / beta_1) for r in rewards_of_pi0) / len(rewards_of_pi0))
    batch = replace(make_batch(), qhat_0_B=torch.full((len(LENGTHS),), value, dtype=torch.float64))
    logprobs_BL = draw(3, -3, 0)
    read = [
        (BETA * (sum(lp) - sum(ref)) - (batch.reward_B[row].item() - value)) ** 2
        for row, (lp, ref) in enumerate(
            zip(responses(logprobs_BL), responses(batch.reference_logprobs_BL), strict=True)
        )
    ]
    assert (2 * BETA * terminal_squared(logprobs_BL, batch, BETA)).tolist() == pytest.approx(read)


def test_the_supervised_loss_is_the_negative_log_likelihood_of_the_response() -> None:
    logprobs_BL = draw(3, -3, 0)
    assert supervised(logprobs_BL, make_batch(), BETA, min_reference_logprob=None).tolist() == pytest.approx(
        [-sum(r) for r in responses(logprobs_BL)]
    )


def test_the_supervised_loss_leaves_out_what_the_reference_finds_absurd() -> None:
    batch = make_batch()
    inside_BL = torch.where(batch.response_mask_BL, batch.reference_logprobs_BL, 0.0)
    means = inside_BL.sum(dim=1) / batch.response_lengths
    logprobs_BL = inside_BL - 0.5
    between = float(means.sort().values[:2].mean())

    whole = supervised(logprobs_BL, batch, BETA, min_reference_logprob=None)
    kept = supervised(logprobs_BL, batch, BETA, min_reference_logprob=between)

    assert torch.equal(kept, torch.where(means >= between, whole, 0.0))
    assert int((kept == 0).sum()) == 1


def read_policy_gradient(live: list[float], frozen: list[float], row: int, batch: TokenBatch) -> float:
    """`frozen` log-probs make the advantage, which carries no gradient."""
    behaviour, reference = (responses(b)[row] for b in (batch.sampling_logprobs_BL, batch.reference_logprobs_BL))
    q_terminal = batch.qhat_0_B[row].item() + BETA * (sum(frozen) - sum(reference))
    return sum(read_surrogate(live, behaviour, [batch.reward_B[row].item() - q_terminal] * len(live), 0.3))


def read_supervised(live: list[float], frozen: list[float], row: int, batch: TokenBatch) -> float:
    return -sum(live)


def read_ppo(live: list[float], frozen: list[float], row: int, batch: TokenBatch) -> float:
    assert batch.critic_advantage_BL is not None
    return sum(
        read_surrogate(live, responses(batch.sampling_logprobs_BL)[row], responses(batch.critic_advantage_BL)[row], 0.3)
    )


def read_grpo(live: list[float], frozen: list[float], row: int, batch: TokenBatch) -> float:
    behaviour, reference = (responses(b)[row] for b in (batch.sampling_logprobs_BL, batch.reference_logprobs_BL))
    group = [r for r, g in zip(batch.reward_B.tolist(), batch.group_B.tolist(), strict=True) if g == batch.group_B[row]]
    advantage = (batch.reward_B[row].item() - statistics.mean(group)) / statistics.stdev(group)
    kl = [math.exp(p0 - p) - (p0 - p) - 1 for p, p0 in zip(live, reference, strict=True)]
    return (sum(read_surrogate(live, behaviour, [advantage] * len(live), 0.3)) + BETA * sum(kl)) / len(live)


READINGS: dict[str, Callable[[list[float], list[float], int, TokenBatch], float]] = {
    "policy_gradient": read_policy_gradient,
    "supervised": read_supervised,
    "ppo": read_ppo,
    "grpo": read_grpo,
}


@pytest.mark.parametrize("objective", READINGS)
def test_a_baseline_as_a_term_of_the_loss_equals_its_reading_in_float32(objective: str) -> None:
    batch, logprobs_BL = make_batch(), draw(3, -3, 0)
    read = [READINGS[objective](lp, lp, row, batch) for row, lp in enumerate(responses(logprobs_BL))]
    assert batch.critic_advantage_BL is not None
    coarse = replace(
        batch,
        reference_logprobs_BL=batch.reference_logprobs_BL.float(),
        sampling_logprobs_BL=batch.sampling_logprobs_BL.float(),
        critic_advantage_BL=batch.critic_advantage_BL.float(),
        reward_B=batch.reward_B.float(),
        qhat_0_B=batch.qhat_0_B.float(),
    )
    loss_B = trajectory_losses(logprobs_BL.float(), coarse, LossTerm(objective=objective, clip=0.3), BETA)
    torch.testing.assert_close(loss_B, torch.tensor(read), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("objective", READINGS)
def test_the_gradient_of_a_baseline_equals_a_finite_difference_of_its_reading(objective: str) -> None:
    batch, logprobs_BL = make_batch(), draw(3, -3, 0).requires_grad_()
    spo_loss(logprobs_BL, batch, [LossTerm(objective=objective, clip=0.3)], BETA)[0].backward()
    assert logprobs_BL.grad is not None
    slopes = []
    for row, logprobs in enumerate(responses(logprobs_BL.detach())):
        moved = [
            [lp + step * (index == t) for index, lp in enumerate(logprobs)]
            for t in range(len(logprobs))
            for step in (1e-6, -1e-6)
        ]
        values = [READINGS[objective](each, logprobs, row, batch) for each in moved]
        slopes.append([(up - down) / 2e-6 / batch.size for up, down in zip(values[::2], values[1::2], strict=True)])
    for found, expected in zip(responses(logprobs_BL.grad), slopes, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert not logprobs_BL.grad[~response_mask()].any()


def test_ppo_without_a_critics_advantages_is_refused() -> None:
    with pytest.raises(InvalidInput) as refused:
        spo_loss(draw(3, -3, 0), replace(make_batch(), critic_advantage_BL=None), [LossTerm(objective="ppo")], BETA)
    assert refused.value.code == "no_critic"
