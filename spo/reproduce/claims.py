"""What the paper claims, what else we ask, and what our runs say to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from spo.reproduce.results import Result, Results, mean, total_rollouts
from spo.reproduce.statistics import Estimate, difference, ratio

Verdict = Literal["reproduced", "not reproduced", "unclear"]
# Smaller differences in pass@k are no difference worth a claim.
SAME_WITHIN = 0.05
COLLAPSED_BELOW = 0.5


@dataclass(frozen=True)
class ClaimFinding:
    """A claim with our numbers; `measured` says what they are of."""

    claim: str
    source: Literal["paper", "ours"]
    setting: str
    measured: str
    estimate: Estimate | None
    verdict: Verdict
    reason: str

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """One claim on two rows: left is higher than right, or the same."""

    claim: str
    left: tuple[str, str]
    right: tuple[str, str]
    k: int
    expected: Literal["higher", "same"] = "higher"
    source: Literal["paper", "ours"] = "paper"


def _pairs() -> Iterator[Comparison]:
    for setting in ("p160", "p32"):
        for loss in ("squared", "cross_entropy"):
            half, online = (setting, f"half_online_{loss}"), (setting, f"online_{loss}")
            yield Comparison(f"Half-online SPO beats online SPO in pass@10 ({loss})", half, online, 10)
            yield Comparison(f"Half-online SPO beats PPO in pass@10 ({loss})", half, (setting, "ppo"), 10)
            yield Comparison(f"Online SPO beats PPO in pass@10 ({loss})", online, (setting, "ppo"), 10)
            yield Comparison(f"PPO beats half-online SPO in pass@1 ({loss})", (setting, "ppo"), half, 1)
            yield Comparison(f"Half-online SPO beats online SPO in pass@1 ({loss})", half, online, 1)
        grpo = (setting, "grpo")
        yield Comparison("Half-online SPO beats GRPO", (setting, "half_online_squared"), grpo, 10, source="ours")
        yield Comparison("Online SPO beats GRPO", (setting, "online_squared"), grpo, 10, source="ours")
    beside, alone = ("hard", "imitation_beside_spo"), ("hard", "supervised_demo_rate")
    yield Comparison("Imitation beside SPO beats imitation at the same rate", beside, alone, 10, source="ours")
    squared, crossed = ("2a", "squared"), ("2a", "cross_entropy")
    yield Comparison("2a: the squared loss beats cross-entropy", squared, crossed, 10)
    yield Comparison("2a: the squared loss beats the sigmoid advantage", squared, ("2a", "sigmoid"), 10)
    reverse = "2b: reverse-Q targets degrade the cross-entropy loss"
    yield Comparison(reverse, crossed, ("2b", "reverse_q_cross_entropy"), 10)
    reverse = "2b: reverse-Q targets do not change the squared loss"
    yield Comparison(reverse, ("2b", "reverse_q_squared"), squared, 10, "same")
    targets, baseline, rollouts = ("2c", "monte_carlo"), ("2c", "baseline"), ("2c", "rollouts")
    yield Comparison("2c: Monte-Carlo targets at pivotal tokens help", targets, baseline, 10)
    yield Comparison("2c: the same rollouts with the terminal loss do not help", rollouts, baseline, 10, "same")
    yield Comparison("2c: Monte-Carlo targets beat the same rollouts", targets, rollouts, 10)
    spo = ("contaminated", "spo_cross_entropy")
    for control in ("supervised", "expert_iteration", "expert_iteration_filtered"):
        claim = f"Under contaminated data SPO beats {control.replace('_', ' ')}"
        yield Comparison(claim, spo, ("contaminated", control), 10, source="ours")


def findings(results: Results) -> list[ClaimFinding]:
    """Every claim that our runs can say something about, and those that they cannot yet."""
    found = [_compared(results, pair) for pair in _pairs()]
    found += [_ppo_declines(results, setting) for setting in ("p160", "p32")]
    found += [_faster_pushes(results, method) for method in ("spo", "ppo")]
    found += [_half_the_rollouts(results, setting) for setting in ("p160", "p32")]
    found += [_stable(results, method) for method in results.methods("stability")]
    return found


def judged(estimate: Estimate, expected: Literal["higher", "same"]) -> tuple[Verdict, str]:
    """The verdict on a difference, and why."""
    if estimate.seeds < 2:
        return "unclear", "one seed says nothing about seeds"
    if expected == "higher":
        if estimate.low > 0:
            return "reproduced", "the interval is above 0"
        return (
            ("not reproduced", "the interval is below 0") if estimate.high < 0 else ("unclear", "the interval holds 0")
        )
    if estimate.low <= 0 <= estimate.high and abs(estimate.mean) <= SAME_WITHIN:
        return "reproduced", f"the interval holds 0 and the difference is at most {SAME_WITHIN}"
    holds = estimate.low <= 0 <= estimate.high
    return ("unclear", "the interval holds 0 and more") if holds else ("not reproduced", "the interval leaves 0 out")


def _compared(results: Results, pair: Comparison) -> ClaimFinding:
    left, right = results.scores(*pair.left, pair.k), results.scores(*pair.right, pair.k)
    measured = f"pass@{pair.k} of {'/'.join(pair.left)} less that of {'/'.join(pair.right)}"
    if left is None or right is None:
        return ClaimFinding(pair.claim, pair.source, pair.left[0], measured, None, "unclear", "not run")
    estimate = difference(left, right)
    verdict, reason = judged(estimate, pair.expected)
    return ClaimFinding(pair.claim, pair.source, pair.left[0], measured, estimate, verdict, reason)


def _ppo_declines(results: Results, setting: str) -> ClaimFinding:
    """pass@10 falls from its peak to the end while pass@1 rises over the run."""
    runs = results.row(setting, "ppo")
    falls = [max(curve) - curve[-1] for curve in (_curve(run, 10) for run in runs) if len(curve) > 2]
    rises = [curve[-1] - curve[0] for curve in (_curve(run, 1) for run in runs) if len(curve) > 2]
    claim = "PPO's pass@10 declines while its pass@1 rises"
    measured = "fall of pass@10 from its peak to the end, mean over seeds"
    if len(falls) < 2:
        return ClaimFinding(claim, "paper", setting, measured, None, "unclear", f"{len(falls)} runs with a curve")
    estimate = Estimate(sum(falls) / len(falls), min(falls), max(falls), len(falls))
    yes = min(falls) > SAME_WITHIN and min(rises) > 0
    no = max(falls) <= SAME_WITHIN
    verdict: Verdict = "reproduced" if yes else "not reproduced" if no else "unclear"
    return ClaimFinding(claim, "paper", setting, measured, estimate, verdict, "smallest and largest over seeds")


def _faster_pushes(results: Results, method: str) -> ClaimFinding:
    times = [[_train_seconds(run) for run in results.row("pushes", f"{method}_every_{n}")] for n in (1, 10)]
    claim = f"{method.upper()}: pushing weights every 10 steps is faster than every step (the paper: 85 %)"
    measured = "wall-clock of training, every step / every 10 steps"
    if not all(times):
        return ClaimFinding(claim, "paper", "pushes", measured, None, "unclear", "not run")
    estimate = ratio(*times)
    verdict, reason = judged(Estimate(estimate.mean - 1, estimate.low - 1, estimate.high - 1, estimate.seeds), "higher")
    return ClaimFinding(claim, "paper", "pushes", measured, estimate, verdict, reason.replace("0", "1"))


def _half_the_rollouts(results: Results, setting: str) -> ClaimFinding:
    half, online = (results.row(setting, f"{name}_squared") for name in ("half_online", "online"))
    claim = "Half-online SPO needs half the online rollouts"
    measured = "online rollouts of half-online SPO / of online SPO, equal steps"
    if not half or not online:
        return ClaimFinding(claim, "paper", setting, measured, None, "unclear", "not run")
    estimate = ratio(*([float(run["rollouts"]["online"]) for run in row] for row in (half, online)))
    verdict: Verdict = "reproduced" if estimate.mean < 0.65 else "not reproduced"
    return ClaimFinding(claim, "paper", setting, measured, estimate, verdict, "a count: no seed changes it by much")


def _stable(results: Results, method: str) -> ClaimFinding:
    """A run collapsed when its last pass@1 is below half of its best."""
    curves = [curve for curve in (_curve(run, 1) for run in results.row("stability", method)) if curve]
    kept = [curve[-1] / max(curve) if max(curve) > 0 else 1.0 for curve in curves]
    steps = max((int(run["evaluations"][-1]["step"]) for run in results.row("stability", method)), default=0)
    estimate = Estimate(sum(kept) / len(kept), min(kept), max(kept), len(kept)) if kept else None
    collapsed = sum(share < COLLAPSED_BELOW for share in kept)
    enough = len(kept) > 1 and steps >= 500
    verdict: Verdict = "not reproduced" if collapsed else "reproduced" if enough else "unclear"
    reason = f"{collapsed} of {len(kept)} runs collapsed in {steps} steps"
    measured = "last pass@1 / best pass@1, mean and range over seeds"
    return ClaimFinding(f"{method} is stable for 500 steps", "ours", "stability", measured, estimate, verdict, reason)


def _curve(run: Result, k: int) -> list[float]:
    return [
        float(evaluation["pass_at_k"][str(k)]["value"])
        for evaluation in run["evaluations"]
        if str(k) in evaluation["pass_at_k"]
    ]


def _train_seconds(run: Result) -> float:
    return float(run["seconds"]["train"] or 0.0)


CONTROLS = ("supervised", "expert_iteration", "expert_iteration_filtered")


def _is_spo(method: str) -> bool:
    return method.startswith(("half_online", "online", "spo_"))


def where_the_loss_earns_its_keep(results: Results, settings: Sequence[str]) -> list[str]:
    """A sentence per setting: the best SPO row against the best row that only imitates."""
    return [sentence for setting in settings if (sentence := _verdict_on(results, setting))]


def _verdict_on(results: Results, setting: str) -> str | None:
    def best(among: Callable[[str], bool]) -> str | None:
        known = [method for method in results.methods(setting) if among(method)]
        return max(known, key=lambda method: _mean_score(results, setting, method), default=None)

    spo, control = best(_is_spo), best(lambda method: method in CONTROLS)
    if spo is None or control is None:
        return None
    left, right = results.scores(setting, spo, 10), results.scores(setting, control, 10)
    if left is None or right is None:
        return None
    gap = difference(left, right)
    costs = {name: mean(map(total_rollouts, results.row(setting, name))) or 0 for name in (spo, control)}
    numbers = (
        f"pass@10 {left.mean():.2f} ({spo}, {costs[spo]:.0f} rollouts) against {right.mean():.2f} "
        f"({control}, {costs[control]:.0f} rollouts), difference {gap.mean:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]"
    )
    if gap.low > 0:
        return f"**{setting}**: the loss earns its keep: {numbers}."
    if gap.high < 0:
        return f"**{setting}**: the data alone does better; imitate it: {numbers}."
    return f"**{setting}**: no difference that these runs could show; imitation is the simpler choice: {numbers}."


def _mean_score(results: Results, setting: str, method: str) -> float:
    scores = results.scores(setting, method, 10)
    return -1.0 if scores is None else float(scores.mean())
