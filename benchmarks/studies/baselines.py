"""Published baselines at their best rate, on-policy, with pi0, problems, samples and steps of the study of stale ones.

Their losses are those of the toy recipes. DAPO's groups without contrast are replaced, as its paper has it: it samples
more than the others, and the count says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.studies.contest import UNTEMPERED, Contest, Policy, step_problems
from benchmarks.studies.staleness import GROUP, PROMPTS_PER_STEP, RATES, STEPS, StaleRun, rows
from spo.spec.job_spec import JobSpec
from spo.tasks.problem import Problem
from spo.v1.trajectory_pb2 import Trajectory

METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("toy/grpo", {}),
    "grpo_without_kl": ("toy/grpo", {"algorithm": {"losses": [{"objective": "grpo", "kl_coefficient": 0.0}]}}),
    "dr_grpo": ("toy/dr_grpo", {}),
    "dapo": ("toy/dapo", {}),
    "gspo": ("toy/gspo", {}),
    "cispo": ("toy/dapo", {"algorithm": {"losses": [{"objective": "cispo"}], "overlong": None}}),
    "rloo": ("toy/rloo", {}),
}
# How many groups a step samples at most until it has as many with contrast as it wants.
MOST_SAMPLED = 8 * PROMPTS_PER_STEP


def planned(found: Mapping[tuple[str, float, int], float], seeds: Sequence[int]) -> list[StaleRun]:
    """All rates with the first seed, then each method's best with the others; found: scores so far."""
    search = [StaleRun(method, 0, rate, seeds[0]) for rate in RATES[::-1] for method in METHODS]
    rest = []
    for method in METHODS:
        scores = {rate: found[method, rate, seeds[0]] for rate in RATES if (method, rate, seeds[0]) in found}
        if len(scores) == len(RATES):
            rest += [StaleRun(method, 0, max(scores, key=scores.__getitem__), seed) for seed in seeds[1:]]
    return [*search, *rest]


def carry_out(run: StaleRun, contest: Contest) -> dict[str, Any]:
    """Train and examine; what is kept of a run."""
    spec = run.spec(contest.pi0, METHODS)
    policy, problems, sampled = Policy(contest, spec), _problems(contest, run.seed), 0
    contrast = any(part.contrast_only for part in spec.replay.mix)
    for _ in range(STEPS):
        batch: list[Trajectory] = []
        tried = 0
        while len(batch) < PROMPTS_PER_STEP * GROUP and tried < MOST_SAMPLED:
            groups = _groups(contest, policy, spec, [next(problems) for _ in range(PROMPTS_PER_STEP)], tried)
            tried += len(groups)
            batch += [each for group in groups if not contrast or _has_contrast(group) for each in group]
        sampled += tried * GROUP
        if batch:
            batch = batch[: PROMPTS_PER_STEP * GROUP]
            contest.add_reference(batch)
            policy.learn(rows(batch, spec, contest))
    return {
        **vars(run),
        "steps": STEPS,
        "rollouts": sampled,
        "correct": {str(STEPS): contest.examined(policy.model, run.seed)},
    }


def _problems(contest: Contest, seed: int) -> Iterator[Problem]:
    """All training problems in the order of the study of stale samples, without end."""
    step = 1
    while True:
        yield from step_problems(contest.tasks.train, step, seed, PROMPTS_PER_STEP)
        step += 1


def _groups(
    contest: Contest, policy: Policy, spec: JobSpec, problems: Sequence[Problem], tried: int
) -> list[list[Trajectory]]:
    repeated = [problem for problem in problems for _ in range(GROUP)]
    seed = (spec.seed * 1_000_003 + policy.updates) * 1_009 + tried
    found = contest.sampled(policy.model, repeated, seed, UNTEMPERED)
    return [found[start : start + GROUP] for start in range(0, len(found), GROUP)]


def _has_contrast(group: Sequence[Trajectory]) -> bool:
    return len({each.reward for each in group}) > 1
