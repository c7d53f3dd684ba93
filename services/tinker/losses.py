"""The losses of the Tinker API: sums over the tokens of one datum, from the log-probs of its targets.

As defined at https://tinker-docs.thinkingmachines.ai/losses (and /tinker/losses/{ppo,cispo,dro}). L: position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spo.errors import InvalidInput

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True)
class TinkerLoss:
    """inputs: what a datum brings beside its targets; defaults: the numbers that a request may set."""

    compute: Callable[[Tensor, Inputs, Config], Tensor]
    inputs: tuple[str, ...]
    defaults: Mapping[str, float]


def _cross_entropy(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(logprobs_L * inputs["weights"]).sum()


def _importance_sampling(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(_ratio(logprobs_L, inputs) * inputs["advantages"]).sum()


def _ppo(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio_L, advantages_L = _ratio(logprobs_L, inputs), inputs["advantages"]
    return -torch.minimum(ratio_L * advantages_L, _clipped(ratio_L, config) * advantages_L).sum()


def _cispo(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    clipped_L = _clipped(_ratio(logprobs_L, inputs), config).detach()
    return -(clipped_L * logprobs_L * inputs["advantages"]).sum()


def _dro(logprobs_L: Tensor, inputs: Inputs, config: Config) -> Tensor:
    distance_L = (logprobs_L - inputs["logprobs"]) ** 2
    return -(logprobs_L * inputs["advantages"] - 0.5 * config["beta"] * distance_L).sum()


def _ratio(logprobs_L: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs_L - inputs["logprobs"]).exp()


def _clipped(ratio_L: Tensor, config: Config) -> Tensor:
    return ratio_L.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


_SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(_cross_entropy, ("weights",), {}),
    "importance_sampling": TinkerLoss(_importance_sampling, _SAMPLED, {}),
    "ppo": TinkerLoss(_ppo, _SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": TinkerLoss(_cispo, _SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": TinkerLoss(_dro, _SAMPLED, {"beta": 0.05}),
}


def loss_named(name: str) -> TinkerLoss:
    """Raises InvalidInput naming the losses that there are."""
    if name not in LOSSES:
        raise InvalidInput(f"the loss {name!r} is not offered; offered: {', '.join(LOSSES)}", code="tinker_loss")
    return LOSSES[name]


def loss_config(loss: TinkerLoss, given: Mapping[str, float]) -> dict[str, float]:
    """A request's numbers over the defaults. Raises InvalidInput on a name that the loss does not know."""
    unknown = sorted(given.keys() - loss.defaults.keys())
    if unknown:
        raise InvalidInput(f"the loss takes no {unknown[0]!r}", code="tinker_loss")
    return {**loss.defaults, **given}
