"""Several anchors at once on the enumerable problem of `test_exact_convergence`, trained with the product's loss.

Anchor k teaches its own target, pi_k exp(r / beta_k) / Z_k, by its own numbers: ln pi_k and V_k. Numbers of two anchors
in one residual teach no target at all. Anchors that have one target in common lead to it exactly. Anchors on the way,
pi_k ~ pi0 exp(s_k r), have one where 1 / beta_k = S - s_k; with one beta for all of them they have none in common. What
is learned then is the optimum of E[r] - beta sum_k w_k KL(pi || pi_k), the geometric mean of the targets: exactly with
the group-centred loss, and with Qhat_0 too high by sum_k w_k V_k - V_w >= 0 in the terminal one.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from spo.algorithm.objectives import TokenBatch, spo_loss
from spo.algorithm.registry import LossTerm
from tests.property.test_exact_convergence import LENGTH, ROWS, EnumerableProblem, by_quasi_newton, logprobs_of

# The rewards are 0 and -1; pi0 exp(S r) is what all of them shall lead to.
SHARPNESS = 11.5
ON_THE_WAY = (0.0, 3.0, 7.0)


def soft_value(weight_B: Tensor, reward_B: Tensor, beta: float) -> float:
    """beta ln sum exp(weight + r / beta), of log-weights."""
    return beta * torch.logsumexp(weight_B + reward_B / beta, dim=0).item()


def normalised(weight_B: Tensor) -> Tensor:
    return weight_B - torch.logsumexp(weight_B, dim=0)


class Anchored:
    """Anchors pi0 exp(s r) / Z of the problem for several s, and batches of every sequence under each of them."""

    def __init__(self, sharpness: tuple[float, ...]) -> None:
        self.problem = EnumerableProblem(seed=0)
        self.reward_B = self.problem.reward_B
        self.reference_B = logprobs_of(self.problem.reference_PV).sum(dim=1)
        self.anchors = [normalised(self.reference_B + s * self.reward_B) for s in sharpness]

    def batch(self, anchor: int, beta: float, share: float = 1.0, qhat_0: float | None = None) -> TokenBatch:
        """Every sequence with an anchor's log-probs, spread over its tokens, and its value at share * beta."""
        anchor_B = self.anchors[anchor]
        own = soft_value(anchor_B, self.reward_B, share * beta) if qhat_0 is None else qhat_0
        return replace(
            self.problem.batch(own),
            reference_logprobs_BL=(anchor_B / LENGTH)[:, None].expand(ROWS, LENGTH),
            group_B=torch.full((ROWS,), anchor),
            beta_scale_B=torch.full((ROWS,), share, dtype=torch.float64),
        )

    def distance_after(self, batches: list[TokenBatch], objective: str, beta: float, target_B: Tensor) -> float:
        """KL(pi || target) in nats after training from pi0 on all of them at once."""
        joined = {
            f.name: torch.cat([getattr(batch, f.name) for batch in batches])
            for f in fields(TokenBatch)
            if getattr(batches[0], f.name) is not None
        }
        batch, logits_PV = TokenBatch(**joined), self.problem.reference_PV.clone().requires_grad_()

        def loss_of_policy() -> Tensor:
            logprobs_BL = logprobs_of(logits_PV).repeat(len(batches), 1)
            return spo_loss(logprobs_BL, batch, [LossTerm(objective=objective)], beta)[0]

        by_quasi_newton(logits_PV, loss_of_policy)
        policy_B = logprobs_of(logits_PV.detach()).sum(dim=1)
        return (policy_B.exp() * (policy_B - target_B)).sum().item()


def test_anchors_with_one_target_in_common_lead_to_it_each_by_its_own_numbers() -> None:
    anchored, beta = Anchored(ON_THE_WAY), 1 / SHARPNESS
    shares = [SHARPNESS / (SHARPNESS - s) for s in ON_THE_WAY]
    batches = [anchored.batch(k, beta, share) for k, share in enumerate(shares)]
    target_B = normalised(anchored.reference_B + SHARPNESS * anchored.reward_B)

    assert anchored.distance_after(batches, "terminal_squared", beta, target_B) < 1e-3


def test_a_moved_anchor_leads_to_its_own_target_whoever_sampled() -> None:
    anchored, beta = Anchored(ON_THE_WAY), 0.3
    target_B = normalised(anchored.anchors[1] + anchored.reward_B / beta)

    assert anchored.distance_after([anchored.batch(1, beta)], "terminal_squared", beta, target_B) < 1e-3


def test_the_value_of_one_anchor_beside_the_log_probs_of_another_teaches_no_target() -> None:
    """What a refresh did to prompts that were dropped under the new reference: they kept pi0's value."""
    anchored, beta = Anchored(ON_THE_WAY), 0.3
    of_pi0 = soft_value(anchored.reference_B, anchored.reward_B, beta)
    mixed = anchored.batch(1, beta, qhat_0=of_pi0)
    target_B = normalised(anchored.anchors[1] + anchored.reward_B / beta)

    assert anchored.distance_after([mixed], "terminal_squared", beta, target_B) > 0.05


@pytest.mark.parametrize("objective", ["group_centred_squared", "terminal_squared"])
def test_one_beta_for_several_anchors_leads_to_the_mean_of_their_targets(objective: str) -> None:
    anchored, beta = Anchored(ON_THE_WAY), 0.3
    mean_B = torch.stack(anchored.anchors).mean(dim=0)
    target_B = normalised(mean_B + anchored.reward_B / beta)
    # No anchor's own, and the optimum of E[r] - beta * the mean of KL(pi || pi_k): no policy near it does better.
    assert min((target_B - normalised(a + anchored.reward_B / beta)).abs().max() for a in anchored.anchors) > 0.3

    def regularised(policy_B: Tensor) -> float:
        kls = [(policy_B.exp() * (policy_B - anchor_B)).sum() for anchor_B in anchored.anchors]
        return float((policy_B.exp() * anchored.reward_B).sum() - beta * torch.stack(kls).mean())

    noise_B = torch.randn(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert all(regularised(target_B) > regularised(normalised(target_B + 0.1 * sign * noise_B)) for sign in (1, -1))
    own = [soft_value(anchor_B, anchored.reward_B, beta) for anchor_B in anchored.anchors]
    gap = sum(own) / len(own) - soft_value(mean_B, anchored.reward_B, beta)
    assert gap > 0

    batches = [anchored.batch(k, beta) for k in range(3)]
    distance = anchored.distance_after(batches, objective, beta, target_B)

    if objective == "group_centred_squared":
        assert distance < 1e-3
    else:
        # Qhat_0 is too high by the gap, as if one anchor's were.
        one = [anchored.batch(k, beta, qhat_0=q - gap) for k, q in enumerate(own)]
        assert anchored.distance_after(one, objective, beta, target_B) < 1e-3
        assert distance > 1e-3
