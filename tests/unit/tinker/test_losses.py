"""The losses against a reading of Tinker's documentation, position by position, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from services.tinker.shared_model import LOSSES, loss_config, loss_named
from spo.errors import InvalidInput

POSITIONS = 6
Numbers = list[float]
Reading = Callable[[float, float, float], float]


def _between(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


# Of one position: its log-prob, the sampler's, the advantage.
READINGS: dict[str, Reading] = {
    "importance_sampling": lambda new, old, advantage: -math.exp(new - old) * advantage,
    "ppo": lambda new, old, advantage: (
        -min(math.exp(new - old) * advantage, _between(math.exp(new - old), 0.8, 1.2) * advantage)
    ),
    # Its clipped ratio carries no gradient: the value is compared here, the gradient below.
    "cispo": lambda new, old, advantage: -_between(math.exp(new - old), 0.0, 4.0) * new * advantage,
    "dro": lambda new, old, advantage: -(new * advantage - 0.5 * 0.05 * (new - old) ** 2),
}


def _case(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    logprobs_L = -torch.rand(POSITIONS, generator=draw, dtype=torch.float64) * 3
    old_L = logprobs_L + torch.randn(POSITIONS, generator=draw, dtype=torch.float64)
    advantages_L = torch.randn(POSITIONS, generator=draw, dtype=torch.float64)
    return logprobs_L.requires_grad_(), {"logprobs": old_L, "advantages": advantages_L, "weights": advantages_L}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", READINGS)
def test_a_loss_is_the_sum_of_what_its_definition_says_of_each_position(name: str, seed: int) -> None:
    logprobs_L, inputs = _case(seed)
    loss = LOSSES[name]
    found = loss.compute(logprobs_L, inputs, loss_config(loss, {}))
    rows = zip(logprobs_L.tolist(), inputs["logprobs"].tolist(), inputs["advantages"].tolist(), strict=True)
    assert found.item() == pytest.approx(sum(READINGS[name](*row) for row in rows), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", [name for name in READINGS if name != "cispo"])
def test_its_gradient_is_that_of_small_steps(name: str, seed: int) -> None:
    logprobs_L, inputs = _case(seed)
    loss = LOSSES[name]
    loss.compute(logprobs_L, inputs, loss_config(loss, {})).backward()
    assert logprobs_L.grad is not None
    for at, (new, old, advantage) in enumerate(
        zip(logprobs_L.tolist(), inputs["logprobs"].tolist(), inputs["advantages"].tolist(), strict=True)
    ):
        slope = (READINGS[name](new + 1e-6, old, advantage) - READINGS[name](new - 1e-6, old, advantage)) / 2e-6
        assert logprobs_L.grad[at].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_cispo_weighs_the_gradient_of_the_log_prob_by_the_clipped_ratio(seed: int) -> None:
    logprobs_L, inputs = _case(seed)
    config = loss_config(LOSSES["cispo"], {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5})
    LOSSES["cispo"].compute(logprobs_L, inputs, config).backward()
    ratio_L = (logprobs_L.detach() - inputs["logprobs"]).exp().clamp(0.5, 1.5)
    assert logprobs_L.grad is not None
    torch.testing.assert_close(logprobs_L.grad, -ratio_L * inputs["advantages"])


def test_cross_entropy_is_the_weighted_sum_of_negative_log_probs() -> None:
    logprobs_L = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    weights_L = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    assert LOSSES["cross_entropy"].compute(logprobs_L, {"weights": weights_L}, {}).item() == 3.5


def test_an_unknown_loss_and_an_unknown_number_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="'gspo' is not offered; offered: cross_entropy"):
        loss_named("gspo")
    with pytest.raises(InvalidInput, match="takes no 'epsilon'"):
        loss_config(LOSSES["ppo"], {"epsilon": 0.2})
