"""What of section 2 holds with a temperature of the values of its own, and with a beta per token.

Two temperatures: Q is consistent for any Qhat_0 (test_theorems), so for one of another temperature too. At pi* every
residual is then the same number, and a constant has no gradient under samples of the policy itself: on-policy Qhat_0 is
a baseline, and pi* of the regression's beta stays where the loss is stationary.

Per token: with beta / |y| the residuals are 0 together at pi ~ pi0 exp(|y| (r - c) / beta), c the one number for which
that sums to 1; c is the soft value at beta / |y| where all lengths are equal. Paths stay consistent. Q of a prefix
depends on how long the response will be, so it is no value of the prefix, and Theorem 2.2 ends here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from spo.algorithm.objectives import (
    TokenBatch,
    advantages,
    cumulative_q,
    group_centred_squared,
    soft_value,
    terminal_q,
    terminal_squared,
)

thorough = settings(max_examples=40, deadline=None)
temperatures = st.sampled_from([1 / math.log(100_000), 1 / math.log(100), 0.5, 3.0])
values_of_the_prompt = st.floats(-3, 1)
Prefix = tuple[int, ...]


class WorldThatEnds:
    """Responses over `symbols` tokens that end with the first 0 or at `longest`; with ends=False all are that long."""

    def __init__(self, symbols: int, longest: int, seed: int, *, ends: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.symbols, self.longest = symbols, longest
        whole = itertools.product(range(symbols), repeat=longest)
        self.responses = sorted({a[: a.index(0) + 1] if ends and 0 in a else a for a in whole})
        self.prefixes = sorted({a[:t] for a in self.responses for t in range(len(a))})
        self.reference_P = {p: torch.tensor(2 * rng.normal(size=symbols)).log_softmax(0) for p in self.prefixes}
        self.reward_B = torch.tensor(-2 * rng.random(len(self.responses)))
        self.length_B = torch.tensor([float(len(a)) for a in self.responses], dtype=torch.float64)

    def logprobs(self, table: dict[Prefix, Tensor]) -> Tensor:
        """ln pi of each token of each response; (B, L), 0 behind its end."""
        rows = [[table[a[:t]][a[t]] for t in range(len(a))] for a in self.responses]
        zero = torch.zeros((), dtype=torch.float64)
        return torch.stack([torch.stack(row + [zero] * (self.longest - len(row))) for row in rows])

    def batch(self, qhat_0: float) -> TokenBatch:
        mask_BL = torch.arange(self.longest)[None, :] < self.length_B[:, None]
        rows, reference_BL = len(self.responses), self.logprobs(self.reference_P)
        return TokenBatch(
            input_ids_BL=torch.zeros(rows, self.longest, dtype=torch.long),
            attention_mask_BL=mask_BL,
            response_mask_BL=mask_BL,
            reference_logprobs_BL=reference_BL,
            sampling_logprobs_BL=reference_BL,
            reward_B=self.reward_B,
            qhat_0_B=torch.full((rows,), qhat_0, dtype=torch.float64),
            source_B=torch.ones(rows, dtype=torch.long),
            group_B=torch.zeros(rows, dtype=torch.long),
        )

    def tilted(self, exponent_B: Tensor) -> dict[Prefix, Tensor]:
        """The policy pi0 exp(exponent), as a table, of exponents under which it sums to 1."""
        weight_B = (self.logprobs(self.reference_P).sum(dim=1) + exponent_B).exp()
        assert math.isclose(weight_B.sum().item(), 1, abs_tol=1e-9)

        def mass(prefix: Prefix) -> float:
            rows = [row for row, a in enumerate(self.responses) if a[: len(prefix)] == prefix]
            return weight_B[rows].sum().item()

        return {
            p: torch.tensor([math.log(mass((*p, s)) / mass(p)) for s in range(self.symbols)], dtype=torch.float64)
            for p in self.prefixes
        }

    def soft_value(self, beta: float) -> float:
        return soft_value(self.reward_B, self.logprobs(self.reference_P).sum(dim=1), beta).item()

    def constant_per_token(self, beta: float) -> float:
        """c with sum pi0 exp(|y| (r - c) / beta) = 1, by bisection: the sum falls in c."""
        weight_B = self.logprobs(self.reference_P).sum(dim=1)
        low, high = self.reward_B.min().item(), self.reward_B.max().item()
        for _ in range(100):
            middle = (low + high) / 2
            total = torch.logsumexp(weight_B + self.length_B * (self.reward_B - middle) / beta, dim=0)
            low, high = (middle, high) if total > 0 else (low, middle)
        return (low + high) / 2

    def gradient_on_policy(self, table: dict[Prefix, Tensor], batch: TokenBatch, beta: float) -> float:
        """The largest slope, over all logits, of the squared loss of samples of the policy itself."""
        logits_P = {p: logits.clone().requires_grad_() for p, logits in table.items()}
        logprobs_BL = self.logprobs({p: logits.log_softmax(0) for p, logits in logits_P.items()})
        weight_B = logprobs_BL.detach().sum(dim=1).exp()
        (weight_B * terminal_squared(logprobs_BL, batch, beta)).sum().backward()
        return max(float(logits.grad.abs().max()) for logits in logits_P.values() if logits.grad is not None)


worlds = st.builds(WorldThatEnds, st.integers(2, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
even_worlds = st.builds(
    lambda symbols, length, seed: WorldThatEnds(symbols, length, seed, ends=False),
    st.integers(2, 3),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)


@thorough
@given(worlds, temperatures, temperatures)
def test_a_higher_temperature_of_values_lies_between_the_mean_reward_and_the_value(
    world: WorldThatEnds, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    mean = (world.logprobs(world.reference_P).sum(dim=1).exp() * world.reward_B).sum().item()
    assert mean - 1e-9 <= world.soft_value(high) <= world.soft_value(low) + 1e-9
    assert world.soft_value(low) <= world.reward_B.max().item() + 1e-9
    assert math.isclose(world.soft_value(1e4), mean, abs_tol=1e-3)


@thorough
@given(worlds, temperatures, values_of_the_prompt)
def test_on_policy_the_optimum_of_the_regressions_beta_is_stationary_for_any_qhat_0(
    world: WorldThatEnds, beta: float, qhat_0: float
) -> None:
    optimal_P = world.tilted((world.reward_B - world.soft_value(beta)) / beta)
    assert world.gradient_on_policy(optimal_P, world.batch(qhat_0), beta) < 1e-7


@thorough
@given(worlds, temperatures, values_of_the_prompt)
def test_per_token_too(world: WorldThatEnds, per_token: float, qhat_0: float) -> None:
    beta = per_token * world.longest
    c = world.constant_per_token(beta)
    optimal_P = world.tilted(world.length_B * (world.reward_B - c) / beta)
    batch = world.batch(c).with_beta_per_token()

    torch.testing.assert_close(terminal_q(world.logprobs(optimal_P), batch, beta), world.reward_B, atol=1e-7, rtol=0)
    shifted = replace(batch, qhat_0_B=torch.full_like(batch.qhat_0_B, qhat_0))
    assert world.gradient_on_policy(optimal_P, shifted, beta) < 1e-7
    assert group_centred_squared(world.logprobs(optimal_P), shifted, beta).max() < 1e-9


@thorough
@given(worlds, temperatures, values_of_the_prompt)
def test_per_token_the_mean_log_ratio_of_a_token_says_the_residual(
    world: WorldThatEnds, beta: float, qhat_0: float
) -> None:
    table = {p: torch.randn(world.symbols, dtype=torch.float64).log_softmax(0) for p in world.prefixes}
    batch, logprobs_BL = world.batch(qhat_0).with_beta_per_token(), world.logprobs(table)
    ratio_B = (logprobs_BL - batch.reference_logprobs_BL).sum(dim=1) / world.length_B
    torch.testing.assert_close(terminal_q(logprobs_BL, batch, beta), qhat_0 + beta * ratio_B, atol=1e-9, rtol=0)
    # 2.3, along the path of one response.
    q_BL, advantages_BL = cumulative_q(logprobs_BL, batch, beta), advantages(logprobs_BL, batch, beta)
    torch.testing.assert_close(q_BL[:, 1:] - q_BL[:, :-1], advantages_BL[:, 1:], atol=1e-9, rtol=0)


@thorough
@given(even_worlds, temperatures)
def test_where_all_are_as_long_per_token_is_a_beta_of_the_sequence(world: WorldThatEnds, beta: float) -> None:
    per_token = beta * world.longest
    assert math.isclose(world.constant_per_token(per_token), world.soft_value(beta), abs_tol=1e-9)
    logprobs_BL = world.logprobs(world.tilted((world.reward_B - world.soft_value(beta)) / beta))
    batch = world.batch(-0.3)
    of_tokens = cumulative_q(logprobs_BL, batch.with_beta_per_token(), per_token)
    torch.testing.assert_close(of_tokens, cumulative_q(logprobs_BL, batch, beta), atol=1e-9, rtol=0)


def test_per_token_q_of_a_prefix_depends_on_how_the_response_goes_on() -> None:
    world = WorldThatEnds(2, 3, seed=0)
    table = {p: torch.tensor([0.3, 0.7], dtype=torch.float64).log() for p in world.prefixes}
    q_BL = cumulative_q(world.logprobs(table), world.batch(-0.5).with_beta_per_token(), 0.5)
    shorter, longer = world.responses.index((1, 0)), world.responses.index((1, 1, 1))
    # Both have written 1 so far.
    assert abs(q_BL[shorter, 0] - q_BL[longer, 0]) > 1e-3
