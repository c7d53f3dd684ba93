"""Half-online SPO against imitation of the same right programs, and both together: the report's `hard`, in one process.

The jobs are those of `spo reproduce`: their losses, mixes, rates and steps. What differs is where they run: here the
policy samples every `update_interval` steps as many trajectories as are served twice until the next time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.contest import Contest, Policy
from services.trainer.batches import TrainingSample
from spo.algorithm.replay_sampling import draw_ranks, exact_counts
from spo.reproduce.plan import FULL, merged, runs
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.section import PAPER_BETA
from spo.v1.trajectory_pb2 import Trajectory

SETTING = "hard"
# Of each problem, half of the report's: values and offline data are those of fewer samples.
SAMPLES_OF_PI0 = 64
PLANNED = ("imitation_beside_spo", "supervised_demo_rate", "half_online_demo_rate", "supervised", "half_online_squared")


def _beside(objective: Mapping[str, Any], **algorithm: Any) -> Mapping[str, Any]:
    """Another objective for the policy's own samples, in whole groups, where `imitation_beside_spo` has one."""
    imitated = {"objective": "supervised", "sources": ["reference"], "coefficient": 0.5}
    losses = [{"sources": ["online"], **objective}, imitated]
    return {"algorithm": {"losses": losses, **algorithm}, "replay": {"unit": "group"}}


_CENTRED = {"objective": "group_centred_squared"}
# What might close the gap, as changes of `imitation_beside_spo`.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "beside_group_centred": _beside(_CENTRED, beta=PAPER_BETA),
    "beside_group_scaled": _beside({**_CENTRED, "normalise": "deviation"}, beta=PAPER_BETA),
    "beside_group_scaled_tenth": _beside({**_CENTRED, "normalise": "deviation", "coefficient": 0.1}, beta=PAPER_BETA),
    "beside_grpo": merged(
        _beside({"objective": "grpo"}, beta=PAPER_BETA), {"rollout": {"temperature": 1.0, "top_p": 1.0}}
    ),
}
METHODS = (*PLANNED[:3], *VARIANTS, *PLANNED[3:])


def specs(seeds: int, pi0: Path) -> dict[tuple[str, int], JobSpec]:
    """By method and seed. Raises InvalidInput."""
    planned = {
        (run.method, run.seed): run.document
        for run in runs(replace(FULL, seeds=seeds), quick=False)
        if run.setting == SETTING and run.method in PLANNED
    }
    varied = {
        (name, seed): merged(planned["imitation_beside_spo", seed], changes)
        for name, changes in VARIANTS.items()
        for seed in range(seeds)
    }
    model = {"model": {"path": str(pi0)}}
    return {key: parse_job_spec(merged(document, model)) for key, document in {**planned, **varied}.items()}


def offline_window(samples: Sequence[Trajectory], spec: JobSpec) -> list[Trajectory]:
    """The first right samples of each prompt, as many as a job keeps."""
    kept: dict[str, list[Trajectory]] = {}
    for each in samples:
        if each.reward == 0 and len(kept.setdefault(each.prompt_id, [])) < spec.replay.offline_per_prompt:
            kept[each.prompt_id].append(each)
    return [each for found in kept.values() for each in found]


def carry_out(spec: JobSpec, contest: Contest, offline: Sequence[Trajectory]) -> dict[str, Any]:
    """Train and examine; what is kept of a run."""
    policy, rng = Policy(contest, spec), np.random.default_rng(spec.seed)
    counts = dict(
        zip(
            [part.source for part in spec.replay.mix],
            exact_counts([part.share for part in spec.replay.mix], spec.trainer.batch_size),
            strict=True,
        )
    )
    live: list[Trajectory] = []
    for _ in range(spec.trainer.steps):
        if counts.get("online") and policy.updates % spec.trainer.update_interval == 0:
            live = sampled(policy, contest, spec, counts["online"] * spec.trainer.update_interval // 2)
        chosen = [[offline[rank]] for rank in draw_ranks(rng, len(offline), counts["reference"])]
        size = spec.rollout.samples_per_prompt if spec.replay.unit == "group" else 1
        if live:
            ranks = draw_ranks(rng, len(live) // size, counts["online"] // size)
            chosen += [live[rank * size : (rank + 1) * size] for rank in ranks]
        policy.learn(
            [
                TrainingSample(each, contest.qhat_0[each.prompt_id], number)
                for number, group in enumerate(chosen)
                for each in group
            ]
        )
    return {"correct": {str(spec.trainer.steps): contest.examined(policy.model, spec.seed)}}


def sampled(policy: Policy, contest: Contest, spec: JobSpec, count: int) -> list[Trajectory]:
    """Groups of the policy's samples, each at a temperature of the job's range, with pi0's log-probs."""
    draw = random.Random(f"{spec.seed} {policy.updates}")
    group, found = spec.rollout.samples_per_prompt, []
    low, high = (
        spec.rollout.temperature if isinstance(spec.rollout.temperature, tuple) else (spec.rollout.temperature,) * 2
    )
    problems = draw.sample(list(contest.tasks.train), min(len(contest.tasks.train), count // group))
    # A tenth of the range each: a batch has one temperature.
    for part in range(4):
        temperature = low + (high - low) * draw.random()
        repeated = [problem for problem in problems[part::4] for _ in range(group)]
        if repeated:
            seed = spec.seed * 1_000_003 + policy.updates * 4 + part
            found += contest.sampled(policy.model, repeated, seed, (temperature, spec.rollout.top_p))
    contest.add_reference(found)
    return found
