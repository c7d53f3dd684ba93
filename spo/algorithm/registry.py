"""The registry of losses, without torch: name -> its function, settings and needs; sources of trajectories, presets
of surrogates and overlong responses.

No torch here, so that a JobSpec can be checked anywhere: `objectives.py` imports a row's function at its first use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticKnownError

SourceName = Literal["online", "reference", "human", "other_run", "annotated", "shared", "memory"]
# The values of spo.v1.Source; a unit test holds them together.
SOURCE_CODES: dict[SourceName, int] = {
    "online": 1,
    "reference": 2,
    "human": 3,
    "other_run": 4,
    "annotated": 5,
    "shared": 6,
    "memory": 7,
}

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

# value: Qhat_0 of the prompt. groups: all trajectories of a prompt in one forward. annotations: Monte-Carlo estimates
# of Q_t. critic: PPO's value model. behaviour: the sampler's log-probs. batch: numbers of the whole batch. proximal:
# the policy's log-probs before the first update on the batch. pairs: trajectories of a prompt with different rewards.
# teacher: log-probs of the model that is imitated, the job's reference where it names no other.
Need = Literal["value", "groups", "annotations", "critic", "behaviour", "batch", "proximal", "pairs", "teacher"]
# Of PPO (Schulman et al. 2017) and of what has no limits of its own.
DEFAULT_CLIP = 0.2
Weight = Annotated[float, Field(ge=0, le=1e6)]


class OverlongSpec(BaseModel):
    """What a loss makes of responses that are too long (Yu et al. 2025, 3.4); the store keeps rewards as they were."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["filter", "shape"] = Field(
        default="filter",
        description="filter: responses that were cut off teach nothing and do not count in their group's mean. shape: "
        "the reward falls over the last buffer_tokens before the limit, by its scale at the limit.",
    )
    buffer_tokens: int = Field(default=256, ge=1, le=2**31 - 1, description="shape: the length of the slope.")

    def penalty(self, tokens: int, limit: int) -> float:
        """Share of the reward's scale that a response of so many tokens loses; between 0 and 1 (Eq. 13)."""
        return min(1.0, max(0.0, (tokens - (limit - self.buffer_tokens)) / self.buffer_tokens))


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


@dataclass(frozen=True)
class Loss:
    """One row of the registry.

    function: "module.name" in spo.algorithm, called as (logprobs_BL, batch, beta, **settings); returns loss_B.
    settings: the fields of LossTerm that it takes as keywords.
    """

    function: str
    settings: tuple[str, ...] = ()
    needs: Collection[Need] = ()


LOSSES: dict[str, Loss] = {
    "terminal_squared": Loss("objectives.terminal_squared", needs=["value"]),
    "terminal_cross_entropy": Loss("objectives.terminal_cross_entropy", ("epsilon",), needs=["value"]),
    "reverse_q_squared": Loss("objectives.reverse_q_squared", needs=["value"]),
    "reverse_q_cross_entropy": Loss("objectives.reverse_q_cross_entropy", ("epsilon",), needs=["value"]),
    "advantage_sigmoid": Loss("objectives.advantage_sigmoid", ("sigmoid_scale", "sigmoid_unit"), needs=["value"]),
    "monte_carlo_squared": Loss("objectives.monte_carlo_squared", needs=["value", "annotations"]),
    "monte_carlo_cross_entropy": Loss(
        "objectives.monte_carlo_cross_entropy", ("epsilon",), needs=["value", "annotations"]
    ),
    "group_centred_squared": Loss("objectives.group_centred_squared", ("normalise",), needs=["groups"]),
    "policy_gradient": Loss("baselines.soft_policy_gradient", ("clip",), needs=["value", "behaviour"]),
    "supervised": Loss("baselines.supervised", ("min_reference_logprob",)),
    "kl_to_reference": Loss("baselines.kl_to_reference", ("kl",)),
    "ppo": Loss("baselines.ppo", ("clip",), needs=["critic", "behaviour"]),
    "distillation": Loss("baselines.distillation", ("clip",), needs=["behaviour", "teacher"]),
    "dpo": Loss("baselines.dpo", needs=["groups", "pairs"]),
    "kto": Loss("baselines.kto", ("desirable_reward", "undesirable_weight"), needs=["groups"]),
    **{
        name: Loss(
            "baselines.surrogate_loss",
            ("surrogate",),
            needs=["behaviour"] if preset.baseline == "none" else ["behaviour", "groups"],
        )
        for name, preset in PRESETS.items()
    },
}


def _registered(name: str) -> str:
    if name not in LOSSES:
        *first, last = map(repr, LOSSES)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(first)} or {last}"})
    return name


LossName = Annotated[
    str, AfterValidator(_registered), WithJsonSchema({"type": "string", "enum": list(LOSSES)}, mode="validation")
]


class LossTerm(BaseModel):
    """One objective on some sources; the loss is the coefficient-weighted sum of the terms."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    objective: LossName = "terminal_squared"
    coefficient: float = Field(default=1.0, gt=0, le=1e6)
    sources: tuple[SourceName, ...] | None = Field(
        default=None, max_length=16, description="Sources it applies to; default: all."
    )
    epsilon: float = Field(
        default=1e-3,
        gt=0,
        lt=10,
        description="Clip of the cross-entropy forms, log-prob units: a failure pulls by up to 1 / epsilon.",
    )
    sigmoid_scale: float = Field(default=1.0, gt=0, le=1e6, description="Scale inside the sigmoid.")
    sigmoid_unit: Literal["log_prob", "q"] = Field(default="log_prob", description="What sigmoid_scale multiplies.")
    clip: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Clip of the importance ratio at 1 - clip and 1 + clip; by default .2, or as in the paper.",
    )
    clip_high: float | None = Field(
        default=None, gt=0, le=1e6, description="Clip at 1 + clip_high instead, of GRPO's relatives."
    )
    baseline: Baseline | None = Field(
        default=None, description="What is taken off the reward; the default of this and what follows is the method's."
    )
    normalise: Normalise | None = Field(
        default=None,
        description="What group-relative advantages are divided by; of group_centred_squared its residuals: deviation, "
        "or by default nothing.",
    )
    ratio: Ratio | None = Field(
        default=None,
        description="Importance ratio: of each token, its geometric mean over a response, its product.",
    )
    aggregation: Aggregation | None = Field(
        default=None, description="Mean over each response's tokens, over all tokens of the batch, or the sum."
    )
    correction: Correction = Field(
        default="none",
        description="Of what the sampler's log-probs differ from the trainer's: weights cut off at a limit (TIS), or "
        "tokens left out beyond limits (IcePop). The clip then counts from the trainer's own policy.",
    )
    correction_limits: tuple[Weight, Weight] | None = Field(
        default=None,
        description="Lowest and highest weight; by default 0 and 2, or .5 and 5 for tokens left out.",
    )
    kl: KlEstimator | None = Field(default=None, description="Estimator of the KL to pi0.")
    kl_in: KlPlace | None = Field(default=None, description="Whether the KL is added to the loss or taken off rewards.")
    kl_coefficient: float | None = Field(
        default=None, ge=0, le=1e6, description="By default beta, or 0 where the method's paper has none."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, le=1e6, description="Of the bonus on the policy's entropy.")
    desirable_reward: float = Field(default=0.0, ge=-1e6, le=0, description="kto: rewards from here on are desirable.")
    undesirable_weight: float = Field(default=1.0, gt=0, le=1e6, description="kto: weight of those that are not.")
    min_reference_logprob: float | None = Field(
        default=None,
        le=0,
        ge=-1000,
        description="supervised: responses are left out whose mean log-prob per token under pi0 (nats) is below.",
    )

    @model_validator(mode="after")
    def limits_are_ordered(self) -> Self:
        limits = self.correction_limits
        if limits and limits[0] >= limits[1]:
            raise ValueError("correction_limits must be two weights, the lower one first")
        return self

    @property
    def surrogate(self) -> Surrogate:
        """The settings of a relative of GRPO: the method's own, with what this term says instead."""
        preset = PRESETS.get(self.objective, Surrogate())
        low = preset.clip_low if self.clip is None else self.clip
        high = preset.clip_high if self.clip is None else self.clip
        return Surrogate(
            baseline=self.baseline or preset.baseline,
            normalise=self.normalise or preset.normalise,
            ratio=self.ratio or preset.ratio,
            clip_low=low,
            clip_high=high if self.clip_high is None else self.clip_high,
            weight_only=preset.weight_only,
            aggregation=self.aggregation or preset.aggregation,
            correction=self.correction,
            correction_limits=self.correction_limits,
            kl=self.kl or preset.kl,
            kl_in=self.kl_in or preset.kl_in,
            kl_coefficient=preset.kl_coefficient if self.kl_coefficient is None else self.kl_coefficient,
            entropy=self.entropy_coefficient,
        )

    @model_validator(mode="after")
    def the_kl_has_a_gradient(self) -> Self:
        if self.objective == "kl_to_reference" and self.kl == "k1":
            raise ValueError("kl_to_reference: the gradient of k1 is 0 in the mean; take k2 or k3")
        return self

    def settings(self) -> dict[str, object]:
        """What its objective's function takes by keyword."""
        found = {name: getattr(self, name) for name in LOSSES[self.objective].settings}
        return {**found, "clip": DEFAULT_CLIP} if "clip" in found and self.clip is None else found

    def needs(self, need: Need) -> bool:
        """Whether its objective cannot do without this."""
        if self.objective in PRESETS and need in ("batch", "proximal", "groups"):
            asked = {
                "batch": self.surrogate.reads_whole_batch,
                "proximal": self.surrogate.correction != "none",
                "groups": self.surrogate.baseline != "none",
            }
            return asked[need]
        return need in LOSSES[self.objective].needs
