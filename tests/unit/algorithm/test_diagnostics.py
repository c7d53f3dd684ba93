"""The health numbers of a batch, counted by hand."""

from __future__ import annotations

import torch

from spo.algorithm.diagnostics import batch_diagnostics
from spo.algorithm.token_batch import TokenBatch


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
        "residual": (1 + 0) / 2,
        "residual_abs": (1 + 0) / 2,
        "token_nll_nats": (0.0 + 4.0) / 2,
        "response_tokens": 1.5,
    }
