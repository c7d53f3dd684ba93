"""Alarms that precede the collapse of a run: a pure function of its recent steps, with the reason in words.

No torch here. The signs are those that preceded every collapse in the study of the toy contest; limits are settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

# Told like an alarm, once, of a job's first batch; nothing collapses by it, so that no job pauses.
SAMPLER_MISMATCH = "sampler_mismatch"
ALARMS = ("log_ratio", "response_length", "grad_norm", "truncation", "reward")


@dataclass(frozen=True)
class StepHealth:
    """What one step said: means over its batch; the gradient norm is the one before clipping."""

    log_ratio_nats: float
    grad_norm: float
    response_tokens: float
    truncated_share: float
    reward: float
    loss: float


@dataclass(frozen=True)
class CollapseLimits:
    """Means over `window` steps are compared with the `window` steps before them."""

    window: int = 10
    log_ratio_nats: float = 4.0
    grad_norm: float = 20.0
    # How many times longer or shorter than pi0's the responses may become.
    response_length_factor: float = 2.0
    truncated_share_rise: float = 0.1
    reward_fall: float = 0.1


def collapse_alarms(
    history: Sequence[StepHealth], reference_response_tokens: float, limits: CollapseLimits
) -> dict[str, str]:
    """Alarm name -> reason, empty while all is well or fewer than `window` steps are known.

    Names: log_ratio, grad_norm, response_length, truncation, reward. Those that need a trend wait for two windows.
    reference_response_tokens: mean length of pi0's responses. What is nan sounds no alarm.
    """
    if len(history) < limits.window:
        return {}
    now = _mean(history[-limits.window :])
    found = {}
    if now.log_ratio_nats > limits.log_ratio_nats:
        found["log_ratio"] = (
            f"the policy gives the batch {now.log_ratio_nats:.1f} nats more than pi0 (limit {limits.log_ratio_nats:g})"
        )
    drift = now.response_tokens / reference_response_tokens
    if drift < 1 / limits.response_length_factor or drift > limits.response_length_factor:
        found["response_length"] = f"responses are {drift:.2f} times as long as pi0's"
    if len(history) >= 2 * limits.window:
        found |= _trends(_mean(history[-2 * limits.window : -limits.window]), now, limits)
    return found


def _trends(before: StepHealth, now: StepHealth, limits: CollapseLimits) -> dict[str, str]:
    found = {}
    if now.grad_norm > limits.grad_norm and now.grad_norm > before.grad_norm:
        found["grad_norm"] = f"the gradient norm rose from {before.grad_norm:.1f} to {now.grad_norm:.1f}"
    if now.truncated_share > before.truncated_share + limits.truncated_share_rise:
        found["truncation"] = f"truncated responses rose from {before.truncated_share:.0%} to {now.truncated_share:.0%}"
    if now.reward < before.reward - limits.reward_fall and now.loss > before.loss:
        found["reward"] = f"the reward fell from {before.reward:.2f} to {now.reward:.2f} while the loss rose"
    return found


def _mean(steps: Sequence[StepHealth]) -> StepHealth:
    return StepHealth(*(fmean(getattr(step, name) for step in steps) for name in StepHealth.__dataclass_fields__))
