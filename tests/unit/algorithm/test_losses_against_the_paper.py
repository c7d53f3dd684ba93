"""Every objective of 3.1 against an independent float64 reading of the paper, written with loops and math.log.

The reading takes the policy's log-probs twice: `live` ones, which the gradient sees, and `frozen` ones, which it does
not (inside detach, and for where the straight-through clip sits). Finite differences move only the live ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from spo.algorithm.objectives import TokenBatch, spo_loss, trajectory_losses
from spo.algorithm.registry import LOSSES, PRESETS, LossTerm

PAPER_BETA = 1 / math.log(100_000)
STEP = 1e-6


@dataclass(frozen=True)
class PlainTrajectory:
    """One response as lists; annotations are (index of the response token, Qhat after it).

    share: of the job's beta that is the temperature of this response: 1, or 1 / |y| where beta is per token.
    """

    logprobs: list[float]
    reference: list[float]
    reward: float
    qhat_0: float
    group: int
    annotations: dict[int, float]
    prompt_tokens: int
    share: float = 1.0


Reading = Callable[[PlainTrajectory, list[float], LossTerm, float, list[PlainTrajectory]], float]


def q_after(trajectory: PlainTrajectory, logprobs: list[float], tokens: int, beta: float) -> float:
    q = trajectory.qhat_0
    for t in range(tokens):
        q += beta * (logprobs[t] - trajectory.reference[t])
    return q


def reverse_target(trajectory: PlainTrajectory, tokens: int, beta: float) -> float:
    target = trajectory.reward
    for s in range(tokens, len(trajectory.logprobs)):
        target -= beta * (trajectory.logprobs[s] - trajectory.reference[s])
    return target


def squared(live: float, target: float, beta: float) -> float:
    return (live - target) ** 2 / (2 * beta)


def cross_entropy(live: float, frozen: float, target: float, epsilon: float) -> float:
    x = math.exp(min(target, 0.0))
    clipped = live + (min(frozen, -epsilon) - frozen)
    return x * max(-live, 0.0) - (1 - x) * math.log(1 - math.exp(clipped))


def read_terminal_squared(tr: PlainTrajectory, live: list[float], term: LossTerm, beta: float, _: object) -> float:
    return squared(q_after(tr, live, len(live), beta), tr.reward, beta)


def read_terminal_cross_entropy(
    tr: PlainTrajectory, live: list[float], term: LossTerm, beta: float, _: object
) -> float:
    n = len(live)
    prediction, frozen = q_after(tr, live, n, beta), q_after(tr, tr.logprobs, n, beta)
    return cross_entropy(prediction / beta, frozen / beta, tr.reward / beta, term.epsilon)


def read_reverse_q_squared(tr: PlainTrajectory, live: list[float], term: LossTerm, beta: float, _: object) -> float:
    return sum(squared(q_after(tr, live, t, beta), reverse_target(tr, t, beta), beta) for t in range(1, len(live) + 1))


def read_reverse_q_cross_entropy(
    tr: PlainTrajectory, live: list[float], term: LossTerm, beta: float, _: object
) -> float:
    total = 0.0
    for t in range(1, len(live) + 1):
        prediction, frozen = q_after(tr, live, t, beta), q_after(tr, tr.logprobs, t, beta)
        total += cross_entropy(prediction / beta, frozen / beta, reverse_target(tr, t, beta) / beta, term.epsilon)
    return total


def read_advantage_sigmoid(tr: PlainTrajectory, live: list[float], term: LossTerm, beta: float, _: object) -> float:
    def sigmoid(u: float) -> float:
        return 1 / (1 + math.exp(-u))

    unit = 1.0 if term.sigmoid_unit == "q" else beta
    u = term.sigmoid_scale * sum(beta * (p - p0) for p, p0 in zip(live, tr.reference, strict=True)) / unit
    target = sigmoid(term.sigmoid_scale * (tr.reward - tr.qhat_0) / unit)
    return -target * math.log(sigmoid(u)) - (1 - target) * math.log(sigmoid(-u))


def read_monte_carlo_squared(tr: PlainTrajectory, live: list[float], term: LossTerm, beta: float, _: object) -> float:
    errors = [squared(q_after(tr, live, t + 1, beta), q, beta) for t, q in tr.annotations.items()]
    return sum(errors) / len(errors) if errors else 0.0


def read_monte_carlo_cross_entropy(
    tr: PlainTrajectory, live: list[float], term: LossTerm, beta: float, _: object
) -> float:
    errors = []
    for t, q in tr.annotations.items():
        prediction, frozen = q_after(tr, live, t + 1, beta), q_after(tr, tr.logprobs, t + 1, beta)
        errors.append(cross_entropy(prediction / beta, frozen / beta, q / beta, term.epsilon))
    return sum(errors) / len(errors) if errors else 0.0


def read_group_centred_squared(
    tr: PlainTrajectory, live: list[float], term: LossTerm, beta: float, others: list[PlainTrajectory]
) -> float:
    members = [o for o in others if o.group == tr.group]
    betas = [beta / tr.share * o.share for o in members]
    residuals = [q_after(o, o.logprobs, len(o.logprobs), b) - o.reward for o, b in zip(members, betas, strict=True)]
    mean = sum(d / b for d, b in zip(residuals, betas, strict=True)) / sum(1 / b for b in betas)
    n = len(residuals)
    own = q_after(tr, live, len(live), beta) - tr.reward
    deviation = statistics.stdev(o.reward for o in members) if n > 1 and term.normalise == "deviation" else 0.0
    return n / max(n - 1, 1) * squared(own, mean, beta) / (deviation or 1.0)


READINGS: dict[str, Reading] = {
    "terminal_squared": read_terminal_squared,
    "terminal_cross_entropy": read_terminal_cross_entropy,
    "reverse_q_squared": read_reverse_q_squared,
    "reverse_q_cross_entropy": read_reverse_q_cross_entropy,
    "advantage_sigmoid": read_advantage_sigmoid,
    "monte_carlo_squared": read_monte_carlo_squared,
    "monte_carlo_cross_entropy": read_monte_carlo_cross_entropy,
    "group_centred_squared": read_group_centred_squared,
}


def draw_trajectories(seed: int, beta: float, per: str = "sequence", count: int = 12) -> list[PlainTrajectory]:
    """Random responses whose Q_T / beta falls on both sides of 0; every number is exact in float32."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return (low + (high - low) * torch.rand((), generator=generator)).item()

    drawn = []
    for row in range(count):
        length = int(uniform(1, 9))
        annotated = [t for t in range(length) if uniform(0, 1) < 0.4]
        drawn.append(
            PlainTrajectory(
                logprobs=[uniform(-4, 0) for _ in range(length)],
                reference=[uniform(-4, 0) for _ in range(length)],
                reward=[0.0, -1.0, uniform(-2, 0)][row % 3],
                qhat_0=uniform(-8, 0) * torch.tensor(beta).item(),
                group=int(uniform(0, 4)),
                annotations={t: uniform(-9, 0.5) * torch.tensor(beta).item() for t in annotated},
                prompt_tokens=int(uniform(0, 4)),
                share=1 / length if per == "token" else 1.0,
            )
        )
    return [
        replace(
            t,
            qhat_0=torch.tensor(t.qhat_0).item(),
            annotations={k: torch.tensor(v).item() for k, v in t.annotations.items()},
        )
        for t in drawn
    ]


def to_tensors(trajectories: list[PlainTrajectory], dtype: torch.dtype) -> tuple[torch.Tensor, TokenBatch]:
    """Right-padded tensors of the same trajectories, with nan wherever nothing may be read."""
    rows, width = len(trajectories), max(t.prompt_tokens + len(t.logprobs) for t in trajectories) + 1
    logprobs_BL, reference_BL, annotated_BL = (torch.full((rows, width), math.nan, dtype=dtype) for _ in range(3))
    mask_BL, annotated_mask_BL = (torch.zeros(rows, width, dtype=torch.bool) for _ in range(2))
    for row, t in enumerate(trajectories):
        response = slice(t.prompt_tokens, t.prompt_tokens + len(t.logprobs))
        logprobs_BL[row, response] = torch.tensor(t.logprobs, dtype=dtype)
        reference_BL[row, response] = torch.tensor(t.reference, dtype=dtype)
        mask_BL[row, response] = True
        for index, q in t.annotations.items():
            annotated_BL[row, t.prompt_tokens + index] = q
            annotated_mask_BL[row, t.prompt_tokens + index] = True
    batch = TokenBatch(
        input_ids_BL=torch.zeros(rows, width, dtype=torch.long),
        attention_mask_BL=torch.ones(rows, width, dtype=torch.bool),
        response_mask_BL=mask_BL,
        reference_logprobs_BL=reference_BL,
        sampling_logprobs_BL=torch.zeros(rows, width, dtype=dtype),
        reward_B=torch.tensor([t.reward for t in trajectories], dtype=dtype),
        qhat_0_B=torch.tensor([t.qhat_0 for t in trajectories], dtype=dtype),
        source_B=torch.ones(rows, dtype=torch.long),
        group_B=torch.tensor([t.group for t in trajectories]),
        annotated_q_BL=annotated_BL,
        annotated_mask_BL=annotated_mask_BL,
    )
    per_token = any(t.share != 1 for t in trajectories)
    return logprobs_BL.requires_grad_(), batch.with_beta_per_token() if per_token else batch


every_objective = pytest.mark.parametrize("objective", READINGS)
every_kind_of_beta = pytest.mark.parametrize("per", ["sequence", "token"])
every_beta = pytest.mark.parametrize("beta", [PAPER_BETA, 1 / math.log(100), 1.0])


def test_every_objective_has_a_reading_here_or_among_the_baselines() -> None:
    baselines = {"policy_gradient", "supervised", "ppo", "dpo", "kto", "distillation", "kl_to_reference", *PRESETS}
    assert set(READINGS) == set(LOSSES) - baselines


@every_beta
@pytest.mark.parametrize("unit", ["q", "log_prob"])
def test_the_sigmoid_is_scaled_in_the_unit_that_the_term_names(beta: float, unit: Literal["q", "log_prob"]) -> None:
    trajectories = draw_trajectories(11, beta)
    term = LossTerm(objective="advantage_sigmoid", sigmoid_scale=1.7, sigmoid_unit=unit)
    logprobs_BL, batch = to_tensors(trajectories, torch.float64)
    read = [read_advantage_sigmoid(t, t.logprobs, term, beta, None) for t in trajectories]
    found_B = trajectory_losses(logprobs_BL, batch, term, beta)
    torch.testing.assert_close(found_B, torch.tensor(read, dtype=torch.float64))


@every_objective
@every_beta
@every_kind_of_beta
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_an_objective_equals_its_reading_of_the_paper(
    objective: str, beta: float, per: str, dtype: torch.dtype, seed: int
) -> None:
    trajectories = draw_trajectories(seed, beta, per)
    term = LossTerm(objective=objective, epsilon=0.05, sigmoid_scale=0.7)
    logprobs_BL, batch = to_tensors(trajectories, dtype)

    loss_B = trajectory_losses(logprobs_BL, batch, term, beta)

    read = [READINGS[objective](t, t.logprobs, term, beta * t.share, trajectories) for t in trajectories]
    near = 1e-5 if dtype is torch.float32 else 1e-11
    torch.testing.assert_close(loss_B, torch.tensor(read, dtype=dtype), rtol=near, atol=near)


@every_beta
@every_kind_of_beta
@pytest.mark.parametrize("seed", range(3))
def test_groups_that_count_by_their_deviation_equal_their_reading(beta: float, per: str, seed: int) -> None:
    """Shao et al. 2024 divide by the deviation of the group; one of equal rewards, such as group 9, counts once."""
    trajectories = draw_trajectories(seed, beta, per)
    trajectories += [replace(each, group=9, reward=-1.0) for each in draw_trajectories(seed + 50, beta, per, count=3)]
    term = LossTerm(objective="group_centred_squared", normalise="deviation")
    logprobs_BL, batch = to_tensors(trajectories, torch.float64)

    loss_B = trajectory_losses(logprobs_BL, batch, term, beta)

    read = [read_group_centred_squared(t, t.logprobs, term, beta * t.share, trajectories) for t in trajectories]
    torch.testing.assert_close(loss_B, torch.tensor(read, dtype=torch.float64))


@every_objective
@every_beta
@every_kind_of_beta
def test_the_gradient_equals_a_finite_difference_of_the_reading(objective: str, beta: float, per: str) -> None:
    trajectories = draw_trajectories(7, beta, per)
    term = LossTerm(objective=objective, epsilon=0.05, sigmoid_scale=0.7)
    logprobs_BL, batch = to_tensors(trajectories, torch.float64)

    spo_loss(logprobs_BL, batch, [term], beta)[0].backward()

    read_total = read_group_total if objective == "group_centred_squared" else read_separate_total
    for row, trajectory in enumerate(trajectories):
        for t in range(len(trajectory.logprobs)):
            up, down = (read_total(trajectories, term, beta, row, t, step) for step in (STEP, -STEP))
            slope = (up - down) / (2 * STEP) / len(trajectories)
            assert logprobs_BL.grad is not None
            found = logprobs_BL.grad[row, trajectory.prompt_tokens + t].item()
            assert math.isclose(found, slope, rel_tol=1e-5, abs_tol=1e-6), (row, t)
    assert not logprobs_BL.grad[~batch.response_mask_BL].any()


def read_separate_total(
    trajectories: list[PlainTrajectory], term: LossTerm, beta: float, row: int, t: int, step: float
) -> float:
    """The one trajectory that moves; targets stay where they were."""
    moved = list(trajectories[row].logprobs)
    moved[t] += step
    return READINGS[term.objective](trajectories[row], moved, term, beta * trajectories[row].share, trajectories)


def read_group_total(
    trajectories: list[PlainTrajectory], term: LossTerm, beta: float, row: int, t: int, step: float
) -> float:
    """All trajectories, because the group's mean moves too: nothing is detached in the centred form."""
    moved = list(trajectories[row].logprobs)
    moved[t] += step
    after = [*trajectories[:row], replace(trajectories[row], logprobs=moved), *trajectories[row + 1 :]]
    return sum(read_group_centred_squared(o, o.logprobs, term, beta * o.share, after) for o in after)
