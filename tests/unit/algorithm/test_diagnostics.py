"""The health numbers of a batch, counted by hand."""

from __future__ import annotations

import math

import pytest
import torch

from spo.algorithm.objectives import TokenBatch, batch_diagnostics, effective_sample_share, sampler_log_weights


def test_diagnostics_of_a_batch_equal_those_counted_by_hand() -> None:
    nan = float("nan")
    batch = TokenBatch(
        input_ids_BL=torch.zeros(2, 3, dtype=torch.long),
        attention_mask_BL=torch.ones(2, 3, dtype=torch.bool),
        response_mask_BL=torch.tensor([[False, True, True], [True, False, False]]),
        reference_logprobs_BL=torch.tensor([[nan, -2.0, -1.0], [-3.0, nan, nan]]),
        sampling_logprobs_BL=torch.zeros(2, 3),
        reward_B=torch.tensor([0.0, -1.0]),
        qhat_0_B=torch.tensor([-0.5, -0.5]),
        source_B=torch.ones(2, dtype=torch.long),
        group_B=torch.zeros(2, dtype=torch.long),
    )
    # log ratios: (+1, +2) and -1; beta 0.5: Q_T = 1 and -1.
    found = batch_diagnostics(torch.tensor([[nan, -1.0, 1.0], [-4.0, nan, nan]]), batch, beta=0.5)

    assert found == {
        "log_ratio_nats": (3 - 1) / 2,
        "kl_to_reference_nats": (0.5 * (1 + 4) + 0.5 * 1) / 2,
        "q_above_zero_nats": (2 + 0) / 2,
        "q_terminal": 0.0,
        "reward": -0.5,
        "log_ratio_per_token_nats": (1.5 - 1) / 2,
        "residual": (1 + 0) / 2,
        "residual_abs": (1 + 0) / 2,
        "residual_positive": 0.5,
        "residual_negative": 0.0,
        "residual_large": 0.5,
        "token_nll_nats": (0.0 + 4.0) / 2,
        "response_tokens": 1.5,
    }


def test_the_effective_sample_share_is_one_for_equal_weights_and_one_over_n_where_one_rules() -> None:
    assert effective_sample_share([]) == effective_sample_share([-800.0] * 5) == pytest.approx(1)
    assert effective_sample_share([0.0, 900.0, 0.0, -900.0]) == pytest.approx(1 / 4)
    weights = [0.5, 1.5, 3.0]
    read = sum(weights) ** 2 / (3 * sum(w * w for w in weights))
    assert effective_sample_share([math.log(w) for w in weights]) == pytest.approx(read)


def test_log_weights_are_sums_over_the_response_alone() -> None:
    nan = math.nan
    mask_BL = torch.tensor([[False, True, True], [True, False, False]])
    batch = TokenBatch(
        input_ids_BL=torch.zeros(2, 3, dtype=torch.long),
        attention_mask_BL=torch.ones(2, 3, dtype=torch.bool),
        response_mask_BL=mask_BL,
        reference_logprobs_BL=torch.zeros(2, 3),
        sampling_logprobs_BL=torch.tensor([[nan, -2.0, -1.0], [-3.0, nan, nan]]),
        reward_B=torch.zeros(2),
        qhat_0_B=torch.zeros(2),
        source_B=torch.ones(2, dtype=torch.long),
        group_B=torch.zeros(2, dtype=torch.long),
    )
    log_weight_B = sampler_log_weights(torch.tensor([[nan, -1.0, -1.5], [-4.0, nan, nan]]), batch)
    assert log_weight_B.tolist() == [0.5, -1.0]
