"""A batch belongs to its step, whoever asks and however often, and every use of a trajectory is on record."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.store import ReplayStore, SampledPayload
from services.trainer.batches import ReplayClient
from spo import redis_keys
from spo.errors import InvalidInput, NotFound, PreconditionFailed
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec
from spo.testing.runs import RUN, start_run, trajectory
from spo.v1 import replay_service_pb2 as replay
from spo.v1.prompt_pb2 import SOURCE_HUMAN
from spo.v1.replay_service_pb2_grpc import (
    ReplayServiceServicer,
    ReplayServiceStub,
    add_ReplayServiceServicer_to_server,
)

BATCH = 8
MIX = [{"source": "online", "share": 0.5}, {"source": "human", "share": 0.5}]

# Takes batches of growing steps, says so, and stands still in the middle of one.
TRAINER = """
import sys
from spo.rpc.client import RpcClient
from spo.v1.replay_service_pb2 import SampleBatchRequest
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
replay = RpcClient("replay-buffer", sys.argv[1], ReplayServiceStub)
for step in range(int(sys.argv[2])):
    reply = replay.call("SampleBatch", SampleBatchRequest(run_id="job_TEST", batch_size=8, step=step, wait_seconds=5))
    print(*(each.trajectory.trajectory_id for each in reply.batch), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(redis_client: redis.Redis) -> ReplayStore:
    replay = {"mix": MIX, "min_online": 4, "samples_per_insert": 50}
    start_run(redis_client, trainer={"batch_size": BATCH}, replay=replay)
    store = ReplayStore(redis_client)
    store.append(RUN, [trajectory(number) for number in range(40)])
    store.append(RUN, [trajectory(number, SOURCE_HUMAN) for number in range(8)])
    return store


@pytest.fixture
def service(store: ReplayStore) -> ReplayService:
    return ReplayService(BatchSampler(store))


@pytest.fixture
def address(service: ReplayService) -> Iterator[str]:
    server = RpcServer("127.0.0.1", 0)
    add_ReplayServiceServicer_to_server(service, server.server)
    server.start()
    yield server.address
    server.stop(1)


def ids_of(client: RpcClient, step: int) -> list[str]:
    request = replay.SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=step)
    return [sample.trajectory.trajectory_id for sample in client.call("SampleBatch", request).batch]


def counters(client: redis.Redis) -> dict[str, int]:
    found = client.hgetall(redis_keys.replay_counters(RUN))
    return {name.decode(): int(count) for name, count in found.items()}  # type: ignore[union-attr]


def counts(service: ReplayService, trajectory_id: str) -> list[int]:
    request = replay.GetTrajectoryRequest(run_id=RUN, trajectory_id=trajectory_id)
    reply = service.GetTrajectory(request, None)
    assert reply.times_sampled == len(reply.steps)
    return list(reply.steps)


def test_the_successor_of_a_killed_trainer_gets_its_batch_and_it_counts_once(
    address: str, store: ReplayStore, service: ReplayService
) -> None:
    command = [sys.executable, "-c", TRAINER, address, "3"]
    dying = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert dying.stdout is not None
    taken = [dying.stdout.readline().split() for _ in range(3)]
    dying.send_signal(signal.SIGKILL)
    assert dying.wait(10) == -signal.SIGKILL
    dying.communicate()
    # Experience that came meanwhile must not change what is handed out again.
    store.append(RUN, [trajectory(number) for number in range(40, 80)])
    before = counters(store.client)

    client = RpcClient("replay-buffer", address, ReplayServiceStub)
    # It resumes from a checkpoint of before step 1.
    again = [ids_of(client, step) for step in (1, 2)]
    new = ids_of(client, 3)
    client.close()

    assert again == taken[1:]
    assert before["sampled:online"] == 3 * BATCH // 2
    assert counters(store.client)["sampled:online"] == 4 * BATCH // 2
    assert counters(store.client)["drawn"] == 4
    used = Counter(name for batch in [*taken, new] for name in batch)
    assert {name: len(counts(service, name)) for name in used} == used


def test_askers_at_the_same_time_get_the_same_batch_and_it_counts_once(address: str, store: ReplayStore) -> None:
    clients = [RpcClient("replay-buffer", address, ReplayServiceStub) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(lambda client: ids_of(client, 0), clients))
    for client in clients:
        client.close()

    assert batches == [batches[0]] * 8
    assert counters(store.client)["sampled:online"] == BATCH // 2
    assert counters(store.client)["drawn"] == 1


def test_the_steps_that_used_a_trajectory_are_listed_page_by_page(service: ReplayService) -> None:
    batches = {}
    for step in range(40):
        request = replay.SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=step)
        batches[step] = [sample.trajectory.trajectory_id for sample in service.sampler.sample(request)]
        reply = service.GetBatch(replay.GetBatchRequest(run_id=RUN, step=step), None)
        assert list(reply.trajectory_ids) == batches[step]

    # 8 human solutions for 4 places: each is used about 20 times.
    sought = "traj_SOURCE_HUMAN_3"
    used_by = [step for step, ids in batches.items() if sought in ids]
    pages: list[int] = []
    for start in range(0, len(used_by), 6):
        page_request = replay.GetTrajectoryRequest(run_id=RUN, trajectory_id=sought, steps_from=start, steps_limit=6)
        page = service.GetTrajectory(page_request, None)
        assert page.times_sampled == len(used_by)
        assert len(page.steps) <= 6
        pages += page.steps
    assert pages == used_by
    beyond = replay.GetTrajectoryRequest(run_id=RUN, trajectory_id=sought, steps_from=10**15)
    assert list(service.GetTrajectory(beyond, None).steps) == []


def test_a_step_without_a_batch_is_not_found(service: ReplayService) -> None:
    with pytest.raises(NotFound, match="no batch for step 3"):
        service.GetBatch(replay.GetBatchRequest(run_id=RUN, step=3), None)


@pytest.mark.parametrize("step", [-1, 2**32])
def test_a_step_outside_the_record_is_refused(service: ReplayService, step: int) -> None:
    with pytest.raises(InvalidInput, match="belongs to a step"):
        service.SampleBatch(replay.SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=step), None)


def test_a_trajectory_says_how_many_duplicates_it_stands_for(service: ReplayService, store: ReplayStore) -> None:
    spelled = [trajectory(number, SOURCE_HUMAN, text="print(77)" + " " * number) for number in (100, 104, 108)]
    for _ in range(2):
        store.append(RUN, spelled)

    request = replay.GetTrajectoryRequest(run_id=RUN, trajectory_id=spelled[2].trajectory_id)
    reply = service.GetTrajectory(request, None)

    assert reply.trajectory.trajectory_id == spelled[0].trajectory_id
    assert reply.copies == 2


def test_a_batch_in_parts_is_the_batch_of_the_step_without_its_texts(address: str) -> None:
    client = RpcClient("replay-buffer", address, ReplayServiceStub)
    request = replay.SampleBatchRequest(run_id=RUN, batch_size=BATCH, step=3)
    wanted = replay.StreamBatchRequest(batch=request, without_texts=True)

    streamed = [found for part in client.stream("StreamBatch", wanted, 10) for found in part.batch]
    whole = list(client.call("SampleBatch", request).batch)

    assert all(found.trajectory.response_text for found in whole)
    for found in whole:
        found.trajectory.response_text = ""
    assert streamed == whole
    request.run_id = "job_NONE"
    with pytest.raises(NotFound, match="job_NONE"):
        list(client.stream("StreamBatch", replay.StreamBatchRequest(batch=request), 10))


class OlderService(ReplayService):
    """Of a time before batches in parts."""

    StreamBatch = ReplayServiceServicer.StreamBatch  # type: ignore[assignment]


@pytest.mark.parametrize(("kind", "tokens"), [(ReplayService, 60_000), (OlderService, 60_000), (OlderService, 6)])
def test_the_trainer_gets_batches_that_no_message_holds_except_from_an_older_replay_buffer(
    store: ReplayStore, monkeypatch: pytest.MonkeyPatch, kind: type[ReplayService], tokens: int
) -> None:
    count = 80
    long = trajectory(0)
    long.response_token_ids[:] = [150_000] * tokens
    long.sampling_logprobs[:] = long.reference_logprobs[:] = [-1.0] * tokens
    long.response_text = "word " * tokens
    server = RpcServer("127.0.0.1", 0)
    service = kind(BatchSampler(store))
    payload = SampledPayload(long.SerializeToString(), -0.5)
    monkeypatch.setattr(service.sampler, "sample", lambda request, wanted, positions=(): [payload] * count)
    add_ReplayServiceServicer_to_server(service, server.server)
    server.start()
    spec = parse_job_spec({"model": {"path": "/pi0"}, "trainer": {"batch_size": count}})
    trainer = ReplayClient(RpcClient("replay-buffer", server.address, ReplayServiceStub), RUN, spec)
    try:
        if kind is OlderService and tokens > 6:
            with pytest.raises(InvalidInput, match="more than a message's"):
                trainer.sample(1, 0, 1.0, None)
            return
        batch = trainer.sample(1, 0, 1.0, None)
    finally:
        server.stop(1)
    assert [len(row.trajectory.response_token_ids) for row in batch] == [tokens] * count
    assert batch[-1].trajectory.reference_logprobs == long.reference_logprobs


def test_a_service_without_the_method_says_that_it_is_older() -> None:
    server = RpcServer("127.0.0.1", 0)
    server.start()
    client = RpcClient("replay-buffer", server.address, ReplayServiceStub)
    with pytest.raises(PreconditionFailed, match="older") as caught:
        list(client.stream("StreamBatch", replay.StreamBatchRequest(), 10))
    server.stop(1)
    assert caught.value.code == "unimplemented"
