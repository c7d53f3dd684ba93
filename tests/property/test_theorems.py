"""The paper's theorems (Soft Policy Optimization, Cohen et al. 2025, section 2) on random tabular sequence policies.

A policy is a table of next-token logits, one row per prefix; with 2-4 symbols and length 1-4 all can be enumerated.
Between two tokens of a policy an environment may say something: t counts the policy's tokens.
The product's functions give A, Q and S_beta; the enumeration here gives the truth, in float64.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from spo.algorithm.objectives import (
    Rounding,
    TokenBatch,
    advantages,
    check_starts_at_reference,
    cumulative_q,
    soft_value,
    terminal_q,
)

Prefix = tuple[int, ...]


class TabularWorld:
    """A reference policy, a trained policy and rewards, all random, over `symbols` tokens and sequences of `length`.

    Up to `most_said` tokens of an environment stand before each of them, and after the last; `actions` are the others.
    """

    def __init__(self, symbols: int, length: int, beta: float, seed: int, most_said: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.actions = [t + int(said) for t, said in enumerate(rng.integers(0, most_said + 1, length).cumsum())]
        self.width = self.actions[-1] + 1 + most_said
        self.symbols, self.length, self.beta = symbols, length, beta
        self.sequences = list(itertools.product(range(symbols), repeat=length))
        self.prefixes = [p for t in range(length) for p in itertools.product(range(symbols), repeat=t)]
        self.reference = {p: log_softmax(2 * rng.normal(size=symbols)) for p in self.prefixes}
        self.policy = {p: log_softmax(2 * rng.normal(size=symbols)) for p in self.prefixes}
        self.reward = {a: float(r) for a, r in zip(self.sequences, -2 * rng.random(len(self.sequences)), strict=True)}

    def true_q(self, prefix: Prefix) -> float:
        """Q_t by its definition: beta ln sum over continuations of pi0(continuation) exp(r / beta), summed by hand."""
        total = 0.0
        for a in self.sequences:
            if a[: len(prefix)] == prefix:
                weight = sum(self.reference[a[:t]][a[t]] for t in range(len(prefix), self.length))
                total += math.exp(weight + self.reward[a] / self.beta)
        return self.beta * math.log(total)

    def optimal_policy(self) -> dict[Prefix, list[float]]:
        """ln pi* by Eq. 6 from the true Q."""
        return {
            p: [(self.true_q((*p, s)) - self.true_q(p)) / self.beta + self.reference[p][s] for s in range(self.symbols)]
            for p in self.prefixes
        }

    def batch(self, qhat_0: float) -> TokenBatch:
        """Every sequence once, no prompt and no padding."""
        rows = len(self.sequences)
        response_mask_BL = torch.zeros(rows, self.width, dtype=torch.bool)
        response_mask_BL[:, self.actions] = True
        input_ids_BL = torch.zeros(rows, self.width, dtype=torch.long)
        input_ids_BL[:, self.actions] = torch.tensor(self.sequences)
        return TokenBatch(
            input_ids_BL=input_ids_BL,
            attention_mask_BL=torch.ones(rows, self.width, dtype=torch.bool),
            response_mask_BL=response_mask_BL,
            reference_logprobs_BL=self.logprobs(self.reference),
            sampling_logprobs_BL=torch.zeros(rows, self.width, dtype=torch.float64),
            reward_B=torch.tensor([self.reward[a] for a in self.sequences], dtype=torch.float64),
            qhat_0_B=torch.full((rows,), qhat_0, dtype=torch.float64),
            source_B=torch.ones(rows, dtype=torch.long),
            group_B=torch.zeros(rows, dtype=torch.long),
        )

    def logprobs(self, table: dict[Prefix, list[float]]) -> torch.Tensor:
        """ln pi of each token; nan where the environment speaks."""
        logprobs_BL = torch.full((len(self.sequences), self.width), math.nan, dtype=torch.float64)
        rows = [[table[a[:t]][a[t]] for t in range(self.length)] for a in self.sequences]
        logprobs_BL[:, self.actions] = torch.tensor(rows, dtype=torch.float64)
        return logprobs_BL

    def q_by_prefix(self, q_BL: torch.Tensor, qhat_0: float) -> dict[Prefix, float]:
        """Q_t of every non-empty prefix, read from any sequence that begins with it (they must agree)."""
        found: dict[Prefix, float] = {(): qhat_0}
        for row, a in enumerate(self.sequences):
            for t in range(1, self.length + 1):
                value = q_BL[row, self.actions[t - 1]].item()
                assert math.isclose(found.setdefault(a[:t], value), value, abs_tol=1e-12)
        return found


def log_softmax(logits: np.ndarray) -> list[float]:
    total = math.log(sum(math.exp(x) for x in logits))
    return [float(x) - total for x in logits]


worlds = st.builds(
    TabularWorld,
    symbols=st.integers(2, 4),
    length=st.integers(1, 4),
    beta=st.sampled_from([1 / math.log(100_000), 1 / math.log(100), 0.5, 3.0]),
    seed=st.integers(0, 2**32 - 1),
    most_said=st.integers(0, 2),
)
values_of_the_prompt = st.floats(-3, 1)
thorough = settings(max_examples=40, deadline=None)


@thorough
@given(worlds, values_of_the_prompt)
def test_theorem_2_2_q_is_bellman_consistent_for_any_policy_and_any_qhat_0(world: TabularWorld, qhat_0: float) -> None:
    q_BL = cumulative_q(world.logprobs(world.policy), world.batch(qhat_0), world.beta)
    q = world.q_by_prefix(q_BL, qhat_0)

    for prefix in world.prefixes:
        following = torch.tensor([q[(*prefix, s)] for s in range(world.symbols)], dtype=torch.float64)
        reference = torch.tensor(world.reference[prefix], dtype=torch.float64)
        assert math.isclose(soft_value(following, reference, world.beta).item(), q[prefix], abs_tol=1e-9)


@thorough
@given(worlds, values_of_the_prompt)
def test_theorem_2_3_q_is_path_consistent_on_every_interval(world: TabularWorld, qhat_0: float) -> None:
    batch, logprobs_BL = world.batch(qhat_0), world.logprobs(world.policy)
    advantages_BL = advantages(logprobs_BL, batch, world.beta)[:, world.actions]
    q_BL = cumulative_q(logprobs_BL, batch, world.beta)[:, world.actions]
    q_BT = torch.cat([batch.qhat_0_B[:, None], q_BL], dim=1)

    for first in range(1, world.length + 1):
        for last in range(first, world.length + 1):
            along_the_path = advantages_BL[:, first - 1 : last].sum(dim=1)
            torch.testing.assert_close(along_the_path, q_BT[:, last] - q_BT[:, first - 1], atol=1e-9, rtol=0)


@thorough
@given(worlds)
def test_theorems_2_1_and_2_4_the_optimal_policy_has_the_true_q_everywhere(world: TabularWorld) -> None:
    q_0 = world.true_q(())
    logprobs_BL, batch = world.logprobs(world.optimal_policy()), world.batch(q_0)

    torch.testing.assert_close(terminal_q(logprobs_BL, batch, world.beta), batch.reward_B, atol=1e-8, rtol=0)
    q = world.q_by_prefix(cumulative_q(logprobs_BL, batch, world.beta), q_0)
    for prefix, value in q.items():
        assert math.isclose(value, world.true_q(prefix), abs_tol=1e-8)


@thorough
@given(worlds, st.integers(0, 10**6))
def test_theorem_2_1_one_wrong_row_of_the_policy_makes_a_terminal_q_wrong(world: TabularWorld, pick: int) -> None:
    policy = world.optimal_policy()
    prefix = world.prefixes[pick % len(world.prefixes)]
    policy[prefix] = log_softmax(np.array(policy[prefix]) + 0.1 * np.arange(world.symbols))
    batch = world.batch(world.true_q(()))

    assert (terminal_q(world.logprobs(policy), batch, world.beta) - batch.reward_B).abs().max() > 1e-4 * world.beta


@thorough
@given(worlds)
def test_the_soft_value_operator_equals_its_definition_and_gives_the_value_of_the_prompt(world: TabularWorld) -> None:
    batch = world.batch(0.0)
    reference_B = world.logprobs(world.reference)[:, world.actions].sum(dim=1)
    whole = soft_value(batch.reward_B, reference_B, world.beta)
    assert math.isclose(whole.item(), world.true_q(()), abs_tol=1e-9)


@thorough
@given(worlds, values_of_the_prompt)
def test_at_step_0_every_q_is_qhat_0(world: TabularWorld, qhat_0: float) -> None:
    batch = world.batch(qhat_0)
    q_BL = cumulative_q(world.logprobs(world.reference), batch, world.beta)
    torch.testing.assert_close(q_BL, torch.full_like(q_BL, qhat_0), atol=0, rtol=0)
    check_starts_at_reference(world.logprobs(world.reference), batch, world.beta, Rounding("none", 0.0))
