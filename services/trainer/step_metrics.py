"""The numbers reported for every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from services.trainer.batches import TrainingSample
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Source
from spo.v1.trajectory_pb2 import FINISH_REASON_LENGTH


class WeightedMeans:
    """Weighted means of named values; the weight is a number of trajectories. Mergeable over ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.weights: dict[str, float] = defaultdict(float)

    def add(self, values: Mapping[str, float], weight: float) -> None:
        if weight:
            for name, value in values.items():
                self.sums[name] += value * weight
                self.weights[name] += weight

    def means(self, others: Iterable[WeightedMeans]) -> dict[str, float]:
        """The means over all of `others` (which include this one)."""
        merged = WeightedMeans()
        for other in others:
            for name, weight in other.weights.items():
                merged.add({name: other.sums[name] / weight}, weight)
        return {name: merged.sums[name] / weight for name, weight in merged.weights.items()}


def batch_metrics(rows: Sequence[TrainingSample], policy_version: int) -> dict[str, float]:
    """Metrics of a batch before it is learned from: mean reward, in all and by source, and the token count.

    Of online trajectories also the staleness in versions, the length in tokens and the share cut off at the limit.
    """
    means = WeightedMeans()
    for row in rows:
        trajectory = row.trajectory
        source = Source.Name(trajectory.source).removeprefix("SOURCE_").lower()
        means.add({"reward": trajectory.reward, f"reward/{source}": trajectory.reward}, 1)
        if trajectory.source == SOURCE_ONLINE:
            of_online = {
                "staleness": policy_version - trajectory.policy_version_last,
                "response_length/online": len(trajectory.response_token_ids),
                "truncated/online": float(trajectory.finish_reason == FINISH_REASON_LENGTH),
            }
            means.add(of_online, 1)
    return {
        **means.means([means]),
        "tokens": float(sum(len(row.trajectory.response_token_ids) for row in rows)),
        "trajectories": float(len(rows)),
    }


def named_diagnostics(diagnostics: dict[str, float]) -> dict[str, float]:
    """The diagnostics under the names of the curves; the reward is counted from the whole batch already."""
    renamed = {
        "kl_to_reference_nats": "kl_to_reference",
        "log_ratio_nats": "log_ratio",
        "response_tokens": "response_length",
    }
    return {renamed.get(name, name): value for name, value in diagnostics.items() if name != "reward"}
