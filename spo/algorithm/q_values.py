"""The cumulative Q-parameterisation (Soft Policy Optimization, Cohen et al. 2025, Eq. 3, 11 and 12).

Axes: B trajectory, L padded position. Units: A and Q in reward units; Q / beta is in log-prob units (nats).
beta is the job's; where a batch scales it (`TokenBatch.beta_scale_B`), each trajectory has its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spo.algorithm.rounding import Difference, Rounding
from spo.algorithm.token_batch import TokenBatch
from spo.errors import FieldViolation, InvalidInput


def advantages(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """A_t = beta (ln pi_theta - ln pi0) at each response token, 0 elsewhere; (B, L), reward units (Eq. 11)."""
    # where, not multiplication: padding may hold anything, and 0 * inf is nan.
    log_ratio_BL = torch.where(batch.response_mask_BL, logprobs_BL - batch.reference_logprobs_BL, 0.0)
    return batch.betas(beta)[:, None] * log_ratio_BL


def cumulative_q(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """Q_t after the token at each position; (B, L), reward units (Eq. 12).

    Qhat_0 before the response begins, Q_T from its last token on.
    """
    return batch.qhat_0_B[:, None] + advantages(logprobs_BL, batch, beta).cumsum(dim=1)


def terminal_q(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """Q_T = Qhat_0 + sum_t A_t; (B,), reward units (Eq. 12 at t = T)."""
    return batch.qhat_0_B + advantages(logprobs_BL, batch, beta).sum(dim=1)


def soft_value(values: Tensor, reference_logprobs: Tensor, beta: float, dim: int = -1) -> Tensor:
    """S_beta[values] = beta ln sum_a pi0(a) exp(values(a) / beta) over `dim`, reward units (Eq. 3)."""
    return beta * torch.logsumexp(reference_logprobs + values / beta, dim=dim)


def check_usable(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> None:
    """Refuse numbers that no objective may learn from.

    Raises InvalidInput: beta not in (0, inf), log-probs coarser than float32 (Q_T sums thousands of differences), or
    non-finite values (code "not_finite", one violation `/<tensor>/<row>` per offending trajectory).
    """
    if not 0 < beta < float("inf"):
        raise InvalidInput(f"beta must be positive and finite, not {beta}")
    if torch.finfo(logprobs_BL.dtype).bits < 32:
        raise InvalidInput(f"per-token log-probs must be float32 or float64, not {logprobs_BL.dtype}")
    used = {
        "logprobs": torch.where(batch.response_mask_BL, logprobs_BL.detach(), 0.0),
        "sampling_logprobs": torch.where(batch.response_mask_BL, batch.sampling_logprobs_BL, 0.0),
        "reference_logprobs": torch.where(batch.response_mask_BL, batch.reference_logprobs_BL, 0.0),
        "reward": batch.reward_B[:, None],
        "qhat_0": batch.qhat_0_B[:, None],
    }
    if batch.annotated_q_BL is not None and batch.annotated_mask_BL is not None:
        used["annotated_q"] = torch.where(batch.annotated_mask_BL, batch.annotated_q_BL, 0.0)
    violations = [
        FieldViolation(f"/{name}/{row}", "not finite")
        for name, values in used.items()
        for row in (~torch.isfinite(values)).any(dim=1).nonzero().flatten().tolist()
    ]
    if violations:
        raise InvalidInput("the batch holds non-finite numbers", code="not_finite", violations=tuple(violations))


def check_starts_at_reference(logprobs_BL: Tensor, batch: TokenBatch, beta: float, rounding: Rounding) -> None:
    """Before the first step pi_theta = pi0, so every Q_t must equal Qhat_0 up to what rounding explains.

    Raises InvalidInput (code "reference_mismatch") with one violation per trajectory: reference log-probs that came
    from another model, precision or code would otherwise shift every Q_T without a trace.
    """
    given = logprobs_BL.detach(), batch.reference_logprobs_BL, batch.response_mask_BL
    difference = Difference.between(*given, rounding)
    rows = (difference.excess_B > 1).nonzero().flatten().tolist()
    if rows:
        raise InvalidInput(
            f"at step 0 Q_t departs from Qhat_0 by up to {beta * difference.largest_sum:.3g} (tolerance "
            f"{beta * difference.tolerance:.3g}, beta {beta:g}): {difference}",
            code="reference_mismatch",
            violations=tuple(
                FieldViolation(f"/logprobs/{row}", f"{difference.excess_B[row].item():.3g} of what rounding explains")
                for row in rows
            ),
        )
