"""What the published relatives of GRPO differ in, as settings of one surrogate. No torch here: a JobSpec reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Baseline = Literal["none", "group", "leave_one_out"]
Normalise = Literal["deviation", "none", "batch"]
Ratio = Literal["token", "sequence", "product"]
Aggregation = Literal["token", "sequence", "sum"]
Correction = Literal["none", "truncate", "mask"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]

# Truncated importance sampling caps the weight at 2; IcePop leaves tokens out whose weight is outside [.5, 5].
CORRECTION_LIMITS: dict[Correction, tuple[float, float]] = {
    "none": (0.0, float("inf")),
    "truncate": (0.0, 2.0),
    "mask": (0.5, 5.0),
}


@dataclass(frozen=True)
class Surrogate:
    """One policy-gradient loss.

    baseline: what is taken off the reward: nothing, the mean of the prompt's rewards, or that of its other ones.
    normalise: by what the difference is divided: the deviation of the prompt's rewards, nothing, or mean and deviation
    over all tokens of the batch. ratio: of pi_theta to the sampler, of each token, its geometric mean over a response
    ("sequence"), or their product. clip_low, clip_high: the ratio's limits are 1 - low and 1 + high. weight_only: the
    clipped ratio is a weight of ln pi without gradient, so that no token is left out (CISPO). aggregation: the mean
    over each response's tokens, the mean over all tokens of the batch, or the sum. correction, correction_limits: of
    what the sampler's log-probs differ from the trainer's own before the first update on the batch. kl: the estimator
    of the KL to pi0, in the loss or taken off the reward, times kl_coefficient (None: beta). entropy: coefficient of
    the bonus.
    """

    baseline: Baseline = "group"
    normalise: Normalise = "deviation"
    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    weight_only: bool = False
    aggregation: Aggregation = "sequence"
    correction: Correction = "none"
    correction_limits: tuple[float, float] | None = None
    kl: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    kl_coefficient: float | None = 0.0
    entropy: float = 0.0

    @property
    def limits(self) -> tuple[float, float]:
        """Lowest and highest weight that the correction leaves as it is."""
        return self.correction_limits or CORRECTION_LIMITS[self.correction]

    @property
    def reads_whole_batch(self) -> bool:
        """Whether a part of the batch cannot be learned from without numbers of the whole."""
        return self.aggregation == "token" or self.normalise == "batch"


PRESETS: dict[str, Surrogate] = {
    # Shao et al. 2024, Eq. 3 and 4.
    "grpo": Surrogate(kl_coefficient=None),
    # Liu et al. 2025, 3.2: neither length nor deviation is divided by. Their constant is the term's coefficient.
    "dr_grpo": Surrogate(normalise="none", aggregation="sum"),
    # Yu et al. 2025, Eq. 8: clip-higher, the mean over tokens, no KL.
    "dapo": Surrogate(clip_high=0.28, aggregation="token"),
    # Zheng et al. 2025, Eq. 5 to 7; the clip of their 5.1.
    "gspo": Surrogate(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    # MiniMax 2025 (M1), Eq. 4 and 5: no lower limit; the weight is at most 5, as in Khatri et al. 2025.
    "cispo": Surrogate(clip_low=1.0, clip_high=4.0, weight_only=True, aggregation="token"),
    # Ahmadian et al. 2024, leave-one-out, the KL in the reward; the ratio, 1 on-policy, is PPO's over responses.
    "rloo": Surrogate(
        baseline="leave_one_out", normalise="none", ratio="product", kl="k1", kl_in="reward", kl_coefficient=None
    ),
    # Hu et al. 2025: returns less the KL from each token on, normalised over the batch.
    "reinforce_plus_plus": Surrogate(
        baseline="none", normalise="batch", aggregation="token", kl="k1", kl_in="reward", kl_coefficient=None
    ),
    # The same with the group's mean as baseline and k2 in the loss.
    "reinforce_plus_plus_baseline": Surrogate(normalise="batch", aggregation="token", kl="k2", kl_coefficient=None),
}
