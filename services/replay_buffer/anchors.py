"""The anchor of a rollout, where each published version is one: set once, on ingest, from what the group brings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from spo.spec.job_spec import JobSpec
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory


def note_anchors(spec: JobSpec, trajectories: Sequence[Trajectory]) -> None:
    """Give judged online trajectories the anchor under which they were sampled, with its log-probs.

    The rewards of a group's samples of one version say what that version earns on the prompt; the sampler's log-probs,
    at temperature 1, are the version's own. Those of version 0 are asked of value-estimation as ever, and where the job
    estimates values pi0 keeps these: they are of more samples than a group has.
    """
    if not spec.algorithm.anchors_by_rollouts:
        return
    groups: dict[tuple[str, int, int], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.source == SOURCE_ONLINE:
            key = (trajectory.group_id, trajectory.attempt, trajectory.policy_version_first)
            groups[key].append(trajectory)
    for (_, _, version), samples in groups.items():
        if version == 0 and spec.value is not None:
            continue
        rewards = [sample.reward for sample in samples]
        for sample in samples:
            sample.anchor.policy_version = version
            sample.anchor.rewards[:] = rewards
            if version:
                sample.reference_logprobs[:] = sample.sampling_logprobs
                sample.reference_hash = ""


def brings_logprobs(trajectory: Trajectory) -> bool:
    """Whether a trajectory's reference log-probs are of a later version than pi0, which nobody else can compute."""
    return trajectory.anchor.policy_version > 0


def forget_anchor(trajectory: Trajectory) -> None:
    """Make a copy for another run, whose reference is pi0, forget what was measured against the anchor."""
    if brings_logprobs(trajectory):
        del trajectory.reference_logprobs[:]
    trajectory.ClearField("anchor")
