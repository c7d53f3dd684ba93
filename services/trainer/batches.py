"""From sampled trajectories to tensors: ask the replay buffer, refuse what cannot be learned from, pad.

Axes: B trajectory, L padded position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spo.algorithm.monte_carlo import q_of_two_rewards
from spo.algorithm.token_batch import TokenBatch
from spo.errors import IntegrityError
from spo.model.segments import Mask, segment_faults, trained_mask
from spo.rpc.client import RpcClient
from spo.spec.job_spec import JobSpec, RewardSpec
from spo.spec.prompt_values import qhat_0_of_group
from spo.v1 import replay_service_pb2 as wire
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_SHARED
from spo.v1.trajectory_pb2 import Annotation, Trajectory


@dataclass(frozen=True)
class TrainingSample:
    """One sampled trajectory; `group` numbers its prompt within the whole batch.

    qhat_0_error: the standard error of qhat_0, reward units; 0 where none is told.
    """

    trajectory: Trajectory
    qhat_0: float
    group: int
    qhat_0_error: float = 0.0


def is_anchored(trajectory: Trajectory) -> bool:
    """Whether a version after pi0 stands for it: then its reference log-probs are that version's, as it was sampled."""
    return trajectory.anchor.policy_version > 0


@dataclass(frozen=True)
class ReplayClient:
    """The replay buffer as the trainer sees it."""

    client: RpcClient
    run_id: str
    spec: JobSpec

    def sample(
        self, step: int, policy_version: int, wait_seconds: float, refreshed: Mapping[str, float] | None
    ) -> list[TrainingSample]:
        """The batch of a step; the same step gets the same batch. Raises NotReady when there is not enough yet.

        refreshed: Qhat_0 by prompt id under a later reference than the model folder, which then counts. A prompt that
        has none there is left out of the batch: pi0's value beside the log-probs of another reference is no residual.
        """
        batch_size = self.spec.trainer.batch_size
        request = wire.SampleBatchRequest(
            run_id=self.run_id,
            batch_size=batch_size,
            step=step,
            seed=self.spec.seed,
            policy_version=policy_version,
            wait_seconds=wait_seconds,
        )
        response: wire.SampleBatchResponse = self.client.call(
            "SampleBatch", request, deadline_seconds=wait_seconds + 10
        )
        if len(response.batch) != batch_size:
            raise IntegrityError(f"asked for {batch_size} trajectories, got {len(response.batch)}")
        groups: dict[str, int] = {}
        return [
            TrainingSample(
                sampled.trajectory,
                self._qhat_0(sampled, refreshed),
                groups.setdefault(sampled.trajectory.prompt_id, len(groups)),
                # Those of later references are not told.
                sampled.qhat_0_error if refreshed is None and not sampled.trajectory.HasField("anchor") else 0.0,
            )
            for sampled in response.batch
            if refreshed is None or sampled.trajectory.prompt_id in refreshed
        ]

    def _qhat_0(self, sampled: wire.SampledTrajectory, refreshed: Mapping[str, float] | None) -> float:
        if sampled.trajectory.HasField("anchor"):
            return qhat_0_of_group(sampled.trajectory.anchor.rewards, self.spec.algorithm)
        return sampled.qhat_0 if refreshed is None else refreshed[sampled.trajectory.prompt_id]


def groups_of(rows: Sequence[TrainingSample]) -> list[tuple[str, str]]:
    """(run id, group id) of the online trajectories: what traces link a step to."""
    online = (row.trajectory for row in rows if row.trajectory.source == SOURCE_ONLINE)
    return [(trajectory.run_id, trajectory.group_id) for trajectory in online]


def faults(rows: Sequence[TrainingSample], *, cached_reference: bool, behaviour: bool) -> dict[str, str]:
    """Trajectory id -> why no loss may be computed from it; empty when the batch is sound.

    cached_reference: every trajectory must bring the reference's log-probs. behaviour: online and shared ones must
    bring the sampler's.
    """
    found = {
        row.trajectory.trajectory_id: _fault(row, cached_reference=cached_reference)
        or _sampling_fault(row.trajectory, wanted=behaviour)
        for row in rows
    }
    return {trajectory_id: fault for trajectory_id, fault in found.items() if fault}


def _sampling_fault(trajectory: Trajectory, *, wanted: bool) -> str:
    known, length = len(trajectory.sampling_logprobs), len(trajectory.response_token_ids)
    if known != length and (known or (wanted and trajectory.source in (SOURCE_ONLINE, SOURCE_SHARED))):
        return f"{known} sampling log-probs for {length} tokens"
    if not all(map(math.isfinite, trajectory.sampling_logprobs)):
        return "a sampling log-prob is not finite"
    return ""


def _fault(row: TrainingSample, *, cached_reference: bool) -> str:
    trajectory = row.trajectory
    length = len(trajectory.response_token_ids)
    if not trajectory.prompt_token_ids or not length:
        return "no prompt or no response tokens"
    if not trajectory.HasField("reward") or not math.isfinite(trajectory.reward):
        return "the reward is missing or not finite"
    if not math.isfinite(row.qhat_0):
        return "Qhat_0 is not finite"
    if not 0 <= row.qhat_0_error < math.inf:
        return "the standard error of Qhat_0 is impossible"
    misplaced = segment_faults(trajectory.segments, length, None)
    if misplaced:
        return "{} {}".format(*misplaced[0])
    trained = trained_mask(trajectory)
    if not all(_is_possible(annotation, trained) for annotation in trajectory.annotations):
        return "an annotation is impossible"
    if cached_reference and len(trajectory.reference_logprobs) != length:
        return f"{len(trajectory.reference_logprobs)} reference log-probs for {length} tokens"
    if cached_reference and not all(map(math.isfinite, trajectory.reference_logprobs)):
        return "a reference log-prob is not finite"
    return ""


def _is_possible(annotation: Annotation, trained_T: Mask) -> bool:
    position = annotation.position
    stands = position == 0 or (0 < position <= len(trained_T) and bool(trained_T[position - 1]))
    return stands and 0 <= annotation.successes <= annotation.rollouts > 0


def token_batch(rows: Sequence[TrainingSample], value_beta: float, reward: RewardSpec) -> TokenBatch:
    """Right-padded tensors of the rows, on the CPU; reference log-probs are 0 where a trajectory brings none.

    Of a conversation the mask holds the tokens that the policy sampled, as `spo.model.segments` says. An annotation
    speaks of the prefix of `position` tokens: its target, found with value_beta, stands at the last of them.
    """
    shape = (len(rows), max(map(length_of, rows)))
    input_ids_BL = torch.zeros(shape, dtype=torch.long)
    attention_mask_BL = torch.zeros(shape, dtype=torch.long)
    response_mask_BL = torch.zeros(shape, dtype=torch.bool)
    reference_logprobs_BL = torch.zeros(shape)
    sampling_logprobs_BL = torch.zeros(shape)
    annotated_q_BL = torch.zeros(shape)
    annotated_mask_BL = torch.zeros(shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        trajectory = row.trajectory
        start, end = len(trajectory.prompt_token_ids), length_of(row)
        input_ids_BL[index, :start] = torch.tensor(list(trajectory.prompt_token_ids))
        input_ids_BL[index, start:end] = torch.tensor(list(trajectory.response_token_ids))
        attention_mask_BL[index, :end] = 1
        response_mask_BL[index, start:end] = torch.from_numpy(trained_mask(trajectory))
        if len(trajectory.reference_logprobs) == end - start:
            reference_logprobs_BL[index, start:end] = torch.tensor(list(trajectory.reference_logprobs))
        if len(trajectory.sampling_logprobs) == end - start:
            sampling_logprobs_BL[index, start:end] = torch.tensor(list(trajectory.sampling_logprobs))
        for position, target in annotated_targets(trajectory, value_beta, reward).items():
            annotated_q_BL[index, start + position - 1] = target
            annotated_mask_BL[index, start + position - 1] = True
    return TokenBatch(
        input_ids_BL=input_ids_BL,
        attention_mask_BL=attention_mask_BL,
        response_mask_BL=response_mask_BL,
        reference_logprobs_BL=reference_logprobs_BL,
        sampling_logprobs_BL=sampling_logprobs_BL,
        reward_B=torch.tensor([row.trajectory.reward for row in rows]),
        qhat_0_B=torch.tensor([row.qhat_0 for row in rows]),
        qhat_0_error_B=torch.tensor([row.qhat_0_error for row in rows]),
        source_B=torch.tensor([row.trajectory.source for row in rows]),
        group_B=torch.tensor([row.group for row in rows]),
        annotated_q_BL=annotated_q_BL,
        annotated_mask_BL=annotated_mask_BL,
    )


def annotated_targets(trajectory: Trajectory, value_beta: float, reward: RewardSpec) -> dict[int, float]:
    """Qhat_t by number t >= 1 of response tokens, reward units; position 0 is the prompt's own value, not a target.

    Rollouts from the same prefix are counted together.
    """
    counts: dict[int, tuple[int, int]] = {}
    for found in trajectory.annotations:
        successes, rollouts = counts.get(found.position, (0, 0))
        counts[found.position] = (successes + found.successes, rollouts + found.rollouts)
    return {
        position: q_of_two_rewards(successes / rollouts, value_beta, best=reward.best, worst=reward.shift)
        for position, (successes, rollouts) in counts.items()
        if position >= 1
    }


def length_of(row: TrainingSample) -> int:
    """Tokens of prompt and response."""
    return len(row.trajectory.prompt_token_ids) + len(row.trajectory.response_token_ids)
