"""The objectives of Soft Policy Optimization (Cohen et al. 2025, 3.1): the batch they take, Q-values, each objective
as one function, and diagnostics.

Axes: B trajectory in the batch, L position in the padded sequence (prompt, response and padding).
Units: log-probabilities in nats, rewards and Q in reward units.

Axes: B trajectory, L padded position. Differences in nats.

Axes: B trajectory, L padded position. Units: A and Q in reward units; Q / beta is in log-prob units (nats).
beta is the job's; where a batch scales it (`TokenBatch.beta_scale_B`), each trajectory has its own.

Axes: B trajectory, L padded position. Q, A and rewards are in reward units; divided by beta they are log-prob units.
Squared errors are divided by 2 beta: the gradient with respect to each log-prob is then the residual itself, and one
learning rate suits every beta. The paper's plain (Q - y)^2 is the coefficient 2 beta.
Where a batch has a beta per token (`TokenBatch.with_beta_per_token`), beta below is the trajectory's, the job's / |y|.

How far two computations of the same log-probs may lie apart by rounding alone.
Kernels, layouts and engines add up in different orders. A token's log-prob then differs by an error that grows with the
precision of the dtype and the size of the logits, and whose sign is as good as random: a sum over T tokens walks like
sqrt(T). A single token may be far out where its logit is small compared with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from spo.algorithm.registry import LOSSES, SOURCE_CODES, LossTerm, SourceName
from spo.errors import FieldViolation, InvalidInput

# Typical difference of one token's log-prob between two layouts of one forward, in steps of the dtype's precision. In
# bfloat16 sums are kept in float32 and only results are rounded; in float32 the sums themselves round. Measured on
# SmolLM2-135M and random models: docs/decisions/0006-real-models.md.
TOKEN_STEPS = {torch.bfloat16: 4.0, torch.float32: 40.0}
# Two engines differ in every operation, and so by more.
ENGINES = 2.5
# A walk of independent steps passes this many standard deviations in fewer than one of 500,000 trajectories.
DEVIATIONS = 5.0
# One token may be this many typical differences off.
ONE_TOKEN = 15.0

# Below it the rewards of a group are equal but for rounding; reward units squared.
LEAST_VARIANCE = 1e-12

LARGE_RESIDUAL = 0.5


@dataclass(frozen=True)
class TokenBatch:
    """Judged trajectories as padded tensors; built by the trainer from protobuf, read by every objective.

    Sequences may be padded on either side. Position l speaks about token l itself: `reference_logprobs_BL[b, l]` is
    log pi0(token l | tokens before l), and so are the policy's log-probs passed with the batch. Values outside
    `response_mask_BL` are never read, except `input_ids_BL` by the model.

    attention_mask_BL: 0 at padding; 1 elsewhere, or the number of an episode's branch, whose tokens see no other's. All
    objectives sum over a row, and so over all branches of an episode: its reward is asked for once.
    response_mask_BL: True exactly at the tokens that the policy sampled (an end-of-sequence token is one of them). In a
    conversation the environment's tokens lie between them: the mask need not be contiguous, and t counts its tokens.
    sampling_logprobs_BL: log-prob under the behaviour policy as sampled; 0 where unknown (human solutions).
    reward_B, qhat_0_B: terminal reward (<= 0) and estimated soft value of the prompt, reward units.
    qhat_0_error_B: standard error of qhat_0_B, reward units; 0 where it is exact or unknown.
    source_B: SOURCE_CODES. group_B: index of the trajectory's prompt within the batch, >= 0.
    annotated_q_BL: where `annotated_mask_BL`, within the response mask, the Monte-Carlo estimate of Q_t after token l,
    reward units.
    beta_scale_B: what a job's beta is multiplied by for each trajectory; None: 1 for all. See `with_beta_per_token`.
    critic_advantage_BL, critic_return_BL: of each response token by PPO's critic: the generalised advantage, and the
    return that its value is regressed on; reward units.
    learned_B: False where a trajectory teaches nothing: no loss reads it, and no other trajectory's gradient depends on
    it, except that every term still divides by B. None: all teach.
    proximal_logprobs_BL: the policy's log-probs before the first update on the batch, where a loss corrects for what
    the sampler's differ from them; None: the policy's own.
    teacher_logprobs_BL: log-prob under the model that terms of distillation imitate; None: the reference teaches.
    mean_tokens_B, advantage_mean_B, advantage_deviation_B: of the whole batch that this is a part of, the same in every
    row: response tokens per trajectory, and moments of the advantages of its tokens; None: this is the whole.
    """

    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    response_mask_BL: Tensor
    reference_logprobs_BL: Tensor
    sampling_logprobs_BL: Tensor
    reward_B: Tensor
    qhat_0_B: Tensor
    source_B: Tensor
    group_B: Tensor
    annotated_q_BL: Tensor | None = None
    annotated_mask_BL: Tensor | None = None
    beta_scale_B: Tensor | None = None
    critic_advantage_BL: Tensor | None = None
    critic_return_BL: Tensor | None = None
    learned_B: Tensor | None = None
    proximal_logprobs_BL: Tensor | None = None
    teacher_logprobs_BL: Tensor | None = None
    mean_tokens_B: Tensor | None = None
    advantage_mean_B: Tensor | None = None
    advantage_deviation_B: Tensor | None = None
    qhat_0_error_B: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of trajectories B."""
        return self.reward_B.shape[0]

    @property
    def response_lengths(self) -> Tensor:
        """Tokens of each trajectory that are learned from; (B,)."""
        return self.response_mask_BL.sum(dim=1)

    def betas(self, beta: float) -> Tensor:
        """The temperature of each trajectory under a job's beta; (B,), reward units."""
        return beta * (torch.ones_like(self.reward_B) if self.beta_scale_B is None else self.beta_scale_B)

    def with_beta_per_token(self) -> TokenBatch:
        """The same batch with beta / |y| as the temperature of a response of |y| tokens (Apertus 2025, 4.3).

        Q_T = r then means a mean log-ratio of (r - Qhat_0) / beta nats per token, however long the response is.
        """
        return replace(self, beta_scale_B=1 / self.response_lengths.clamp(min=1).to(self.reward_B.dtype))

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch with every tensor on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def select(self, rows: Tensor | slice) -> TokenBatch:
        """The trajectories at `rows` (boolean mask, indices or slice), same padding."""
        return self._map(lambda tensor: tensor[rows])

    def rows_from(self, sources: tuple[SourceName, ...] | None) -> Tensor:
        """Mask over B of the trajectories whose source is named; None names all."""
        if sources is None:
            return torch.ones_like(self.source_B, dtype=torch.bool)
        codes = torch.tensor([SOURCE_CODES[name] for name in sources], device=self.source_B.device)
        return torch.isin(self.source_B, codes)

    def learned_from(self, sources: tuple[SourceName, ...] | None, *, in_groups: bool = False) -> Tensor:
        """Mask over B of the trajectories of these sources that teach: `rows_from` without what `learned_B` leaves out.

        in_groups: trajectories are compared within their prompt's group; one whose companions were all left out has
        nothing to be compared with, and teaches nothing either.
        """
        rows_B = self.rows_from(sources)
        if self.learned_B is None:
            return rows_B
        learned_B = rows_B & self.learned_B
        if not in_groups:
            return learned_B
        same_BB = self.group_B[:, None] == self.group_B[None, :]
        before_B, after_B = ((same_BB & chosen_B[None, :]).sum(dim=1) for chosen_B in (rows_B, learned_B))
        return learned_B & ((after_B > 1) | (before_B == after_B))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        tensors: dict[str, Tensor | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})


@dataclass(frozen=True)
class Rounding:
    """What rounding explains; token_error: the typical difference of one token's log-prob, nats."""

    dtype: str
    token_error: float

    @classmethod
    def of_one_forward(cls, dtype: torch.dtype, factor: float = 1.0) -> Rounding:
        """Between two layouts of one forward in float32 or bfloat16; factor: for those who know better."""
        error = factor * TOKEN_STEPS[dtype] * torch.finfo(dtype).eps
        return cls(str(dtype).removeprefix("torch."), error)

    @classmethod
    def of_two_engines(cls, dtype: torch.dtype, factor: float = 1.0) -> Rounding:
        """Between the trainer and the engine that sampled."""
        return cls.of_one_forward(dtype, factor * ENGINES)

    def tolerance(self, tokens_B: Tensor) -> Tensor:
        """The most that the log-probs of any prefix of that many tokens may differ in sum; (B,), nats."""
        return self.token_error * (DEVIATIONS * tokens_B.sqrt() + ONE_TOKEN)


@dataclass(frozen=True)
class Difference:
    """How two log-probs of the same responses differ, in nats; the tolerance is that of the worst trajectory.

    excess_B: largest sum over a prefix, as a share of what rounding explains; above 1 it is no rounding.
    """

    largest_token: float
    largest_sum: float
    tokens: int
    tolerance: float
    excess_B: Tensor
    rounding: Rounding

    @classmethod
    def between(cls, one_BL: Tensor, other_BL: Tensor, mask_BL: Tensor, rounding: Rounding) -> Difference:
        """Of the tokens in the mask."""
        # where, not multiplication: padding may hold anything, and 0 * inf is nan.
        difference_BL = torch.where(mask_BL, one_BL - other_BL, 0.0).double()
        sum_B = difference_BL.cumsum(dim=1).abs().amax(dim=1)
        tokens_B = mask_BL.sum(dim=1)
        allowed_B = rounding.tolerance(tokens_B.double())
        # No difference is no excess, also where nothing is allowed.
        excess_B = torch.where(sum_B > 0, sum_B / allowed_B, 0.0)
        worst = int(excess_B.argmax())
        return cls(
            largest_token=float(difference_BL.abs().max()),
            largest_sum=float(sum_B[worst]),
            tokens=int(tokens_B[worst]),
            tolerance=float(allowed_B[worst]),
            excess_B=excess_B,
            rounding=rounding,
        )

    def __str__(self) -> str:
        walk = f"{DEVIATIONS:g} x sqrt({self.tokens}) + {ONE_TOKEN:g}"
        return (
            f"log-probs differ by up to {self.largest_token:.3g} nats at a token and {self.largest_sum:.3g} in the sum "
            f"over {self.tokens} tokens, where {self.rounding.dtype} explains {self.tolerance:.3g} "
            f"({self.rounding.token_error:.2g} per token x ({walk}))"
        )


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


def terminal_squared(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """(Q_T - r)^2 / (2 beta); (B,) (3.1.2, terminal Q-regression)."""
    return _squared_scale(batch, beta) * (terminal_q(logprobs_BL, batch, beta) - batch.reward_B).square()


def terminal_cross_entropy(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, epsilon: float) -> Tensor:
    """Clipped cross-entropy between Q_T / beta and r / beta; (B,), nats (3.1.1)."""
    beta_B = batch.betas(beta)
    return clipped_cross_entropy(terminal_q(logprobs_BL, batch, beta) / beta_B, batch.reward_B / beta_B, epsilon)


def reverse_q_squared(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """sum_t (Q_t - R_t)^2 / (2 beta) with R_t = detach(r - sum_{s>t} A_s); (B,) (3.1.2, non-terminal Q-regression).

    A sum as printed in the paper: it grows with the length of the response.
    """
    q_BL = cumulative_q(logprobs_BL, batch, beta)
    error_BL = (q_BL - _reverse_q_target(logprobs_BL, batch, beta)).square()
    return _squared_scale(batch, beta) * torch.where(batch.response_mask_BL, error_BL, 0.0).sum(dim=1)


def reverse_q_cross_entropy(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, epsilon: float) -> Tensor:
    """sum_t of the clipped cross-entropy between Q_t / beta and R_t / beta; (B,), nats (3.1.2)."""
    q_BL, beta_B1 = cumulative_q(logprobs_BL, batch, beta), batch.betas(beta)[:, None]
    error_BL = clipped_cross_entropy(q_BL / beta_B1, _reverse_q_target(logprobs_BL, batch, beta) / beta_B1, epsilon)
    return torch.where(batch.response_mask_BL, error_BL, 0.0).sum(dim=1)


def advantage_sigmoid(
    logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, sigmoid_scale: float, sigmoid_unit: Literal["log_prob", "q"]
) -> Tensor:
    """Binary cross-entropy of sigmoid(k sum_t A_t / beta) against sigmoid(k (r - Qhat_0) / beta); (B,), nats (3.1.2).

    k = sigmoid_scale on log-prob units. With the unit "q" it multiplies reward units: k = beta * sigmoid_scale.
    """
    # sigmoid_scale k / beta, which multiplies reward units.
    scale_B = sigmoid_scale * (torch.ones_like(batch.reward_B) if sigmoid_unit == "q" else 1 / batch.betas(beta))
    prediction_B = scale_B * advantages(logprobs_BL, batch, beta).sum(dim=1)
    target_B = torch.sigmoid(scale_B * (batch.reward_B - batch.qhat_0_B))
    return binary_cross_entropy_with_logits(prediction_B, target_B, reduction="none")


def monte_carlo_squared(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """Mean over annotated t of (Q_t - Qhat_t)^2 / (2 beta); (B,), 0 without annotations (3.1.3).

    A mean, since how many positions a search visited says nothing about the trajectory's weight. Raises InvalidInput
    when the batch carries no annotation tensors.
    """
    target_BL, mask_BL = _annotations(batch)
    error_BL = (cumulative_q(logprobs_BL, batch, beta) - target_BL).square()
    return _squared_scale(batch, beta) * _masked_mean(error_BL, mask_BL)


def monte_carlo_cross_entropy(logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, epsilon: float) -> Tensor:
    """Mean over annotated t of the clipped cross-entropy between Q_t / beta and Qhat_t / beta; (B,), nats (3.1.3).

    Unbiased in the number of rollouts, because exp(Qhat_t / beta) is. Raises as `monte_carlo_squared`.
    """
    target_BL, mask_BL = _annotations(batch)
    q_BL, beta_B1 = cumulative_q(logprobs_BL, batch, beta), batch.betas(beta)[:, None]
    error_BL = clipped_cross_entropy(q_BL / beta_B1, target_BL / beta_B1, epsilon)
    return _masked_mean(error_BL, mask_BL)


def group_centred_squared(
    logprobs_BL: Tensor, batch: TokenBatch, beta: float, *, normalise: Literal["deviation", "none"] | None = None
) -> Tensor:
    """n / (n - 1) * (d - mean of d over the prompt's n trajectories)^2 / (2 beta) with d = Q_T - r; (B,).

    Not in the paper: the log-variance (trajectory-balance) form, in which Qhat_0 cancels. Its expectation is the
    variance of d, zero at pi* alone given full support. A trajectory alone in its group (n = 1) teaches nothing: 0.
    Where trajectories have their own beta the mean is weighted by 1 / beta: the gradient with respect to a log-prob is
    then still the centred residual. normalise "deviation": each group counts by 1 / the standard deviation of its
    rewards, as in GRPO (Shao et al. 2024), and one of equal rewards by 1; at pi* every residual is centred at 0, so no
    weight of a group moves it.
    """
    residual_B, weight_B = terminal_q(logprobs_BL, batch, beta) - batch.reward_B, 1 / batch.betas(beta)
    _, group_B, count_G = torch.unique(batch.group_B, return_inverse=True, return_counts=True)
    zero_G = residual_B.new_zeros(len(count_G))
    sum_G: Tensor = zero_G.index_add(0, group_B, weight_B * residual_B)
    mean_G: Tensor = sum_G / zero_G.index_add(0, group_B, weight_B)
    # n = 1: the centred residual is 0 whatever the factor; the clamp keeps the factor finite.
    factor_G: Tensor = count_G.to(weight_B.dtype) / (count_G - 1).clamp(min=1)
    if normalise == "deviation":
        centred_B = batch.reward_B - (zero_G.index_add(0, group_B, batch.reward_B) / count_G)[group_B]
        variance_G = zero_G.index_add(0, group_B, centred_B.square()) / (count_G - 1).clamp(min=1)
        factor_G = factor_G / torch.where(variance_G > LEAST_VARIANCE, variance_G, 1.0).sqrt()
    return 0.5 * weight_B * factor_G[group_B] * (residual_B - mean_G[group_B]).square()


def clipped_cross_entropy(prediction: Tensor, target: Tensor, epsilon: float) -> Tensor:
    """x relu(-yhat) - (1 - x) ln(1 - exp(min(yhat, -epsilon))), x = exp(min(y, 0)); elementwise, nats (3.1.1).

    prediction yhat and target y are in log-prob units. The clip holds in the forward pass only: the gradient is that at
    the clipped point, passed straight through. relu on the unclipped yhat removes any pull above 0.
    """
    target = target.clamp(max=0.0)
    # Adding yhat - yhat.detach(), exactly 0, gives the clipped value the gradient of the unclipped one.
    clipped = prediction.detach().clamp(max=-epsilon) + (prediction - prediction.detach())
    return target.exp() * torch.relu(-prediction) + torch.expm1(target) * _log1mexp(clipped)


def _squared_scale(batch: TokenBatch, beta: float) -> Tensor:
    """1 / (2 beta); (B,): then d loss / d ln pi_theta(a_t) = Q_T - r, in reward units."""
    return 0.5 / batch.betas(beta)


def _log1mexp(y: Tensor) -> Tensor:
    """ln(1 - exp(y)) for y < 0, accurate at both ends (Maechler 2012)."""
    near_zero = y > -math.log(2)
    # Where near 0, the far form sees -1: its infinity there would turn the gradient into nan.
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, y)))
    return torch.where(near_zero, torch.log(-torch.expm1(y)), far)


def _reverse_q_target(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """R_t = r - sum_{s>t} A_s, detached; (B, L), reward units."""
    advantages_BL = advantages(logprobs_BL.detach(), batch, beta)
    later_BL = advantages_BL.sum(dim=1, keepdim=True) - advantages_BL.cumsum(dim=1)
    return batch.reward_B[:, None] - later_BL


def _annotations(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    if batch.annotated_q_BL is None or batch.annotated_mask_BL is None:
        raise InvalidInput("a Monte-Carlo objective needs annotated_q_BL and annotated_mask_BL", code="no_annotations")
    # where: positions without annotation may hold anything.
    return torch.where(batch.annotated_mask_BL, batch.annotated_q_BL, 0.0), batch.annotated_mask_BL


def _masked_mean(values_BL: Tensor, mask_BL: Tensor) -> Tensor:
    return torch.where(mask_BL, values_BL, 0.0).sum(dim=1) / mask_BL.sum(dim=1).clamp(min=1)


def spo_loss(
    logprobs_BL: Tensor, batch: TokenBatch, terms: Sequence[LossTerm], beta: float, value_noise: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Scalar loss = sum over terms of coefficient * (sum of its trajectories' losses) / B, and each term's part in it.

    logprobs_BL: ln pi_theta of each token, nats, float32 or float64, aligned with the batch. Every term divides by the
    size of the whole batch, so splitting a batch into equal micro-batches or ranks and averaging changes nothing
    (except for losses that need groups, which must stay together). What `learned_B` leaves out is no part of any term
    but still counts in B. Diagnostics are named `loss/<objective>` and
    sum to the loss. value_noise, reward units: terms that read Qhat_0 count by `value_weights`. Raises InvalidInput on
    non-finite numbers, beta <= 0, an empty batch, or an objective whose data is missing.
    """
    if batch.size == 0:
        raise InvalidInput("the batch is empty")
    check_usable(logprobs_BL, batch, beta)
    # An empty sum that still reaches every parameter: each rank must run the same backward, whatever sources it drew.
    total = logprobs_BL[batch.response_mask_BL].sum() * 0.0
    # A term without trajectories reports 0, so that averaging over micro-batches stays right.
    diagnostics = {f"loss/{term.objective}": 0.0 for term in terms}
    for term in terms:
        rows_B = batch.learned_from(term.sources, in_groups=term.needs("groups"))
        if not rows_B.any():
            continue
        chosen = batch.select(rows_B)
        loss_B = trajectory_losses(logprobs_BL[rows_B], chosen, term, beta)
        if value_noise is not None and term.needs("value"):
            loss_B = loss_B * value_weights(chosen, value_noise)
        part = term.coefficient * loss_B.sum() / batch.size
        diagnostics[f"loss/{term.objective}"] += part.item()
        total = total + part
    if not torch.isfinite(total):
        raise InvalidInput("the loss is not finite", code="not_finite")
    return total, diagnostics


def value_weights(batch: TokenBatch, noise: float) -> Tensor:
    """noise^2 / (noise^2 + error^2) with `error` that of Qhat_0; (B,), 1 where it is exact.

    The residual Q_T - r holds the error of Qhat_0 and whatever else departs from zero; by Gauss and Markov each prompt
    counts by the inverse of the sum of both variances. The weight is one for all trajectories of a prompt, so a prompt
    that is known exactly keeps its optimum whatever its weight.
    """
    if batch.qhat_0_error_B is None:
        return torch.ones_like(batch.reward_B)
    return noise**2 / (noise**2 + batch.qhat_0_error_B.square())


def trajectory_losses(logprobs_BL: Tensor, batch: TokenBatch, term: LossTerm, beta: float) -> Tensor:
    """The loss of each trajectory under one term, before its coefficient; (B,). Sources are not looked at."""
    return loss_function(term.objective)(logprobs_BL, batch, beta, **term.settings())


def loss_function(name: str) -> Callable[..., Tensor]:
    """The function of a registered loss. KeyError on an unknown name."""
    module, _, function = LOSSES[name].function.rpartition(".")
    found: Callable[..., Tensor] = getattr(import_module(f"spo.algorithm.{module}"), function)
    return found


@torch.no_grad()
def batch_diagnostics(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> dict[str, float]:
    """Means over the batch's trajectories, so that equal micro-batches may be averaged.

    log_ratio_nats: sum_t (ln pi_theta - ln pi0). On fresh on-policy samples its mean is KL(pi_theta || pi0), unbiased;
    on any batch, above 4 every collapse seen so far had begun.
    kl_to_reference_nats: the same KL by the non-negative estimator sum_t (ln pi_theta - ln pi0)^2 / 2 (k2 of Schulman
    2020), right to second order. Not his k3: pi0 / pi_theta of one token that the policy has since pushed down
    outweighs a whole batch of replayed samples.
    q_above_zero_nats: max(Q_T / beta, 0). ln p(o = 1) cannot exceed 0, so growth here is error, not learning.
    log_ratio_per_token_nats: the mean of ln pi_theta - ln pi0 over a response's tokens.
    q_terminal, reward, residual (Q_T - r), residual_abs: reward units. residual_positive, residual_negative: the parts
    max(residual, 0) and max(-residual, 0): Q too high pushes the response down, Q too low up. residual_large: share of
    |residual| above half a reward unit, the distance between right and wrong halved.
    token_nll_nats: -ln pi_theta per response token of the batch, averaged per trajectory.
    response_tokens: mean length.
    """
    mask_BL = batch.response_mask_BL
    log_ratio_BL = torch.where(mask_BL, logprobs_BL - batch.reference_logprobs_BL, 0.0)
    nll_B = torch.where(mask_BL, -logprobs_BL, 0.0).sum(dim=1) / batch.response_lengths.clamp(min=1)
    q_B = terminal_q(logprobs_BL, batch, beta)
    residual_B = residuals(logprobs_BL, batch, beta)
    means = {
        "log_ratio_nats": log_ratio_BL.sum(dim=1),
        "kl_to_reference_nats": 0.5 * log_ratio_BL.square().sum(dim=1),
        "q_above_zero_nats": torch.relu(q_B) / batch.betas(beta),
        "q_terminal": q_B,
        "reward": batch.reward_B,
        "log_ratio_per_token_nats": log_ratio_BL.sum(dim=1) / batch.response_lengths.clamp(min=1),
        "residual": residual_B,
        "residual_abs": residual_B.abs(),
        "residual_positive": torch.relu(residual_B),
        "residual_negative": torch.relu(-residual_B),
        "residual_large": (residual_B.abs() > LARGE_RESIDUAL).to(logprobs_BL.dtype),
        "token_nll_nats": nll_B,
        "response_tokens": batch.response_lengths.to(logprobs_BL.dtype),
    }
    return {name: values_B.mean().item() for name, values_B in means.items()}


@torch.no_grad()
def residuals(logprobs_BL: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """Q_T - r of each response; (B,), reward units."""
    residual_B: Tensor = terminal_q(logprobs_BL, batch, beta) - batch.reward_B
    return residual_B


@torch.no_grad()
def sampler_log_weights(logprobs_BL: Tensor, batch: TokenBatch) -> Tensor:
    """ln pi_theta(a|x) / pi_sampler(a|x) of each whole response; (B,), nats. Read it where the sampler is known."""
    difference_BL = torch.where(batch.response_mask_BL, logprobs_BL - batch.sampling_logprobs_BL, 0.0)
    return difference_BL.sum(dim=1)


def effective_sample_share(log_weights: Sequence[float]) -> float:
    """(sum w)^2 / (n sum w^2) of importance weights w: 1 where all are equal, 1 / n where one rules (Kong 1992).

    Of what share of the samples the variance is, were they the policy's own. 1 without samples.
    """
    largest = max(log_weights, default=0.0)
    weights = [math.exp(log_weight - largest) for log_weight in log_weights]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights)) if weights else 1.0
