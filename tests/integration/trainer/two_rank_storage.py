"""Run by torchrun on two ranks: the storage of rank 1 fails, while rank 0 has heard of it or waits in a collective.

two_rank_storage.py heard|waiting FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from services.trainer import ranks as module
from services.trainer.lease import LEADER, Attempt
from services.trainer.ranks import join_ranks
from spo.errors import StorageUnavailable
from spo.v1.orchestrator_service_pb2 import LeaseJobResponse


def main(case: str, folder: Path) -> None:
    module.ALONE_SECONDS = 1.0
    ranks = join_ranks(timeout_seconds=60)
    attempt = Attempt(ranks, LeaseJobResponse(epoch=1), folder)

    def load() -> None:
        with ranks.together(attempt.delayed):
            if ranks.rank == 1:
                raise StorageUnavailable("/models: ESTALE")
            if case == "waiting":
                dist.all_reduce(torch.ones(1))

    with attempt.noted():
        with ranks.together(attempt.delayed):
            dist.all_reduce(torch.ones(1))
        with pytest.raises(StorageUnavailable, match="ESTALE"):
            load()
        assert ranks.gather(ranks.rank) == [0, 1]
        assert not ranks.leads or (folder / LEADER).exists()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
