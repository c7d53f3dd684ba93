"""Samples of pi0 that Qhat_0 costs at equal error: sequential stopping against a fixed number, as in the paper.

    python -m benchmarks.value [--json]      about five minutes of a core
    python -m benchmarks.value --plot FILE   draws error over samples instead

Truth is what 2,048 samples of the toy contest's pi0 say of each of its 160 training problems (value_pool.json, made by
scripts/value_pool.py); every draw below is from those, with replacement. Error is the mean of |Qhat_0 - Q_0| over
problems, reward units. Both sides are curves, error over samples; samples at equal error are read off by interpolation.
The prior learned from the other prompts does most of the work: the third curve, the same number for all with that prior
(`interval_width: 100`), says how much.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.frame import Row, run
from services.value_estimation.prompt_estimate import PriorModel, PromptFeatures, fit_prior
from spo.algorithm.values import Evidence, q_from_success_rate, soft_value_estimate
from spo.spec.job_spec import PAPER_BETA, SequentialSpec

POOL = Path(__file__).parent / "value_pool.json"
DEMO_BETA = 1 / math.log(100)
MOST = 800
FIXED = (4, 8, 16, 32, 64, 128, 256, 512, 800)
FIXED_WITH_PRIOR = (8, 16, 24, 32, 64, 128)
# (interval_width, first_samples): where more is asked for, more is given to all before anybody may stop.
SEQUENTIAL = ((0.8, 8), (0.5, 8), (0.4, 12), (0.35, 16), (0.3, 24), (0.24, 32), (0.18, 48))
FIXED_SEEDS, SEQUENTIAL_SEEDS = 20, 6
# As in the product, which does not fit anew after every round either.
REFIT_GROWTH = 1.2
COMPARED = (64, 128, 256)
GOAL = 5.0

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Pool:
    """The problems: what is known of each before any sample, and its success rate under pi0."""

    ids: list[str]
    features: list[PromptFeatures]
    rates: NDArray[np.float64]

    @classmethod
    def read(cls) -> Pool:
        stored = json.loads(POOL.read_text())
        prompts = stored["prompts"]
        return cls(
            [each["prompt_id"] for each in prompts],
            [PromptFeatures(tuple(each["solution_logprobs"]), tuple(each["words"])) for each in prompts],
            np.array([each["successes"] / stored["samples"] for each in prompts]),
        )

    def error(self, estimates: Sequence[float], beta: float) -> float:
        """Mean absolute error of Qhat_0, reward units."""
        pairs = zip(estimates, self.rates, strict=True)
        return float(np.mean([abs(q - q_from_success_rate(float(rate), beta)) for q, rate in pairs]))

    def fit(self, successes: Counts, samples: Counts) -> PriorModel:
        return fit_prior(self.ids, successes.tolist(), samples.tolist(), self.features)


@dataclass(frozen=True)
class Point:
    """Mean samples per problem, and the mean error they leave."""

    samples: float
    error: float


def fixed(pool: Pool, beta: float, samples: int) -> Point:
    """The paper's estimate: the frequency among a fixed number of samples."""
    errors = []
    for seed in range(FIXED_SEEDS):
        successes = np.random.default_rng(seed).binomial(samples, pool.rates)
        errors.append(pool.error([q_from_success_rate(each / samples, beta) for each in successes], beta))
    return Point(samples, float(np.mean(errors)))


def fixed_with_prior(pool: Pool, beta: float, samples: int) -> Point:
    """A fixed number of samples, and the posterior mean under the prior learned from the other prompts."""
    errors = []
    for seed in range(SEQUENTIAL_SEEDS):
        successes = np.random.default_rng(seed).binomial(samples, pool.rates)
        counts = np.full(len(pool.ids), samples)
        errors.append(pool.error(_estimates(pool, pool.fit(successes, counts), successes, counts, beta)[0], beta))
    return Point(samples, float(np.mean(errors)))


def sequential(pool: Pool, beta: float, width: float, first: int) -> Point:
    """Rounds as value-estimation takes them: `first` samples for all, then for those with a wider interval."""
    spec = SequentialSpec(interval_width=width, first_samples=first)
    points = [_sequential_once(pool, beta, spec, seed) for seed in range(SEQUENTIAL_SEEDS)]
    return Point(float(np.mean([each.samples for each in points])), float(np.mean([each.error for each in points])))


def _sequential_once(pool: Pool, beta: float, spec: SequentialSpec, seed: int) -> Point:
    rng = np.random.default_rng(10_000 + seed)
    samples = np.full(len(pool.ids), spec.first_samples)
    successes = rng.binomial(samples, pool.rates)
    model, fitted = pool.fit(successes, samples), samples.sum()
    wants = np.ones(len(pool.ids), dtype=bool)
    while True:
        if samples.sum() > REFIT_GROWTH * fitted:
            model, fitted = pool.fit(successes, samples), samples.sum()
        estimates, widths = _estimates(pool, model, successes, samples, beta)
        wants &= (np.array(widths) > spec.interval_width) & (samples < MOST)
        if not wants.any():
            return Point(float(samples.mean()), pool.error(estimates, beta))
        more = np.where(wants, np.minimum(spec.round_samples, MOST - samples), 0)
        successes = successes + rng.binomial(more, pool.rates)
        samples = samples + more


def _estimates(
    pool: Pool, model: PriorModel, successes: Counts, samples: Counts, beta: float
) -> tuple[list[float], list[float]]:
    """Qhat_0 and the width of its interval, by problem."""
    found = [
        soft_value_estimate(Evidence(int(n), int(c), prior=model.prior_of(prompt_id, features)), beta)
        for prompt_id, features, c, n in zip(pool.ids, pool.features, successes, samples, strict=True)
    ]
    return [each.q for each in found], [each.high - each.low for each in found]


def samples_at(curve: Sequence[Point], error: float) -> float:
    """Samples at which a curve has an error, by log-log interpolation; its cheapest point where even that is better.

    Raises ValueError where no point is as good.
    """
    points = sorted(curve, key=lambda point: point.samples)
    if points[0].error <= error:
        return points[0].samples
    for left, right in pairwise(points):
        if right.error <= error:
            share = (math.log(left.error) - math.log(error)) / (math.log(left.error) - math.log(right.error))
            return math.exp(math.log(left.samples) + share * (math.log(right.samples) - math.log(left.samples)))
    raise ValueError(f"no point of the curve has an error of {error:g} or less")


def curves(pool: Pool, beta: float) -> dict[str, list[Point]]:
    """Error over samples, by way of estimating."""
    return {
        "fixed number": [fixed(pool, beta, samples) for samples in FIXED],
        "fixed number, learned prior": [fixed_with_prior(pool, beta, samples) for samples in FIXED_WITH_PRIOR],
        "sequential": [sequential(pool, beta, width, first) for width, first in SEQUENTIAL],
    }


def measure() -> list[Row]:
    """One row per beta, fixed number and way of spending less: its samples at the fixed number's error."""
    pool = Pool.read()
    rows = []
    for name, beta in (("the paper's beta", PAPER_BETA), ("the demo's beta", DEMO_BETA)):
        found = curves(pool, beta)
        for point in found["fixed number"]:
            if point.samples in COMPARED:
                for way in ("sequential", "fixed number, learned prior"):
                    spent = samples_at(found[way], point.error)
                    ratio = point.samples / spent
                    what = f"samples per problem at an error of {point.error:.3f}, {name}, {way}"
                    rows.append(Row(what, spent, "samples", "fixed number", point.samples, ratio, GOAL, ratio >= GOAL))
    return rows


def plot(path: Path) -> None:
    """Draw the curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pool = Pool.read()
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for panel, (name, beta) in zip(panels, (("1 / ln 100,000", PAPER_BETA), ("1 / ln 100", DEMO_BETA)), strict=True):
        for way, points in curves(pool, beta).items():
            in_order = sorted(points, key=lambda point: point.samples)
            panel.loglog([each.samples for each in in_order], [each.error for each in in_order], marker="o", label=way)
        panel.set(title=f"beta = {name}", xlabel="samples of pi0 per problem", ylabel="mean |error| of Qhat_0")
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plot"]:
        plot(Path(sys.argv[2]))
        sys.exit(0)
    sys.exit(run("value", measure))
