"""How far two computations of the same log-probs may lie apart by rounding alone.

Kernels, layouts and engines add up in different orders. A token's log-prob then differs by an error that grows with the
precision of the dtype and the size of the logits, and whose sign is as good as random: a sum over T tokens walks like
sqrt(T). A single token may be far out where its logit is small beside others.

Axes: B trajectory, L padded position. Differences in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
        """The most that the log-probs of any prefix of so many tokens may differ in sum; (B,), nats."""
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
