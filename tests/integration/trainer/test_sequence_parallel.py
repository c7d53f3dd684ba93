"""Rows that two ranks compute together have the numbers and gradients, and learn what, one rank's have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spo.testing.trainer import write_random_llama
from tests.integration.trainer.two_rank_sequences import JOBS, MODELS, MOST_TOKENS

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 400


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank noted."""
    folder = tmp_path_factory.mktemp("sequences")
    # Of four heads.
    write_random_llama(folder / "model", seed=0, width=128)
    program = Path(__file__).with_name("two_rank_sequences.py")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1"]
    command = [sys.executable, *launcher, str(program), str(folder / "model"), str(folder)]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return [json.loads((folder / f"sequences-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.cpu_seconds(150)  # the first one starts two ranks for all of them
@pytest.mark.timeout(LIMIT_SECONDS + 30)
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_are_those_of_one_rank(found: list[dict[str, Any]], name: str) -> None:
    for noted in found:
        assert noted["models"][name]["logprobs"] < 1e-5
        assert noted["models"][name]["gradients"] < 1e-5
        assert noted["models"][name]["of one rank"] > 0.1, "a rank has the gradients of its own stretch alone"


@pytest.mark.cpu_seconds(150)  # or this one, on the days that leave the other out
@pytest.mark.timeout(LIMIT_SECONDS + 30)
@pytest.mark.parametrize("name", JOBS)
def test_steps_are_those_of_ranks_that_have_whole_rows_and_no_rank_has_more_tokens_than_it_may(
    found: list[dict[str, Any]], name: str
) -> None:
    for noted in found:
        job = noted[name]
        assert {curve.partition("/")[2] for curve in job["metrics"]} >= {"loss", "grad_norm", "kl_to_sampler"}
        for curve, (alone, together) in job["metrics"].items():
            assert together == pytest.approx(alone, rel=1e-4, abs=1e-4), curve
        # Adam makes whole steps of the smallest gradients.
        assert job["parameters"] < 1e-3
        assert 0 < job["most tokens"] <= MOST_TOKENS


@pytest.mark.timeout(LIMIT_SECONDS + 30)
def test_ranks_that_cannot_be_cut_into_groups_are_refused(found: list[dict[str, Any]]) -> None:
    assert [noted["refused"].partition(":")[0] for noted in found] == ["ranks_not_divisible"] * 2
