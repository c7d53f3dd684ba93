"""KEDA and the HorizontalPodAutoscaler as their documents say they decide, with any clock.

kubernetes.io, "Horizontal Pod Autoscaling": desired = ceil(metric / target) for an average value, unchanged while
|metric / (target * current) - 1| <= tolerance; within a stabilization window the lowest desire counts for growing and
the highest for shrinking; of the policies the one that allows the larger change. keda.sh, "ScaledObject specification":
KEDA itself goes from 0 to 1 when a trigger is active, and back after `cooldownPeriod` without one that is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 0.1
SYNC_SECONDS = 15.0
POLL_SECONDS = 15.0


@dataclass
class HorizontalAutoscaler:
    """One ScaledObject: bounds, `behavior` of the chart's values, and how long after the last activity it goes to 0."""

    behavior: Mapping[str, Any]
    most: int
    fewest: int = 0
    target: float = 1.0
    cooldown_seconds: float = 300.0
    replicas: int = 0
    _wanted: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)
    _active_at: float = float("-inf")
    _synced_at: float = float("-inf")

    def look(self, at: float, metric: float) -> int:
        """Decide at a time (seconds), when it is time to; returns the size of the Deployment."""
        if at - self._synced_at >= SYNC_SECONDS:
            self._synced_at = at
            if metric > 0:
                self._active_at = at
            if self.replicas == 0:
                self._become(at, max(self.fewest, 1) if metric > 0 else self.fewest)
            elif metric <= 0 and self.fewest == 0 and at - self._active_at >= self.cooldown_seconds:
                self._become(at, 0)
            else:
                self._become(at, self._decide(at, metric))
        return self.replicas

    def changes(self, since: float, until: float) -> int:
        """How often the size changed in a time."""
        return sum(since <= at < until for at, _ in self._changes)

    def _become(self, at: float, replicas: int) -> None:
        if replicas != self.replicas:
            self._changes.append((at, replicas - self.replicas))
            self.replicas = replicas

    def _decide(self, at: float, metric: float) -> int:
        ratio = metric / (self.target * self.replicas)
        desired = self.replicas if abs(1 - ratio) <= TOLERANCE else math.ceil(metric / self.target)
        self._wanted.append((at, desired))
        up = self._window(at, "scaleUp")
        down = self._window(at, "scaleDown")
        stable = self.replicas
        stable = max(stable, min([desired, *up]))
        stable = min(stable, max([desired, *down])) if stable == self.replicas else stable
        low, high = self._limits(at)
        return max(1, self.fewest, low, min(stable, high, self.most))

    def _window(self, at: float, direction: str) -> list[int]:
        seconds = float(self.behavior[direction].get("stabilizationWindowSeconds", 0))
        return [wanted for when, wanted in self._wanted if when > at - seconds]

    def _limits(self, at: float) -> tuple[int, int]:
        """The fewest and most replicas that the policies allow now."""
        ups = [self._allowed(at, policy, 1) for policy in self._policies("scaleUp")]
        downs = [self._allowed(at, policy, -1) for policy in self._policies("scaleDown")]
        return min(downs), max(ups)

    def _policies(self, direction: str) -> Sequence[Mapping[str, Any]]:
        return list(self.behavior[direction]["policies"])

    def _allowed(self, at: float, policy: Mapping[str, Any], sign: int) -> int:
        recent = [change for when, change in self._changes if when > at - policy["periodSeconds"]]
        begun = self.replicas - sum(change for change in recent if change * sign > 0)
        if policy["type"] == "Pods":
            return begun + sign * int(policy["value"])
        share = 1 + sign * policy["value"] / 100
        return math.ceil(begun * share) if sign > 0 else int(begun * share)
