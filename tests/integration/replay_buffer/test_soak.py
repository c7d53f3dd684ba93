"""The short form of `python -m benchmarks.soak`: archiver and trimmer at their own pace beside a stream of inserts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Of a window of 20,000 that breathes with the archiver's files; without trimming 50,000 would be in Redis.
MOST_IN_REDIS = 20_000 + 8_192 + 3 * 2_048 + 3 * 25 * 64


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_redis_holds_a_window_and_no_more_while_trajectories_stream_in() -> None:
    environment = {**os.environ, "SPO_SOAK_TRAJECTORIES": "50000", "SPO_REPLAY_BUFFER_LEDGER_TRAJECTORIES": "5000"}
    command = [sys.executable, "-m", "benchmarks.soak", "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=800, check=True)
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout[done.stdout.index("{\n") :])["rows"]}

    assert rows["trajectories"] >= 50_000
    assert rows["facts"] == rows["source online"] == rows["prompts"] <= MOST_IN_REDIS
    assert rows["keys in all"] - rows["facts"] < 200
