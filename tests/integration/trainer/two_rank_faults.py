"""Run by torchrun on two ranks: batches that only one rank's share makes unusable, then one that is sound.

two_rank_faults.py MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.trainer.batches import ForwardLimits, Minibatch, TrainingSample, cut_into_minibatches
from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed
from services.trainer.learner import Learner
from services.trainer.ranks import join_ranks
from spo.errors import InvalidInput
from spo.testing.runs import toy_spec
from spo.testing.trainer import sampled_trajectories
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.trajectory_pb2 import Trajectory

PPO = {
    "algorithm": {"losses": [{"objective": "ppo"}], "critic": {}},
    "rollout": {"temperature": 1.0, "top_p": 1.0},
    "value": None,
    "offline": {"human_solutions": False, "keep_reference_samples": False},
    "replay": {"mix": [{"source": "online", "share": 1.0}]},
}


def share_of(rank: int, rows: list[TrainingSample]) -> list[Minibatch]:
    return cut_into_minibatches(rows, 1, 2, ForwardLimits(1000, 2), whole_groups=False)[rank]


def changed(
    rows: list[TrainingSample], trajectory_id: str, change: Callable[[Trajectory], None]
) -> list[TrainingSample]:
    """The same batch with one trajectory changed."""
    found = []
    for row in rows:
        trajectory = Trajectory()
        trajectory.CopyFrom(row.trajectory)
        if trajectory.trajectory_id == trajectory_id:
            change(trajectory)
        found.append(replace(row, trajectory=trajectory))
    return found


def with_an_unknown_token(trajectory: Trajectory) -> None:
    trajectory.response_token_ids[0] = 10_000_000


def with_another_reference(trajectory: Trajectory) -> None:
    trajectory.reference_logprobs[0] += 0.5


def main(model: Path, folder: Path) -> None:
    ranks = join_ranks(timeout_seconds=60)
    prepare_deepspeed(folder)
    found = sampled_trajectories(model, 8)
    for each in found:
        each.trajectory.source = SOURCE_ONLINE
    rows = [TrainingSample(each.trajectory, each.qhat_0, index // 4) for index, each in enumerate(found)]
    # In the last micro-batch of rank 1, so that rank 0 meets no fault at all.
    bad = share_of(1, rows)[0].micro_batches[-1].rows[0].trajectory.trajectory_id
    spoilt = changed(rows, bad, with_an_unknown_token)
    early = share_of(1, rows)[0].micro_batches[0].rows[0].trajectory.trajectory_id
    shifted = changed(rows, early, with_another_reference)
    results = {}
    for name, method in {"spo": {}, "ppo": PPO}.items():
        trainer = {"batch_size": 8, "micro_batch_size": 2, "zero_stage": 3}
        learner = Learner(ranks, toy_spec({"model": {"path": str(model)}, **method, "trainer": trainer}))
        with pytest.raises(InvalidInput) as unknown:
            learner.check_reference(share_of(ranks.rank, spoilt)[0].micro_batches, 1.0)
        # Rank 1's first pass is off: it must not skip the forwards of the passes after it.
        with pytest.raises(InvalidInput) as off:
            learner.check_reference(share_of(ranks.rank, shifted)[0].micro_batches, 1.0)
        refused = learner.learn(share_of(ranks.rank, spoilt), 1e-3)
        sound = learner.learn(share_of(ranks.rank, rows), 1e-3)
        results[name] = {"refused": refused.refused, "updates": [refused.updates, sound.updates], "bad": bad}
        results[name]["codes"] = [unknown.value.code, off.value.code]
        learner.close()
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(results))
    leave_deepspeed()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
