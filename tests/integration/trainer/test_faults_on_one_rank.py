"""A fault that only one rank meets makes all ranks refuse the batch alike, and go on with the next one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.trainer.lease import death_before, delay_before

LIMIT_SECONDS = 120


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 30)
def test_all_ranks_refuse_what_one_cannot_learn_from_and_none_waits_for_another(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    program = Path(__file__).with_name("two_rank_faults.py")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1"]
    subprocess.run(
        [sys.executable, *launcher, str(program), str(tiny_model_path), str(tmp_path)],
        check=True,
        timeout=LIMIT_SECONDS,
    )
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))

    assert first == second
    for found in first.values():
        assert "vocabulary" in found["refused"]
        assert found["bad"] in found["refused"]
        assert found["updates"] == [0, 1]
        assert found["codes"] == ["token_out_of_range", "reference_mismatch"]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_SECONDS + 30)
def test_storage_that_fails_on_one_rank_ends_no_wait_by_its_timeout_and_counts_as_no_death(tmp_path: Path) -> None:
    program = Path(__file__).with_name("two_rank_storage.py")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1"]
    for case, status, words in (("heard", 0, ""), ("waiting", 1, "rank 1: /models: ESTALE")):
        command = [sys.executable, *launcher, str(program), case, str(tmp_path / case)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        assert ran.returncode == status, ran.stderr[-3000:]
        assert death_before(tmp_path / case, 2) is None
        assert delay_before(tmp_path / case, 2) == words
