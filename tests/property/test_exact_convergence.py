"""The enumerable problem: 4 symbols, length 5, 31 good of 1,024 sequences; the optimum is known exactly.

The policy is a table of logits, one row per prefix, trained with the product's loss on every sequence. What it must
reach is pi* proportional to pi0 exp(r / beta); KL(pi || pi*) says how far it is. A wrong Qhat_0, invisible in
held-out scores, must show here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spo.algorithm.objectives import TokenBatch, spo_loss
from spo.algorithm.registry import LossTerm

Trainer = Callable[[Tensor, Callable[[], Tensor]], None]

SYMBOLS, LENGTH, GOOD = 4, 5, 31
ROWS = SYMBOLS**LENGTH
BETA = 1 / math.log(100_000)
# A prefix of t symbols is row `first_row[t] + its number in base 4` of the table.
FIRST_ROW = [(SYMBOLS**t - 1) // (SYMBOLS - 1) for t in range(LENGTH)]
PREFIXES = sum(SYMBOLS**t for t in range(LENGTH))


@functools.cache
def every_sequence() -> tuple[Tensor, Tensor]:
    """Tokens of all sequences (B, T) and the table row of the prefix before each token (B, T)."""
    number_B = torch.arange(ROWS)
    tokens_BT = torch.stack([number_B // SYMBOLS ** (LENGTH - 1 - t) % SYMBOLS for t in range(LENGTH)], dim=1)
    prefix_BT = torch.stack([FIRST_ROW[t] + number_B // SYMBOLS ** (LENGTH - t) for t in range(LENGTH)], dim=1)
    return tokens_BT, prefix_BT


def logprobs_of(logits_PV: Tensor) -> Tensor:
    tokens_BT, prefix_BT = every_sequence()
    return logits_PV.log_softmax(dim=1)[prefix_BT, tokens_BT]


class EnumerableProblem:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.reference_PV = torch.randn(PREFIXES, SYMBOLS, generator=generator, dtype=torch.float64)
        self.reward_B = torch.full((ROWS,), -1.0, dtype=torch.float64)
        self.reward_B[torch.randperm(ROWS, generator=generator)[:GOOD]] = 0.0
        weight_B = logprobs_of(self.reference_PV).sum(dim=1) + self.reward_B / BETA
        self.q_0 = BETA * torch.logsumexp(weight_B, dim=0).item()
        self.optimal_B = weight_B - self.q_0 / BETA

    def batch(self, qhat_0: float) -> TokenBatch:
        everywhere = torch.ones(ROWS, LENGTH, dtype=torch.bool)
        return TokenBatch(
            input_ids_BL=every_sequence()[0],
            attention_mask_BL=everywhere,
            response_mask_BL=everywhere,
            reference_logprobs_BL=logprobs_of(self.reference_PV),
            sampling_logprobs_BL=logprobs_of(self.reference_PV),
            reward_B=self.reward_B,
            qhat_0_B=torch.full((ROWS,), qhat_0, dtype=torch.float64),
            source_B=torch.ones(ROWS, dtype=torch.long),
            group_B=torch.zeros(ROWS, dtype=torch.long),
        )

    def distance_after(self, objective: str, qhat_0: float, train: Trainer) -> float:
        """KL(pi || pi*) in nats after training from pi0 on all sequences at once; it starts at about 8."""
        logits_PV = self.reference_PV.clone().requires_grad_()
        batch, terms = self.batch(qhat_0), [LossTerm(objective=objective)]
        train(logits_PV, lambda: spo_loss(logprobs_of(logits_PV), batch, terms, BETA)[0])
        policy_B = logprobs_of(logits_PV.detach()).sum(dim=1)
        return (policy_B.exp() * (policy_B - self.optimal_B)).sum().item()


def by_quasi_newton(logits_PV: Tensor, loss_of_policy: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.LBFGS(
        [logits_PV],
        max_iter=500,
        history_size=30,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of_policy()
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def by_adam(logits_PV: Tensor, loss_of_policy: Callable[[], Tensor]) -> None:
    """For the straight-through cross-entropy, whose gradient is not its slope: a line search would get stuck."""
    steps = 1000
    optimizer = torch.optim.Adam([logits_PV], lr=0.1, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of_policy().backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("objective", "train"),
    [
        ("terminal_squared", by_quasi_newton),
        ("advantage_sigmoid", by_quasi_newton),
        ("terminal_cross_entropy", by_adam),
    ],
)
def test_the_right_qhat_0_leads_to_the_optimal_policy(objective: str, train: Trainer) -> None:
    problem = EnumerableProblem(seed=0)
    assert problem.distance_after(objective, problem.q_0, train) < 1e-3


@pytest.mark.parametrize("error", [-0.2, 0.2])
def test_a_wrong_qhat_0_keeps_the_squared_loss_from_the_optimal_policy(error: float) -> None:
    problem = EnumerableProblem(seed=0)
    assert problem.distance_after("terminal_squared", problem.q_0 + error, by_quasi_newton) > 0.1


def test_the_group_centred_form_reaches_the_optimal_policy_whatever_qhat_0_it_is_told() -> None:
    problem = EnumerableProblem(seed=0)
    assert problem.distance_after("group_centred_squared", problem.q_0 + 0.3, by_quasi_newton) < 1e-3


def test_weights_of_groups_do_not_move_the_optimum() -> None:
    """Groups of 16 in two partitions, that overlap so that all sequences are compared; most have unlike deviations."""
    problem, generator = EnumerableProblem(seed=0), torch.Generator().manual_seed(1)
    drawn = [torch.randperm(ROWS, generator=generator) // 16 for _ in range(2)]
    twice = torch.arange(ROWS).repeat(2)
    batch = replace(problem.batch(0.0).select(twice), group_B=torch.cat([drawn[0], drawn[1] + ROWS]))
    deviations = {round(batch.reward_B[batch.group_B == group].std().item(), 6) for group in batch.group_B.unique()}
    assert len(deviations) > 2
    term = LossTerm(objective="group_centred_squared", normalise="deviation")
    logits_PV = problem.reference_PV.clone().requires_grad_()
    by_quasi_newton(logits_PV, lambda: spo_loss(logprobs_of(logits_PV)[twice], batch, [term], BETA)[0])
    policy_B = logprobs_of(logits_PV.detach()).sum(dim=1)
    assert (policy_B.exp() * (policy_B - problem.optimal_B)).sum() < 1e-3
