"""Each rank fetches the rows that it learns from; the batch is cut as if rank 0, which has outlines, held it all."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.store import ReplayStore
from services.trainer.batches import ReplayClient, batch_metrics, shares_of_ranks
from spo.errors import InvalidInput
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.testing.runs import RUN, conversation, start_run, trajectory
from spo.v1 import replay_service_pb2 as replay
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub, add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import Trajectory
from tests.integration.trainer.ranks_with_rows import BATCH, LIMITS, MODEL, REPLAY, STEPS, as_words, spec_of

LIMIT_SECONDS = 540


def long(number: int, draw: random.Random) -> Trajectory:
    """Every fourth is a conversation of a few tokens, the others have up to 1,500."""
    if number % 4 == 0:
        return conversation(number)
    made, tokens = trajectory(number), draw.randrange(200, 1500)
    made.response_token_ids[:] = [draw.randrange(150_000) for _ in range(tokens)]
    made.sampling_logprobs[:] = made.reference_logprobs[:] = [-draw.random() for _ in range(tokens)]
    return made


@pytest.fixture
def address(redis_client: redis.Redis) -> Iterator[str]:
    start_run(redis_client, model=MODEL, trainer={"batch_size": BATCH}, replay=REPLAY)
    store = ReplayStore(redis_client)
    draw = random.Random(0)
    store.append(RUN, [long(number, draw) for number in range(3 * BATCH)])
    server = RpcServer("127.0.0.1", 0)
    add_ReplayServiceServicer_to_server(ReplayService(BatchSampler(store)), server.server)
    server.start()
    yield server.address
    server.stop(1)


@pytest.mark.cpu_seconds(150)
@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_the_rows_that_rank_0_would_have_given_it_a_killed_rank_included(
    address: str, tmp_path: Path, world_size: int
) -> None:
    client = RpcClient("replay-buffer", address, ReplayServiceStub)
    whole = ReplayClient(client, RUN, spec_of())
    batches = {step: whole.sample(step, 0, 10.0, None) for step in STEPS}
    program = Path(__file__).with_name("ranks_with_rows.py")
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--standalone"]
    command = [sys.executable, *launcher, "--local-addr=127.0.0.1", str(program), address, str(tmp_path)]
    killed = subprocess.run([*command, "killed"], check=False, timeout=LIMIT_SECONDS / 2)
    assert killed.returncode != 0
    assert list(tmp_path.iterdir()) == []
    # Ranks that begin anew ask for the same places of the same batch.
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS / 2)
    noted: list[dict[str, Any]] = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(world_size)
    ]

    for step, rows in batches.items():
        expected = [as_words(share) for share in shares_of_ranks(rows, spec_of(), world_size, LIMITS)]
        assert [each[f"step {step}"] for each in noted] == json.loads(json.dumps(expected))
        held, before = noted[0][f"bytes {step}"], sum(row.trajectory.ByteSize() for row in rows)
        print(f"{world_size} ranks, step {step}: rank 0 held {before} bytes of the batch, now {held}")
        assert held < before * (1 / world_size + 0.25)
        assert noted[0][f"metrics {step}"] == pytest.approx(batch_metrics(rows, 0))
    # What one rank meets, all know.
    assert len({json.dumps(each["faults"]) for each in noted}) == 1
    assert list(noted[0]["faults"].values()) == ["a reference log-prob is not finite"]
    assert all("no longer the one" in each["stale"] for each in noted)
    assert {each["unreached"] for each in noted} == {"Unreachable"}


@pytest.mark.parametrize("position", [-1, BATCH])
def test_a_place_outside_the_batch_is_refused(address: str, position: int) -> None:
    client = RpcClient("replay-buffer", address, ReplayServiceStub)
    batch = replay.SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=1)
    with pytest.raises(InvalidInput, match="outside the batch"):
        list(client.stream("StreamBatch", replay.StreamBatchRequest(batch=batch, positions=[0, position]), 10))
