"""The prompts estimated so far, with counts and features, and the prior fitted to them for the next ones."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, field

from services.value_estimation import redis_keys as own_keys
from services.value_estimation.counts import Counts
from spo.algorithm.value_posterior import JEFFREYS, BetaPrior
from spo.algorithm.value_prior import PriorModel, PromptFeatures, fit_prior
from spo.messaging.redis_client import RedisClient
from spo.spec.stored import record_of

# A fit to fewer would mostly describe the prompt itself.
FEWEST_PROMPTS = 24
REFIT_GROWTH = 1.1
REFIT_SECONDS = 10.0
# Pause per second of a fit: fits over many prompts are slow, and workers should mostly sample.
REFIT_PAUSE = 20.0


@dataclass(frozen=True)
class Fit:
    """A fitted model, the number of prompts it was fitted to, and the seconds it took."""

    prompts: int
    model: PriorModel | None
    done_at: float
    seconds: float


@dataclass
class Population:
    """Prompts of all runs; a key names those with the same reference, sampler, judge and reward."""

    client: RedisClient
    _fits: dict[str, Fit] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def record(self, key: str, prompt_id: str, counts: Counts, features: PromptFeatures) -> None:
        """Store a prompt's counts so far, in place of its earlier ones."""
        document = {"samples": counts.samples, "successes": counts.successes, "features": asdict(features)}
        self.client.hset(own_keys.value_population(key), prompt_id, json.dumps(document))

    def prior_of(self, key: str, prompt_id: str, features: PromptFeatures) -> BetaPrior:
        """The prior of a prompt, fitted to the samples of other prompts; Jeffreys' prior while these are few."""
        known = self.client.hlen(own_keys.value_population(key))
        with self._lock:
            fit = self._fits.get(key, Fit(0, None, 0.0, 0.0))
            is_old = time.monotonic() > fit.done_at + max(REFIT_SECONDS, REFIT_PAUSE * fit.seconds)
            if known >= FEWEST_PROMPTS and (known >= REFIT_GROWTH * fit.prompts or is_old):
                fit = self._fits[key] = self._fit(key)
        return fit.model.prior_of(prompt_id, features) if fit.model else JEFFREYS

    def _fit(self, key: str) -> Fit:
        began = time.monotonic()
        stored = self.client.hgetall(own_keys.value_population(key))
        names = sorted(stored)
        documents = [json.loads(stored[name]) for name in names]
        model = fit_prior(
            [name.decode() for name in names],
            [document["successes"] for document in documents],
            [document["samples"] for document in documents],
            [record_of(PromptFeatures, document["features"]) for document in documents],
        )
        return Fit(len(names), model, time.monotonic(), time.monotonic() - began)
