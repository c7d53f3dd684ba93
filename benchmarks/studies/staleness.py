"""Held-out pass@10 against the age of samples in optimizer steps, for SPO in three forms, OAPL and GRPO with TIS.

Same pi0, prompts, samples (8 of 8 prompts a step at temperature 1) and steps for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.studies.contest import UNTEMPERED, Contest, Policy, step_problems
from benchmarks.studies.lag import steps_sampled_by
from services.trainer.batches import TrainingSample
from spo.reproduce.plan import RECIPES, merged
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.reward import qhat_0_of_group
from spo.spec.section import read_spec
from spo.v1.trajectory_pb2 import Anchor, Trajectory

STEPS, PROMPTS_PER_STEP, GROUP = 150, 8, 8
# The largest has all samples from pi0, as any beyond it.
LAGS = (0, 10, 50, 200)
RATES = (2e-4, 5e-4, 1e-3)

# The toy contest's sizes and optimiser, for recipes of models of other sizes too.
TOY: Mapping[str, Any] = {
    "model": {"dtype": "float32", "max_prompt_tokens": 20, "max_response_tokens": 44},
    "rollout": {"samples_per_prompt": GROUP, "temperature": 1.0, "top_p": 1.0},
    "trainer": {
        "steps": STEPS,
        "batch_size": PROMPTS_PER_STEP * GROUP,
        "adam_betas": [0.9, 0.98],
        "weight_decay": 0.0,
        "warmup_steps": 10,
        "max_grad_norm": 1.0,
    },
}
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # Anchor and Qhat_0 are pi0's.
    "spo": ("toy/online_squared", {}),
    # The same with values at a temperature of 1: Qhat_0 is near the mean reward.
    "spo_two_temperatures": ("toy/online_squared", {"algorithm": {"value_beta": 1.0}}),
    # The mean residual of the group in place of Qhat_0.
    "spo_group_centred": ("toy/online_group_centred", {}),
    # The same at the paper's beta, which is also the coefficient of GRPO's KL here.
    "spo_group_centred_paper_beta": ("toy/online_group_centred", {"algorithm": {"beta": 0.0868589}}),
    # The same, each group counted by the deviation of its rewards as in GRPO.
    "spo_group_scaled_paper_beta": (
        "toy/online_group_centred",
        {
            "algorithm": {
                "beta": 0.0868589,
                "losses": [{"objective": "group_centred_squared", "normalise": "deviation"}],
            }
        },
    ),
    # Anchor and Qhat_0 are the sampler's and its group's; beta as SPO's: the paper's .001 is for 32,000 tokens.
    "oapl": ("published/oapl_online", {"algorithm": {"beta": 0.217147}}),
    # KL to pi0 by the recipe's coefficient; weights pi / pi_sampler of each token, cut off at 2.
    "grpo_tis": ("toy/grpo", {"algorithm": {"losses": [{"objective": "grpo", "correction": "truncate"}]}}),
}


@dataclass(frozen=True)
class StaleRun:
    """One run of the study."""

    method: str
    lag: int
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-lag{self.lag}-rate{self.rate:g}-seed{self.seed}"

    def spec(self, pi0: Path, methods: Mapping[str, tuple[str, Mapping[str, Any]]] = METHODS) -> JobSpec:
        """The method's job, of which loss and optimiser are used. Raises InvalidInput."""
        recipe, changes = methods[self.method]
        tasks = {"tasks": {"kind": "toy", "train_problems": 160, "evaluation_problems": 80}}
        own = {"seed": self.seed, "model": {"path": str(pi0)}, "trainer": {"learning_rate": self.rate}}
        document = {**read_spec(RECIPES / f"{recipe}.yaml"), **tasks}
        return parse_job_spec(merged(document, TOY, changes, own))


class Samples:
    """Batches in the order of steps; pi0's, with which all methods begin, are sampled once for each seed."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest
        self._of_pi0: dict[int, list[Trajectory]] = {}

    def batch(self, policy: Policy, step: int, seed: int) -> list[Trajectory]:
        """The groups of a step, sampled by the policy of this moment, with pi0's log-probs."""
        size = PROMPTS_PER_STEP * GROUP
        if policy.updates:
            return self._sampled(policy, [step], seed)
        if seed not in self._of_pi0:
            self._of_pi0[seed] = self._sampled(policy, range(1, STEPS + 1), seed)
        return self._of_pi0[seed][(step - 1) * size : step * size]

    def _sampled(self, policy: Policy, steps: Sequence[int], seed: int) -> list[Trajectory]:
        train = self._contest.tasks.train
        problems = [found for step in steps for found in step_problems(train, step, seed, PROMPTS_PER_STEP)]
        repeated = [problem for problem in problems for _ in range(GROUP)]
        found = self._contest.sampled(policy.model, repeated, seed * 1_000_003 + steps[0], UNTEMPERED)
        self._contest.add_reference(found)
        return found


def carry_out(run: StaleRun, contest: Contest, samples: Samples) -> dict[str, Any]:
    """Train and examine; what is kept of a run."""
    spec = run.spec(contest.pi0)
    policy = Policy(contest, spec)
    waiting: dict[int, list[Trajectory]] = {}
    seen = []
    for _ in range(STEPS):
        for step in steps_sampled_by(policy.updates, run.lag, STEPS):
            waiting[step] = samples.batch(policy, step, run.seed)
        seen.append(policy.learn(rows(waiting.pop(policy.updates + 1), spec, contest)))
    examined = {str(STEPS): contest.examined(policy.model, run.seed)}
    curves = {
        name: [round(sum(each[name] for each in seen[at : at + 10]) / 10, 4) for at in range(0, STEPS, 10)]
        for name in seen[0]
    }
    return {**vars(run), "steps": STEPS, "correct": examined, "curves": curves}


def rows(trajectories: Sequence[Trajectory], spec: JobSpec, contest: Contest) -> list[TrainingSample]:
    """A batch as the method learns from it: under pi0 with its values, or under the sampler with those of groups."""
    if not spec.algorithm.anchors_by_rollouts:
        return [
            TrainingSample(each, contest.qhat_0[each.prompt_id], number // GROUP)
            for number, each in enumerate(trajectories)
        ]
    found = []
    for start in range(0, len(trajectories), GROUP):
        rewards = [each.reward for each in trajectories[start : start + GROUP]]
        value = qhat_0_of_group(rewards, spec.algorithm)
        for each in trajectories[start : start + GROUP]:
            anchored = Trajectory(anchor=Anchor(policy_version=1, rewards=rewards))
            anchored.MergeFrom(each)
            del anchored.reference_logprobs[:]
            anchored.reference_logprobs.extend(each.sampling_logprobs)
            found.append(TrainingSample(anchored, value, start // GROUP))
    return found


def planned(chosen: Mapping[tuple[str, int], float], seeds: Sequence[int]) -> list[StaleRun]:
    """The search of rates with the first seed, the ends of the ages before what lies between, then what is chosen.

    chosen: the best rate of (method, lag), as far as it is known.
    """
    lags = (LAGS[-1], LAGS[0], *LAGS[1:-1])
    search = [
        StaleRun(method, lag, rate, seeds[0])
        for lag in lags
        for rate in sorted(RATES, key=lambda rate: abs(rate - RATES[1]))
        for method in METHODS
    ]
    rest = [
        StaleRun(method, lag, chosen[method, lag], seed)
        for seed in seeds[1:]
        for lag in lags
        for method in METHODS
        if (method, lag) in chosen
    ]
    return list(dict.fromkeys([*search, *rest]))
