"""Ranks end with the torchrun that started them, and when told to: left behind, they train beside the next ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import free_port

LIMIT_SECONDS = 240.0
# Alive for longer than the test looks for its end.
RANK = """
import os, time
from services.trainer.ranks import join_ranks
join_ranks(60)
print(os.getpid(), flush=True)
time.sleep(600)
"""
# Killed while its libraries load; the ranks need no store of torchrun's to find each other.
LATE_RANK = """
import os, time
print(os.getpid(), flush=True)
time.sleep(3)
from services.trainer.ranks import join_ranks
join_ranks(60)
time.sleep(600)
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("source", [RANK, LATE_RANK], ids=["joined", "loading"])
def test_a_killed_torchrun_leaves_no_rank_behind(tmp_path: Path, source: str) -> None:
    program = tmp_path / "rank.py"
    program.write_text(source)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]
    with subprocess.Popen([sys.executable, *launcher, str(program)], stdout=subprocess.PIPE, text=True) as torchrun:
        assert torchrun.stdout is not None
        rank = psutil.Process(int(torchrun.stdout.readline()))
        assert rank.ppid() == torchrun.pid
        torchrun.kill()
        deadline = time.monotonic() + LIMIT_SECONDS
        while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the rank outlived its torchrun"
            time.sleep(0.1)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_trainer_that_is_told_to_stop_while_its_libraries_load_ends(tmp_path: Path) -> None:
    port = free_port()
    settings = {"SPO_TRAINER_PORT": str(port), "SPO_STATE_PATH": str(tmp_path), "SPO_TRAINER_DRAIN_SECONDS": "1"}
    with subprocess.Popen([sys.executable, "-m", "services.trainer"], env=os.environ | settings) as trainer:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not _listens(port):
            assert trainer.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        trainer.terminate()
        try:
            trainer.wait(60)
        finally:
            trainer.kill()
