"""The numbers reported for every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from services.trainer.batches import TrainingSample
from spo.algorithm.collapse_guard import SAMPLER_MISMATCH
from spo.algorithm.diagnostics import effective_sample_share
from spo.algorithm.rounding import Difference
from spo.model.segments import trained_tokens
from spo.spec.wire_enums import wire_name
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Source
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH, Trajectory

# Curves of parts; a scoring function may name as many as it likes.
MOST_PARTS = 32
# Curves of sources of feedback; whoever sends traffic may name as many as it likes.
MOST_SOURCES = 16


class WeightedMeans:
    """Weighted means of named values; the weight is a number of trajectories. Mergeable over ranks.

    log_weights: ln pi_theta / pi_sampler of the responses whose sampler is known, as they were met.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.weights: dict[str, float] = defaultdict(float)
        self.log_weights: list[float] = []

    def add(self, values: Mapping[str, float], weight: float) -> None:
        if weight:
            for name, value in values.items():
                self.sums[name] += value * weight
                self.weights[name] += weight

    def add_by_source(self, said_by: Sequence[str], residuals_abs: Sequence[float]) -> None:
        """`residual_abs/<source>` of the trajectories whose reward a source said, MOST_SOURCES sources at most."""
        named: dict[str, list[float]] = defaultdict(list)
        for source, residual in zip(said_by, residuals_abs, strict=True):
            if source:
                named[source].append(residual)
        for source in sorted(named)[:MOST_SOURCES]:
            found = named[source]
            self.add({f"residual_abs/{source}": sum(found) / len(found)}, len(found))

    def means(self, others: Iterable[WeightedMeans]) -> dict[str, float]:
        """The means over all of `others` (which include this one)."""
        merged = WeightedMeans()
        for other in others:
            for name, weight in other.weights.items():
                merged.add({name: other.sums[name] / weight}, weight)
        return {name: merged.sums[name] / weight for name, weight in merged.weights.items()}


def batch_metrics(rows: Sequence[TrainingSample], policy_version: int) -> dict[str, float]:
    """Metrics of a batch before it is learned from: mean reward, in all and by source, and the count of trained tokens.

    Of verdicts with a score its mean, `score`, and those of its parts, `score/<name>`, at most MOST_PARTS names. Of
    online trajectories also the staleness in versions, the length in tokens and the share cut off at the limit.
    """
    means = WeightedMeans()
    named: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        trajectory = row.trajectory
        source = wire_name(Source, trajectory.source)
        means.add({"reward": trajectory.reward, f"reward/{source}": trajectory.reward}, 1)
        verdict = trajectory.verdict
        if verdict.HasField("score"):
            means.add({"score": verdict.score}, 1)
        for part in verdict.parts:
            named[f"score/{part.name}"].append(part.score)
        if trajectory.source == SOURCE_ONLINE:
            of_online = {
                "staleness": policy_version - trajectory.policy_version_last,
                "response_length/online": trained_tokens(trajectory),
                "truncated/online": float(trajectory.finish_reason == FINISH_REASON_LENGTH),
            }
            means.add(of_online, 1)
    for name in sorted(named)[:MOST_PARTS]:
        means.add({name: sum(named[name]) / len(named[name])}, len(named[name]))
    return {
        **means.means([means]),
        "tokens": float(sum(trained_tokens(row.trajectory) for row in rows)),
        "trajectories": float(len(rows)),
    }


def named_diagnostics(diagnostics: dict[str, float]) -> dict[str, float]:
    """The diagnostics under the names of the curves; the reward is counted from the whole batch already."""
    renamed = {
        "kl_to_reference_nats": "kl_to_reference",
        "log_ratio_nats": "log_ratio",
        "log_ratio_per_token_nats": "log_ratio_per_token",
        "response_tokens": "response_length",
    }
    return {renamed.get(name, name): value for name, value in diagnostics.items() if name != "reward"}


def is_untempered(trajectory: Trajectory) -> bool:
    """Whether a policy was sampled as it is: neither hotter nor cooler, nothing cut off."""
    return trajectory.temperature == 1 and trajectory.top_p == 1


def is_unchanged_sample(trajectory: Trajectory) -> bool:
    """Whether pi0 was sampled as it is; its log-probs are then ln pi0."""
    return is_untempered(trajectory) and trajectory.policy_version_last == 0 and bool(trajectory.sampling_logprobs)


def weight_metrics(log_weights: Sequence[float]) -> dict[str, float]:
    """How far the policy is from the samplers of the responses, in nats of whole ones (k2); the effective samples."""
    if not log_weights:
        return {}
    return {
        "kl_to_sampler": 0.5 * sum(weight * weight for weight in log_weights) / len(log_weights),
        "effective_sample_share": effective_sample_share(log_weights),
    }


def sampler_metrics(differences: Sequence[Difference]) -> dict[str, float]:
    """How the sampler's log-probs differ from the trainer's, nats; `excess` above 1 is more than rounding."""
    if not differences:
        return {}
    worst = max(differences, key=lambda difference: float(difference.excess_B.max()))
    return {
        f"{SAMPLER_MISMATCH}/token": max(difference.largest_token for difference in differences),
        f"{SAMPLER_MISMATCH}/sum": worst.largest_sum,
        f"{SAMPLER_MISMATCH}/tolerance": worst.tolerance,
        f"{SAMPLER_MISMATCH}/excess": float(worst.excess_B.max()),
    }


def sampler_alarm(metrics: Mapping[str, float]) -> dict[str, str]:
    """The alarm by its name, in words, where `sampler_metrics` are beyond rounding."""
    if metrics.get(f"{SAMPLER_MISMATCH}/excess", 0.0) <= 1:
        return {}
    token, total, tolerance = (metrics[f"{SAMPLER_MISMATCH}/{name}"] for name in ("token", "sum", "tolerance"))
    return {
        SAMPLER_MISMATCH: f"the sampler's log-probs differ from the trainer's by up to {token:.3g} nats at a token and "
        f"{total:.3g} in the sum over a response, where rounding explains {tolerance:.3g}"
    }
