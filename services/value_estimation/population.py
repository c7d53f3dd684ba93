"""What the prompts estimated so far tell about the next: counts and features by prompt, and a prior fitted to them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from services.value_estimation.counts import Counts
from spo import redis_keys
from spo.algorithm.value_prior import JEFFREYS, BetaPrior, PriorModel, fit_prior

# A fit on fewer would mostly tell about the prompt itself.
FEWEST_PROMPTS = 24
REFIT_GROWTH = 1.1
REFIT_SECONDS = 10.0


@dataclass
class Population:
    """All prompts with the same reference, sampler, judge and reward, of all runs."""

    client: redis.Redis
    _fits: dict[str, tuple[int, float, PriorModel | None]] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def record(self, key: str, prompt_id: str, counts: Counts, features: Sequence[float]) -> None:
        """What a prompt's samples have come to so far; replaces what was recorded of it."""
        document = {"samples": counts.samples, "successes": counts.successes, "features": list(features)}
        self.client.hset(redis_keys.value_population(key), prompt_id, json.dumps(document))

    def prior_of(self, key: str, features: Sequence[float]) -> BetaPrior:
        """The prior of a prompt with these features; Jeffreys' while few prompts are known."""
        known = int(self.client.hlen(redis_keys.value_population(key)))
        with self._lock:
            fitted, at, model = self._fits.get(key, (0, 0.0, None))
            stale = known >= REFIT_GROWTH * fitted or time.monotonic() - at > REFIT_SECONDS
            if known >= FEWEST_PROMPTS and stale:
                model = self._fit(key, len(features))
                self._fits[key] = (known, time.monotonic(), model)
        return model.prior_of(features) if model else JEFFREYS

    def _fit(self, key: str, features: int) -> PriorModel | None:
        stored: Any = self.client.hgetall(redis_keys.value_population(key))
        documents = [json.loads(stored[name]) for name in sorted(stored)]
        # Another version of this service may have recorded other features.
        alike = [each for each in documents if len(each["features"]) == features]
        if len(alike) < FEWEST_PROMPTS:
            return None
        return fit_prior(
            [each["successes"] for each in alike],
            [each["samples"] for each in alike],
            [each["features"] for each in alike],
        )
