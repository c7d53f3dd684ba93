"""GRPO's relatives against readings of their papers with loops and floats: value, gradient, corrections, KL."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from spo.algorithm.baselines import BatchTotals, kl_estimate
from spo.algorithm.objectives import TokenBatch, spo_loss, trajectory_losses
from spo.algorithm.registry import LossTerm
from spo.errors import InvalidInput

BETA = 0.3
WIDTH = 8
STARTS = (2, 0, 1, 3, 0)


@dataclass(frozen=True)
class Response:
    """logprobs move in finite differences; those that carry no gradient are read from `frozen`."""

    logprobs: list[float]
    frozen: list[float]
    old: list[float]
    reference: list[float]
    reward: float
    group: int

    def __len__(self) -> int:
        return len(self.old)


def draw_responses() -> list[Response]:
    draw = torch.Generator().manual_seed(7)
    rewards, groups = [0.0, -1.0, -0.25, -0.5, -1.0], [5, 5, 2, 2, 2]

    def nats(count: int, low: float) -> list[float]:
        return (low * torch.rand(count, generator=draw, dtype=torch.float64)).tolist()

    found = []
    for length, reward, group in zip((4, 1, 6, 3, 2), rewards, groups, strict=True):
        old = nats(length, -3.0)
        logprobs = [min(0.0, each - 0.4 + move) for each, move in zip(old, nats(length, 0.9), strict=True)]
        found.append(Response(logprobs, logprobs, old, nats(length, -3.0), reward, group))
    return found


def to_tensors(found: list[Response]) -> tuple[torch.Tensor, TokenBatch]:
    mask_BL = torch.zeros(len(found), WIDTH, dtype=torch.bool)
    tensors = {name: torch.full((len(found), WIDTH), math.nan).double() for name in ("logprobs", "old", "reference")}
    for row, (start, response) in enumerate(zip(STARTS, found, strict=True)):
        mask_BL[row, start : start + len(response)] = True
        for name, tensor in tensors.items():
            tensor[row, start : start + len(response)] = torch.tensor(getattr(response, name), dtype=torch.float64)
    batch = TokenBatch(
        input_ids_BL=torch.zeros(len(found), WIDTH, dtype=torch.long),
        attention_mask_BL=torch.ones(len(found), WIDTH, dtype=torch.bool),
        response_mask_BL=mask_BL,
        reference_logprobs_BL=tensors["reference"],
        sampling_logprobs_BL=tensors["old"],
        reward_B=torch.tensor([each.reward for each in found], dtype=torch.float64),
        qhat_0_B=torch.zeros(len(found), dtype=torch.float64),
        source_B=torch.ones(len(found), dtype=torch.long),
        group_B=torch.tensor([each.group for each in found]),
    )
    return tensors["logprobs"], batch


def ratios(response: Response) -> list[float]:
    return [math.exp(now - old) for now, old in zip(response.logprobs, response.old, strict=True)]


def clipped(weight: float, advantage: float, low: float, high: float) -> float:
    return min(weight * advantage, min(max(weight, 1 - low), 1 + high) * advantage)


def others(found: list[Response], response: Response, *, itself: bool) -> list[Response]:
    return [each for each in found if each.group == response.group and (itself or each is not response)]


def centred(found: list[Response], response: Response) -> float:
    return response.reward - statistics.mean(each.reward for each in others(found, response, itself=True))


def standardised(found: list[Response], response: Response) -> float:
    return centred(found, response) / statistics.stdev(each.reward for each in others(found, response, itself=True))


def whitened(advantages: list[list[float]]) -> list[list[float]]:
    every = [value for row in advantages for value in row]
    mean, deviation = statistics.fmean(every), statistics.pstdev(every)
    return [[(value - mean) / deviation for value in row] for row in advantages]


def read_grpo(found: list[Response]) -> float:
    """Shao et al. 2024, Eq. 3 and 4."""
    total = 0.0
    for response in found:
        advantage = standardised(found, response)
        kl = [
            math.exp(ref - now) - (ref - now) - 1
            for now, ref in zip(response.logprobs, response.reference, strict=True)
        ]
        tokens = [-clipped(w, advantage, 0.2, 0.2) + BETA * k for w, k in zip(ratios(response), kl, strict=True)]
        total += sum(tokens) / len(tokens)
    return total / len(found)


def read_dr_grpo(found: list[Response]) -> float:
    """Liu et al. 2025, 3.2: sums, and r less the mean."""
    terms = [-clipped(w, centred(found, each), 0.2, 0.2) for each in found for w in ratios(each)]
    return sum(terms) / len(found)


def read_dapo(found: list[Response]) -> float:
    """Yu et al. 2025, Eq. 8: all tokens weigh the same, the upper clip is higher."""
    terms = [-clipped(w, standardised(found, each), 0.2, 0.28) for each in found for w in ratios(each)]
    return sum(terms) / len(terms)


def read_gspo(found: list[Response]) -> float:
    """Zheng et al. 2025, Eq. 5 to 7."""
    total = 0.0
    for each in found:
        weight = math.prod(ratios(each)) ** (1 / len(each))
        total -= clipped(weight, standardised(found, each), 3e-4, 4e-4)
    return total / len(found)


def read_cispo(found: list[Response]) -> float:
    """MiniMax 2025, Eq. 4 and 5: the weight has no gradient and no lower limit, here none above 5."""
    terms = []
    for each in found:
        for now, frozen, old in zip(each.logprobs, each.frozen, each.old, strict=True):
            terms.append(-min(math.exp(frozen - old), 5.0) * standardised(found, each) * now)
    return sum(terms) / len(terms)


def read_rloo(found: list[Response]) -> float:
    """Ahmadian et al. 2024, leave-one-out, the KL in the reward, PPO's clip over the ratio of whole responses."""

    def reward(each: Response) -> float:
        return each.reward - BETA * sum(old - ref for old, ref in zip(each.old, each.reference, strict=True))

    total = 0.0
    for each in found:
        baseline = statistics.mean(reward(other) for other in others(found, each, itself=False))
        total -= clipped(math.prod(ratios(each)), reward(each) - baseline, 0.2, 0.2)
    return total / len(found)


def read_reinforce_plus_plus(found: list[Response]) -> float:
    """Hu et al. 2025: A_t = r - beta sum of the KL from t on, normalised over the batch's tokens; PPO's clip."""
    advantages = []
    for each in found:
        kl = [old - ref for old, ref in zip(each.old, each.reference, strict=True)]
        advantages.append([each.reward - BETA * sum(kl[t:]) for t in range(len(each))])
    terms = []
    for each, row in zip(found, whitened(advantages), strict=True):
        terms += [-clipped(w, a, 0.2, 0.2) for w, a in zip(ratios(each), row, strict=True)]
    return sum(terms) / len(terms)


def read_reinforce_plus_plus_baseline(found: list[Response]) -> float:
    """The same with the group's mean taken off and k2 in the loss."""
    rows = whitened([[centred(found, each)] * len(each) for each in found])
    terms = []
    for each, row in zip(found, rows, strict=True):
        for w, a, now, ref in zip(ratios(each), row, each.logprobs, each.reference, strict=True):
            terms.append(-clipped(w, a, 0.2, 0.2) + BETA * (now - ref) ** 2 / 2)
    return sum(terms) / len(terms)


READINGS: dict[str, Callable[[list[Response]], float]] = {
    "grpo": read_grpo,
    "dr_grpo": read_dr_grpo,
    "dapo": read_dapo,
    "gspo": read_gspo,
    "cispo": read_cispo,
    "rloo": read_rloo,
    "reinforce_plus_plus": read_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": read_reinforce_plus_plus_baseline,
}


def assert_slopes(found: list[Response], gradient_BL: torch.Tensor, read: Callable[[list[Response]], float]) -> None:
    """The gradient is that of the reading, by differences in each log-prob."""
    for row, response in enumerate(found):
        for position in range(len(response)):
            values = []
            for step in (1e-6, -1e-6):
                logprobs = [each + step * (index == position) for index, each in enumerate(response.logprobs)]
                moved = replace(response, logprobs=logprobs)
                values.append(read([moved if index == row else each for index, each in enumerate(found)]))
            slope = (values[0] - values[1]) / 2e-6
            assert gradient_BL[row, STARTS[row] + position].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def loss_and_gradient(found: list[Response], term: LossTerm) -> tuple[float, torch.Tensor]:
    logprobs_BL, batch = to_tensors(found)
    logprobs_BL.requires_grad_()
    loss, _ = spo_loss(logprobs_BL, batch, [term], BETA)
    loss.backward()
    assert logprobs_BL.grad is not None
    assert not logprobs_BL.grad[~batch.response_mask_BL].any()
    return loss.item(), logprobs_BL.grad


@pytest.mark.parametrize("objective", READINGS)
def test_a_method_equals_the_reading_of_its_paper_in_value_and_gradient(objective: str) -> None:
    found = draw_responses()
    loss, gradient_BL = loss_and_gradient(found, LossTerm(objective=objective))
    assert loss == pytest.approx(READINGS[objective](found), rel=1e-12)
    assert_slopes(found, gradient_BL, READINGS[objective])


@pytest.mark.parametrize("objective", READINGS)
def test_parts_that_are_told_of_the_whole_batch_add_up_to_it(objective: str) -> None:
    logprobs_BL, batch = to_tensors(draw_responses())
    terms = [LossTerm(objective=objective)]
    whole, _ = spo_loss(logprobs_BL, batch, terms, BETA)
    cut = [slice(0, 2), slice(2, 5)]
    totals = BatchTotals.added([BatchTotals.of(batch.select(rows), terms, BETA) for rows in cut])
    parts = [
        spo_loss(logprobs_BL[rows], totals.told_to(batch.select(rows)), terms, BETA)[0] * (rows.stop - rows.start) / 5
        for rows in cut
    ]
    torch.testing.assert_close(sum(parts), whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("limits", [None, (0.7, 1.1)])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_the_correction_weighs_the_trainers_policy_against_the_samplers(
    correction: str, limits: tuple[float, float] | None
) -> None:
    """TIS: min(w, C). IcePop: w within [alpha, beta], else nothing. The clip counts from the trainer's own policy."""
    low, high = limits or {"truncate": (0.0, 2.0), "mask": (0.5, 5.0)}[correction]

    def read(found: list[Response]) -> float:
        total = 0.0
        for each in found:
            advantage = standardised(found, each)
            row = 0.0
            for now, proximal, old in zip(each.logprobs, each.frozen, each.old, strict=True):
                weight = math.exp(proximal - old)
                kept = low <= weight <= high
                weight = min(max(weight, low), high) if correction == "truncate" else weight * kept
                row -= weight * clipped(math.exp(now - proximal), advantage, 0.2, 0.2)
            total += row / len(each)
        return total / len(found)

    found = draw_responses()
    weights = [w for each in found for w in ratios(each)]
    assert limits is None or not all(low <= w <= high for w in weights)
    term = LossTerm.model_validate(
        {"objective": "grpo", "kl_coefficient": 0.0, "correction": correction, "correction_limits": limits}
    )
    loss, gradient_BL = loss_and_gradient(found, term)
    assert loss == pytest.approx(read(found), rel=1e-12)
    assert_slopes(found, gradient_BL, read)


def test_after_the_first_update_the_ratio_counts_from_the_policy_before_it() -> None:
    found = draw_responses()
    logprobs_BL, batch = to_tensors(found)
    proximal_BL = torch.where(batch.response_mask_BL, logprobs_BL - 0.1, math.nan)
    term = LossTerm(objective="dr_grpo", correction="truncate")
    loss_B = trajectory_losses(logprobs_BL, replace(batch, proximal_logprobs_BL=proximal_BL), term, BETA)
    read = []
    for each in found:
        ratio = math.exp(0.1)
        read.append(-sum(min(w / ratio, 2.0) * clipped(ratio, centred(found, each), 0.2, 0.2) for w in ratios(each)))
    assert loss_B.tolist() == pytest.approx(read)


@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_each_estimator_of_the_kl_in_the_loss_or_in_the_reward_equals_its_reading(estimator: str, place: str) -> None:
    def kl(now: float, ref: float) -> float:
        ratio = math.exp(ref - now)
        return {"k1": now - ref, "k2": (now - ref) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[estimator]

    def read(found: list[Response]) -> float:
        def reward(each: Response) -> float:
            taken = sum(kl(old, ref) for old, ref in zip(each.old, each.reference, strict=True))
            return each.reward - 0.05 * taken * (place == "reward")

        total = 0.0
        for each in found:
            advantage = reward(each) - statistics.mean(reward(o) for o in others(found, each, itself=True))
            total -= sum(clipped(w, advantage, 0.2, 0.2) for w in ratios(each))
            if place == "loss":
                total += 0.05 * sum(kl(now, ref) for now, ref in zip(each.logprobs, each.reference, strict=True))
        return total / len(found)

    found = draw_responses()
    term = LossTerm.model_validate({"objective": "dr_grpo", "kl": estimator, "kl_in": place, "kl_coefficient": 0.05})
    loss, gradient_BL = loss_and_gradient(found, term)
    assert loss == pytest.approx(read(found), rel=1e-12)
    assert_slopes(found, gradient_BL, read)


def test_only_k2_as_a_loss_has_the_gradient_of_the_kl_on_samples_of_the_policy() -> None:
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference_V = torch.log_softmax(torch.tensor([0.0, 0.5, -0.2, 0.4], dtype=torch.float64), dim=0)
    log_policy_V = torch.log_softmax(logits_V, dim=0)
    policy_V = log_policy_V.exp().detach()

    def slope(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits_V, retain_graph=True)[0]

    log_ratio_V = log_policy_V - reference_V
    expected = {name: slope((policy_V * kl_estimate(log_ratio_V, name)).sum()) for name in ("k1", "k2", "k3")}  # type: ignore[arg-type]
    torch.testing.assert_close(expected["k1"], torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(expected["k2"], slope((log_policy_V.exp() * log_ratio_V).sum()))
    torch.testing.assert_close(expected["k3"], slope((reference_V.exp() * (reference_V - log_policy_V)).sum()))
    # And the entropy bonus is k2 to the uniform distribution.
    bonus = slope((policy_V * 0.5 * log_policy_V.square()).sum())
    torch.testing.assert_close(bonus, slope((log_policy_V.exp() * log_policy_V).sum()))


def test_the_entropy_bonus_is_half_the_square_of_each_log_prob() -> None:
    found = draw_responses()
    plain, _ = loss_and_gradient(found, LossTerm(objective="dapo"))
    loss, _ = loss_and_gradient(found, LossTerm(objective="dapo", entropy_coefficient=0.01))
    tokens = [now for each in found for now in each.logprobs]
    assert loss - plain == pytest.approx(0.01 * sum(now**2 / 2 for now in tokens) / len(tokens))


def test_on_policy_all_relatives_push_a_prompts_better_response_up_and_its_worse_one_down() -> None:
    found = [replace(each, logprobs=each.old, frozen=each.old) for each in draw_responses()]
    for objective in READINGS:
        _, gradient_BL = loss_and_gradient(found, LossTerm(objective=objective, kl_coefficient=0.0))
        assert gradient_BL[0].sum() < 0 < gradient_BL[1].sum()


def test_one_sided_limits_can_be_said() -> None:
    term = LossTerm(objective="dapo", clip=0.1)
    assert (term.surrogate.clip_low, term.surrogate.clip_high) == (0.1, 0.1)
    assert LossTerm(objective="dapo", clip=0.1, clip_high=0.5).surrogate.clip_high == 0.5
    assert LossTerm(objective="gspo").surrogate.clip_high == 4e-4


def test_a_prompt_with_one_trajectory_is_refused_where_it_is_compared_with_others() -> None:
    logprobs_BL, batch = to_tensors(draw_responses())
    alone = replace(batch, group_B=torch.arange(5))
    for objective in READINGS:
        if LossTerm(objective=objective).needs("groups"):
            with pytest.raises(InvalidInput) as refused:
                trajectory_losses(logprobs_BL, alone, LossTerm(objective=objective), BETA)
            assert refused.value.code == "lone_group"
        else:
            assert torch.isfinite(trajectory_losses(logprobs_BL, alone, LossTerm(objective=objective), BETA)).all()


@pytest.mark.parametrize("limits", [(1.0, 1.0), (2.0, 1.0), (-1.0, 2.0)])
def test_limits_of_the_correction_that_are_none_are_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="correction_limits"):
        LossTerm(objective="grpo", correction="mask", correction_limits=limits)


def test_the_estimators_of_the_kl_order_as_they_should_on_any_sample() -> None:
    log_ratio = torch.linspace(-3, 3, 13, dtype=torch.float64)
    assert (kl_estimate(log_ratio, "k3") >= 0).all()
    assert (kl_estimate(log_ratio, "k2") >= 0).all()
    assert all(low < high for low, high in pairwise(kl_estimate(log_ratio, "k1").tolist()))
