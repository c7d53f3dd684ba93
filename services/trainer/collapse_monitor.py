"""Watches a run for the signs that precede a collapse, step by step, on rank 0."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean

from spo.algorithm.collapse_guard import ALARMS, CollapseLimits, StepHealth, collapse_alarms
from spo.observability.logs import get_logger
from spo.observability.metrics import TRAINER_COLLAPSE_ALARMS
from spo.spec.job_spec import CollapseGuardSpec

log = get_logger("collapse_monitor")


class CollapseMonitor:
    """Reports an alarm once, when it begins to sound.

    Only online trajectories are judged, since they show what the policy writes now; a high log-ratio on people's
    solutions only means that it learns from them. Response lengths are compared with those of the first `window` steps
    of this process.
    """

    def __init__(self, spec: CollapseGuardSpec) -> None:
        self.pauses = spec.policy == "pause"
        self._on = spec.policy != "off"
        self._limits = CollapseLimits(**spec.model_dump(exclude={"policy"}))
        self._history: deque[StepHealth] = deque(maxlen=2 * spec.window)
        self._first_lengths: list[float] = []
        self._sounding: frozenset[str] = frozenset()
        # From 0 on: of a count that appears with the first alarm nobody sees an increase.
        for name in ALARMS:
            TRAINER_COLLAPSE_ALARMS.labels(alarm=name)

    def check(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        """Alarms that began to sound with this step, by name with the reason in words."""
        if not self._on:
            return {}
        health = _health(metrics)
        self._history.append(health)
        if len(self._first_lengths) < self._limits.window and math.isfinite(health.response_tokens):
            self._first_lengths.append(health.response_tokens)
        usual = fmean(self._first_lengths) if self._first_lengths else math.nan
        found = collapse_alarms(list(self._history), usual, self._limits)
        new = {name: reason for name, reason in found.items() if name not in self._sounding}
        self._sounding = frozenset(found)
        for name, reason in new.items():
            log.warning("collapse alarm", alarm=name, step=step, reason=reason)
            TRAINER_COLLAPSE_ALARMS.labels(alarm=name).inc()
        return new

    def rearm(self) -> None:
        """Forget the recent steps: a person has resumed the run, and the alarms may sound again."""
        self._history.clear()
        self._sounding = frozenset()


def _health(metrics: Mapping[str, float]) -> StepHealth:
    """Metrics that a step lacks are nan, which sounds no alarm."""
    return StepHealth(
        log_ratio_nats=metrics.get("log_ratio/online", math.nan),
        grad_norm=metrics.get("grad_norm", math.nan),
        response_tokens=metrics.get("response_length/online", math.nan),
        truncated_share=metrics.get("truncated/online", math.nan),
        reward=metrics.get("reward/online", math.nan),
        loss=metrics.get("loss", math.nan),
    )
