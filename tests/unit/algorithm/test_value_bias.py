"""Bias of Qhat_0 where the data decides when sampling stops, and of a loss that weighs by the width, by simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from spo.algorithm.objectives import TokenBatch, spo_loss, value_weights
from spo.algorithm.registry import LossTerm
from spo.algorithm.values import BetaPrior, Evidence, SoftValueEstimate, q_from_success_rate, soft_value_estimate

BETAS = [0.217, 1 / math.log(100_000)]
# Success rates of prompts: mean .07, half of them below .02, as in the toy contest.
POPULATION = BetaPrior(0.35, 4.65)
FIRST, ROUND, MOST, WIDTH = 8, 8, 64, 0.4
PROMPTS = 6000


class Sequential:
    """Rounds of samples of a prompt until its interval is narrow, as value-estimation takes them."""

    def __init__(self, beta: float) -> None:
        self.estimate = lru_cache(maxsize=None)(self._estimate)
        self.beta = beta

    def _estimate(self, samples: int, successes: int) -> SoftValueEstimate:
        return soft_value_estimate(Evidence(samples, successes, prior=POPULATION), self.beta)

    def stopped(self, rate: float, rng: np.random.Generator) -> tuple[int, int]:
        samples, successes = FIRST, int(rng.binomial(FIRST, rate))
        while samples < MOST:
            found = self.estimate(samples, successes)
            if found.high - found.low <= WIDTH:
                break
            samples, successes = samples + ROUND, successes + int(rng.binomial(ROUND, rate))
        return samples, successes


@pytest.mark.parametrize("beta", BETAS)
def test_the_posterior_mean_is_unbiased_over_prompts_at_any_stop_and_under_any_weight_of_its_own(beta: float) -> None:
    rng, sequential = np.random.default_rng(0), Sequential(beta)
    errors: dict[str, list[float]] = {"mean": [], "weighted": [], "frequency": [], "floor": []}
    weights = []
    for rate in rng.beta(POPULATION.successes, POPULATION.failures, size=PROMPTS):
        truth = q_from_success_rate(rate, beta)
        samples, successes = sequential.stopped(rate, rng)
        found = sequential.estimate(samples, successes)
        weights.append(beta**2 / (beta**2 + found.standard_error**2))
        errors["mean"].append(found.q - truth)
        errors["weighted"].append(weights[-1] * (found.q - truth))
        errors["frequency"].append(q_from_success_rate(successes / samples, beta) - truth)
        errors["floor"].append((found.q if successes else -1.0) - truth)
    bias = {name: float(np.mean(found)) for name, found in errors.items()}
    noise = {name: float(np.std(found)) / math.sqrt(PROMPTS) for name, found in errors.items()}

    assert abs(bias["mean"]) < 4 * noise["mean"]
    assert abs(bias["weighted"]) < 4 * noise["weighted"]
    assert bias["frequency"] < -0.015
    assert bias["floor"] < bias["frequency"]
    assert np.mean(weights) < 0.95, "the weights must differ for this to say anything"


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("rate", "least"), [(0.0, 1.0), (0.002, 0.9), (0.02, 0.8), (0.2, 0.8), (1.0, 1.0)])
def test_intervals_hold_the_truth_of_each_rate_the_hopeless_ones_too(beta: float, rate: float, least: float) -> None:
    rng, sequential = np.random.default_rng(1), Sequential(beta)
    truth = q_from_success_rate(rate, beta)
    held = 0
    for _ in range(300):
        found = sequential.estimate(*sequential.stopped(rate, rng))
        held += found.low <= truth <= found.high

    assert held / 300 >= least


def batch_of(errors: list[float], logprobs_BL: torch.Tensor) -> TokenBatch:
    """Responses whose reference log-probs make Q_T = r at these log-probs: the optimum of every prompt."""
    rows, length = logprobs_BL.shape
    mask_BL = torch.ones(rows, length, dtype=torch.bool)
    return TokenBatch(
        input_ids_BL=torch.zeros(rows, length, dtype=torch.long),
        attention_mask_BL=mask_BL.long(),
        response_mask_BL=mask_BL,
        reference_logprobs_BL=logprobs_BL.detach() - 1.0,
        sampling_logprobs_BL=torch.zeros(rows, length),
        reward_B=torch.zeros(rows),
        qhat_0_B=torch.full((rows,), -0.2 * length),
        source_B=torch.ones(rows, dtype=torch.long),
        group_B=torch.arange(rows),
        qhat_0_error_B=torch.tensor(errors),
    )


def test_the_width_moves_no_optimum_and_weighs_uncertain_prompts_less() -> None:
    logprobs_BL = torch.full((3, 4), -1.0, requires_grad=True)
    batch = batch_of([0.0, 0.2, 0.6], logprobs_BL)
    assert value_weights(batch, 0.2).tolist() == pytest.approx([1.0, 0.5, 0.1])
    terms = [LossTerm(objective="terminal_squared")]

    spo_loss(logprobs_BL, batch, terms, 0.2, 0.2)[0].backward()
    assert logprobs_BL.grad is not None
    assert logprobs_BL.grad.abs().max() < 1e-6, "exact values: the optimum stays, whatever the weights"

    logprobs_BL.grad = None
    wrong = replace(batch, qhat_0_B=batch.qhat_0_B + 0.3)
    spo_loss(logprobs_BL, wrong, terms, 0.2, 0.2)[0].backward()
    pull_B = logprobs_BL.grad.sum(dim=1)
    assert (pull_B / pull_B[0]).tolist() == pytest.approx([1.0, 0.5, 0.1])


def test_terms_that_read_no_value_and_jobs_that_name_no_noise_weigh_nothing() -> None:
    logprobs_BL = torch.full((2, 4), -1.0)
    batch = replace(batch_of([0.0, 0.6], logprobs_BL), qhat_0_B=torch.tensor([-0.1, -0.1]))
    for objective, noise in (("terminal_squared", None), ("supervised", 0.2)):
        terms = [LossTerm(objective=objective)]
        weighed = spo_loss(logprobs_BL, batch, terms, 0.2, noise)[0]
        assert weighed == spo_loss(logprobs_BL, replace(batch, qhat_0_error_B=None), terms, 0.2)[0]
