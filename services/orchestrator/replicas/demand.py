"""How many replicas each pool needs, from what the platform measures: trainers' steps and waits, loads, deliveries.

A job's trainer would take so many groups a second if it never waited, and a group keeps so much of a pool busy:

    pace = groups that its steps took / (seconds that passed - seconds that its trainer waited)      groups / s
    cost = busy replicas (the sum of their loads) * seconds / groups delivered                       replica seconds
    need = pace * cost                                                                               replicas

Both are means that fade by half in PACE_SECONDS and COST_SECONDS. What is ahead in the replay buffer and what the
limiter has capped appear in neither: a pool that idles because the buffer is full, or is full because the trainer
waits, gets the same answer. While new replicas have not had time to deliver, their load says nothing and the cost
stays as it was; for a job's first ones it is the mean of the other jobs' costs. Where no job has one yet need = busy,
and twice that while requests for values wait unread. The needs of all jobs add up; pools that jobs share have one cost
per group. People who use policies need, of inference,

    serving = completions under way at once / completions that one replica is meant to take

at its highest, which fades by half in COST_SECONDS; those of runs that jobs have replicas for are in their loads.

    wanted = ceil(need / UTILISATION + serving), kept while that sum is near it (MARGIN_UP, MARGIN_DOWN), at least 1
             while a job runs or waits for its turn or somebody has asked for a policy lately, and of the judges while
             stored trajectories are judged or wait for it; 0 when there is none of these
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

UTILISATION = {"inference": 0.9, "sandbox-judge": 0.8, "verifier": 0.8}
PACE_SECONDS = 10.0
COST_SECONDS = 45.0
# Replicas: one more only when so much more is needed than there is, one fewer only when so much of another is idle too.
MARGIN_UP = 0.25
MARGIN_DOWN = 0.5
# Of a group's time in the pipeline, until new replicas count.
SETTLED = 1.25
LONGEST_SETTLING_SECONDS = 900.0
# A trainer that has taken no step for so long, and for so many of its steps, has no pace.
SILENT_SECONDS = 300.0
SILENT_STEPS = 5.0


@dataclass(frozen=True)
class JobFacts:
    """One job as it is now; counts are since its start, `step` is the newest step that was reported.

    loads: by replica of inference; in_flight: groups dispatched and not delivered; taken: groups that one step takes;
    waited_seconds, worked_seconds: the trainer's, in the steps since the last facts; requests_wait: for values, unread.
    """

    run_id: str
    loads: Mapping[str, float]
    delivered: float
    in_flight: float
    taken: float
    step: int
    waited_seconds: float
    worked_seconds: float
    requests_wait: bool = False


class FadingRatio:
    """A ratio of two sums that fade with time; None until it has a denominator."""

    def __init__(self) -> None:
        self._over = 0.0
        self._under = 0.0

    def add(self, over: float, under: float, seconds: float) -> None:
        """Add what happened in so many seconds."""
        kept = math.exp2(-seconds / COST_SECONDS)
        self._over = kept * self._over + over
        self._under = kept * self._under + under

    @property
    def value(self) -> float | None:
        return self._over / self._under if self._under > 0 else None


class _JobDemand:
    """What is remembered of a job."""

    def __init__(self, at: float, facts: JobFacts) -> None:
        self.facts = facts
        self.at = self._stepped_at = self._joined_at = at
        self._cost, self._latency = FadingRatio(), FadingRatio()
        # Groups a second; 0 until the second step.
        self.pace = 0.0
        self.need = 0.0
        self.known = False

    @property
    def cost(self) -> float | None:
        """Replica seconds for a group; None until replicas have had time to deliver."""
        return self._cost.value

    def observe(self, at: float, facts: JobFacts, usual_cost: float | None) -> float:
        """Take in the facts of a moment; returns the groups delivered since the last one.

        usual_cost: what a group costs other jobs, None where none is known.
        """
        passed, before = at - self.at, self.facts
        delivered = max(0.0, facts.delivered - before.delivered)
        if facts.step > before.step:
            elapsed = max(1e-3, at - self._stepped_at)
            steps = facts.step - before.step
            # Steps and looks are not in step: what was waited may lie before, what was worked does not.
            free = max(elapsed - facts.waited_seconds, facts.worked_seconds, 1e-3)
            # How long it took until the first step says nothing of the next.
            if before.step > 0:
                kept = math.exp2(-elapsed / PACE_SECONDS) if self.pace else 0.0
                self.pace = kept * self.pace + (1 - kept) * facts.taken * steps / free
            self._stepped_at = at
        if facts.loads.keys() - before.loads.keys():
            self._joined_at = at
        busy = sum(facts.loads.values())
        self._latency.add(facts.in_flight * passed, delivered, passed)
        latency = math.inf if self._latency.value is None else self._latency.value
        if at - self._joined_at >= min(SETTLED * latency, LONGEST_SETTLING_SECONDS):
            self._cost.add(busy * passed, delivered, passed)
        self._decide(at, busy, usual_cost)
        self.at, self.facts = at, facts
        return delivered

    def _decide(self, at: float, busy: float, usual_cost: float | None) -> None:
        pace = self.pace
        self.known = self.cost is not None and pace > 0
        cost = usual_cost if self.cost is None else self.cost
        if cost is None or not pace:
            self.need = max(self.need, busy * (2 if self.facts.requests_wait else 1))
            return
        patience = max(SILENT_SECONDS, SILENT_STEPS * self.facts.taken / pace)
        self.need = pace * cost if at - self._stepped_at < patience else min(self.need, busy)


@dataclass
class PoolDemand:
    """The replicas wanted of each pool; `observe` every few seconds, with any clock."""

    wanted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UTILISATION, 0))
    _jobs: dict[str, _JobDemand] = field(default_factory=dict)
    _costs: dict[str, FadingRatio] = field(default_factory=dict)
    # Replicas that completions of policies keep busy.
    _serving: float = 0.0
    _at: float | None = None

    def observe(
        self,
        at: float,
        jobs: Sequence[JobFacts],
        pool_busy: Mapping[str, float],
        least: Mapping[str, int],
        serving: float = 0.0,
    ) -> dict[str, int]:
        """Take in the facts of a moment (seconds of any clock).

        pool_busy: sums of loads by pool; least: what is wanted of a pool whatever is measured, 0 for none at all;
        serving: inference replicas that completions of policies keep busy.
        """
        passed = 0.0 if self._at is None else at - self._at
        self._serving = max(serving, self._serving * math.exp2(-passed / COST_SECONDS))
        self._at = at
        for ended in self._jobs.keys() - {facts.run_id for facts in jobs}:
            del self._jobs[ended]
        costs = [job.cost for job in self._jobs.values() if job.cost is not None]
        usual = sum(costs) / len(costs) if costs else None
        delivered = sum(
            self._jobs.setdefault(facts.run_id, _JobDemand(at, facts)).observe(at, facts, usual) for facts in jobs
        )
        for pool, utilisation in UTILISATION.items():
            if pool == "inference":
                need = sum(job.need for job in self._jobs.values()) + self._serving * utilisation
            else:
                need = self._shared(pool, pool_busy.get(pool, 0.0), delivered, passed)
            self.wanted[pool] = _rounded(self.wanted[pool], need / utilisation, least.get(pool, 0))
        return dict(self.wanted)

    def needs(self) -> dict[str, float]:
        """Inference replicas that each job needs."""
        return {run_id: job.need for run_id, job in self._jobs.items()}

    def _shared(self, pool: str, busy: float, delivered: float, passed: float) -> float:
        """What a pool that all jobs share needs; one that works for jobs without a pace must not shrink below that."""
        cost = self._costs.setdefault(pool, FadingRatio())
        known = all(job.known for job in self._jobs.values())
        if known:
            cost.add(busy * passed, delivered, passed)
        need = sum(job.pace for job in self._jobs.values()) * (cost.value or 0.0)
        return need if known else max(need, 1.5 * busy)


def _rounded(held: int, exact: float, least: int) -> int:
    """Whole replicas; one more or less only when it is clearly so. 0 only where nothing is needed at all."""
    if least == 0:
        return 0
    if held - 1 - MARGIN_DOWN <= exact <= held + MARGIN_UP:
        return max(held, least)
    return max(least, math.ceil(exact - MARGIN_UP))
