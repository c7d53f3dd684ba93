"""Run by torchrun on several ranks: rank 0 cuts a step's batch by outlines, and every rank fetches its own rows.

ranks_with_rows.py REPLAY_ADDRESS FOLDER [killed]; with a third argument the last rank is killed in its first step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from services.trainer.batches import (
    ForwardLimits,
    Minibatch,
    OwnRows,
    ReplayClient,
    TrainingSample,
    batch_metrics,
    fetch_own_rows,
    shares_of_ranks,
)
from services.trainer.ranks import Ranks, join_ranks
from spo.rpc.client import RpcClient
from spo.spec.job_spec import JobSpec
from spo.testing.runs import RUN, toy_spec
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub

STEPS = (1, 2)
BATCH = 16
LIMITS = ForwardLimits(2_000, 3)
MODEL = {"path": "/pi0", "max_response_tokens": 1_500}
REPLAY = {"mix": [{"source": "online", "share": 1.0}], "min_online": BATCH, "samples_per_insert": 50}


def spec_of() -> JobSpec:
    return toy_spec({"model": MODEL, "trainer": {"batch_size": BATCH, "steps": 4}, "replay": REPLAY})


def rows_in(minibatches: list[Minibatch]) -> list[TrainingSample]:
    return [row for minibatch in minibatches for passed in minibatch.micro_batches for row in passed.rows]


def as_words(minibatches: list[Minibatch]) -> list[object]:
    """All that a rank learns from, its order and its passes."""
    return [
        [
            minibatch.size,
            [
                [
                    passed.idle,
                    [[row.trajectory.SerializeToString(True).hex(), row.qhat_0, row.group] for row in passed.rows],
                ]
                for passed in minibatch.micro_batches
            ],
        ]
        for minibatch in minibatches
    ]


def spoilt(replay: ReplayClient, rank: int) -> ReplayClient:
    """Whose rank 1 finds a log-prob that is not finite."""

    class Spoilt(ReplayClient):
        def whole(self, rows: Iterable[TrainingSample], step: int, policy_version: int) -> dict[int, TrainingSample]:
            found = super().whole(rows, step, policy_version)
            next(iter(found.values())).trajectory.reference_logprobs[0] = float("nan")
            return found

    return Spoilt(**vars(replay)) if rank == 1 else replay


def shared_out(ranks: Ranks, replay: ReplayClient, step: int) -> tuple[list[TrainingSample], OwnRows]:
    """Rank 0's view of the batch, and this rank's rows."""
    batch = replay.sample(step, 0, 10.0, None) if ranks.leads else []
    shares = shares_of_ranks(batch, replay.spec, ranks.world_size, LIMITS) if ranks.leads else None
    return batch, fetch_own_rows(ranks, replay, ranks.scatter(shares), step, 0)


def main(address: str, folder: Path, *, killed: bool) -> None:
    ranks = join_ranks(timeout_seconds=300)
    client = RpcClient("replay-buffer", address, ReplayServiceStub)
    replay = ReplayClient(client, RUN, spec_of(), outlines=True)
    noted: dict[str, object] = {}
    for step in STEPS:
        batch, own = shared_out(ranks, replay, step)
        if killed and ranks.rank == ranks.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert own.problem is None
        held = batch + rows_in(list(own.minibatches))
        noted[f"step {step}"] = as_words(list(own.minibatches))
        noted[f"bytes {step}"] = sum(row.trajectory.ByteSize() for row in held)
        noted[f"metrics {step}"] = batch_metrics(batch, 0) if ranks.leads else {}
    _, faulty = shared_out(ranks, spoilt(replay, ranks.rank), STEPS[-1])
    noted["faults"] = faulty.faults
    # Rows that were cut from another batch: as where Redis lost its record of the step.
    batch = replay.sample(STEPS[0], 0, 10.0, None) if ranks.leads else []
    shares = shares_of_ranks(batch, replay.spec, ranks.world_size, LIMITS) if ranks.leads else None
    stale = fetch_own_rows(ranks, replay, ranks.scatter(shares), STEPS[-1], 0)
    noted["stale"] = str(stale.problem)
    gone = replace(replay, client=RpcClient("replay-buffer", "127.0.0.1:1", ReplayServiceStub))
    unreached = fetch_own_rows(ranks, gone if ranks.rank == 1 else replay, ranks.scatter(shares), STEPS[0], 0)
    noted["unreached"] = type(unreached.problem).__name__
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(noted))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), killed=len(sys.argv) > 3)
