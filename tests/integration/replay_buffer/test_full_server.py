"""A Redis that is full, dies or is emptied: nothing acknowledged is lost, the dispatcher stops, and it is said."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog

from services.replay_buffer.ingest import IngestWorker, ReferenceScores
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.store import ReplayStore, StorageMonitor
from spo import redis_keys
from spo.errors import NotFound, NotReady
from spo.local.launcher import server_command
from spo.messaging.redis_client import connect
from spo.messaging.streams.entries import publish as append_entries
from spo.messaging.streams.stage import Consumer
from spo.observability import configure_logs
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.testing.peers import wait_until
from spo.testing.runs import RUN, ScorerDouble, judged_group, served_scorer, start_run, trajectory
from spo.v1 import replay_service_pb2 as replay
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub, add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_service_pb2_grpc import ValueServiceStub

MEBIBYTE = 1 << 20


class Server:
    """A server of this test alone, to be filled, killed and started again on the same folder."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        self.folder = folder
        self.start()

    def start(self) -> None:
        # Python's children get SIGXFSZ back unless told otherwise; ignored, a write beyond the limit is an error.
        self.process = subprocess.Popen(
            server_command(self.port, self.folder), stdout=subprocess.DEVNULL, restore_signals=False
        )
        self.client = connect(f"redis://127.0.0.1:{self.port}/0", wait_seconds=20)

    def limit_files(self, size: int) -> None:
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture(autouse=True)
def _plain_logs() -> Iterator[None]:
    """The default renderer shows the locals of every frame, which takes seconds where they hold whole pipelines."""
    configure_logs("test")
    yield
    structlog.reset_defaults()


@pytest.fixture
def server(free_port: int, tmp_path: Path) -> Iterator[Server]:
    server = Server(free_port, tmp_path)
    start_run(server.client, replay={"min_online": 4, "mix": [{"source": "online", "share": 1}]})
    yield server
    server.stop()


@pytest.fixture
def service(server: Server) -> ReplayService:
    store = ReplayStore(server.client)
    service = ReplayService(BatchSampler(store))
    # The tests fill a server faster than a check per second sees.
    service.storage = StorageMonitor(server.client, 0.9, check_seconds=0)
    return service


def status_of(service: ReplayService) -> Any:
    return service.GetReplayStatus(replay.GetReplayStatusRequest(run_id=RUN), None)


def ledger(client: redis.Redis) -> list[str]:
    ids: Any = client.zrange(redis_keys.replay_ids(RUN), 0, -1)
    return sorted(name.decode() for name in ids)


def heavy(number: int) -> Trajectory:
    return trajectory(number, text="x = " + "1" * 20_000)


def append_until_refused(store: ReplayStore, client: redis.Redis) -> list[str]:
    """Ids of what was acknowledged before the server refused."""
    acknowledged: list[str] = []
    try:
        for start in range(0, 4000, 4):
            batch = [heavy(number) for number in range(start, start + 4)]
            store.append(RUN, batch)
            acknowledged += [sample.trajectory_id for sample in batch]
    except redis.ResponseError:
        return acknowledged
    raise AssertionError("the server never refused")


def cap_memory(server: Server, spare: int) -> None:
    used: Any = server.client.info("memory")
    server.client.config_set("maxmemory", int(used["used_memory"]) + spare)


def test_a_server_without_room_refuses_and_keeps_everything_acknowledged(
    server: Server, service: ReplayService
) -> None:
    cap_memory(server, 4 * MEBIBYTE)

    acknowledged = append_until_refused(service.store, server.client)

    assert len(acknowledged) > 50
    assert ledger(server.client) == sorted(acknowledged), "a refused batch is refused as a whole"
    assert all(service.store.get(RUN, acknowledged))
    stats: Any = server.client.info("stats")
    assert stats["evicted_keys"] == 0
    status = status_of(service)
    assert status.admissible_inserts == 0
    assert "maxmemory" in status.backpressure
    server.client.config_set("maxmemory", 1 << 30)
    assert service.store.append(RUN, [heavy(5000)]) == (1, 0)
    assert status_of(service).backpressure == ""


def test_the_dispatcher_is_stopped_before_the_server_is_full(server: Server, service: ReplayService) -> None:
    assert status_of(service).admissible_inserts > 0
    server.client.set("filler", bytes(20 * MEBIBYTE))

    def nearly_full() -> bool:
        # What is in use falls for a moment, as the server lets go of the buffer that the filler came in.
        used: Any = server.client.info("memory")
        server.client.config_set("maxmemory", int(used["used_memory"] / 0.95))
        status = status_of(service)
        return "evicts nothing" in status.backpressure and status.admissible_inserts == 0

    wait_until(nearly_full, "the status says that the server is nearly full and admits nothing")
    assert service.store.append(RUN, [trajectory(1)]) == (1, 0), "what is in the pipeline still fits"


def test_a_full_disk_refuses_and_keeps_everything_acknowledged(server: Server, service: ReplayService) -> None:
    server.limit_files(2 * MEBIBYTE)

    acknowledged = append_until_refused(service.store, server.client)

    wait_until(lambda: "disk full" in status_of(service).backpressure, "the status names the disk")
    assert status_of(service).admissible_inserts == 0
    server.limit_files(resource.RLIM_INFINITY)
    wait_until(lambda: status_of(service).backpressure == "", "the server writes again")
    more = heavy(5000)
    assert service.store.append(RUN, [more]) == (1, 0)
    server.kill()
    server.start()
    after = ReplayStore(server.client)
    assert set(acknowledged) <= set(ledger(server.client)), "the file on disk has all of it"
    assert all(after.get(RUN, [*acknowledged, more.trajectory_id]))


def test_a_service_with_a_full_server_says_later_and_not_never(server: Server, service: ReplayService) -> None:
    rpc = RpcServer("127.0.0.1", 0)
    add_ReplayServiceServicer_to_server(service, rpc.server)
    rpc.start()
    client = RpcClient("replay-buffer", rpc.address, ReplayServiceStub)
    cap_memory(server, 0)
    try:
        with pytest.raises(NotReady, match="Redis is full") as caught:
            client.call("Append", replay.AppendRequest(run_id=RUN, trajectories=[trajectory(1)]))
        assert caught.value.code == "redis_full"
    finally:
        client.close()
        rpc.stop(1)


@pytest.fixture
def worker(server: Server) -> Iterator[IngestWorker]:
    with served_scorer(ScorerDouble()) as address:  # type: ignore[abstract]
        values = RpcClient("value-estimation", address, ValueServiceStub)
        # Its own connection: it is cut off when the server dies.
        client = connect(f"redis://127.0.0.1:{server.port}/0")
        consumer = Consumer(
            client, redis_keys.verdicts(), redis_keys.INGEST_GROUP, "ingest-1", reclaim_after_seconds=0.4
        )
        yield IngestWorker(ReplayStore(client), consumer, ReferenceScores(values, 5.0), 4)
        values.close()


@pytest.fixture
def running(worker: IngestWorker) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    yield
    stop.set()
    thread.join(20)
    assert not thread.is_alive()


def publish(client: redis.Redis, numbers: range) -> None:
    groups = [judged_group([number, number + 1]) for number in numbers]
    append_entries(client, redis_keys.verdicts(), [group.SerializeToString() for group in groups])


def expected(count: int) -> list[str]:
    return sorted(f"traj_SOURCE_ONLINE_{number}" for number in range(count))


@pytest.mark.usefixtures("running")
def test_ingest_waits_for_room_and_loses_nothing(server: Server) -> None:
    publish(server.client, range(0, 40, 2))
    wait_until(lambda: len(ledger(server.client)) == 40, "the first groups")
    publish(server.client, range(40, 80, 2))
    cap_memory(server, 0)
    before = ledger(server.client)

    # Longer than seven deliveries of an entry would take.
    deadline = time.monotonic() + 0.4 * 7
    while time.monotonic() < deadline:
        assert set(before) <= set(ledger(server.client))
        time.sleep(0.1)
    assert server.client.xlen(redis_keys.verdicts()) > 0
    server.client.config_set("maxmemory", 0)

    wait_until(lambda: server.client.xlen(redis_keys.verdicts()) == 0, "an empty stream")
    assert ledger(server.client) == expected(80)
    assert server.client.xlen(redis_keys.dead_letters(redis_keys.verdicts())) == 0


@pytest.mark.usefixtures("running")
def test_a_killed_redis_comes_back_with_a_ledger_that_is_equal(server: Server, service: ReplayService) -> None:
    luck = random.Random(3)
    batches: dict[int, list[str]] = {}
    for turn in range(4):
        publish(server.client, range(turn * 200, (turn + 1) * 200, 2))
        entered = 200 * turn + luck.randrange(20, 150)
        wait_until(lambda: len(ledger(server.client)) >= entered, "some progress")  # noqa: B023
        request = replay.SampleBatchRequest(run_id=RUN, batch_size=64, step=turn, wait_seconds=20)
        batches[turn] = [sample.trajectory.trajectory_id for sample in service.sampler.sample(request)]
        server.kill()
        server.start()

    wait_until(lambda: server.client.xlen(redis_keys.verdicts()) == 0, "an empty stream")

    assert ledger(server.client) == expected(800)
    counters: Any = server.client.hgetall(redis_keys.replay_counters(RUN))
    assert (int(counters[b"inserted:online"]), int(counters[b"sampled:online"])) == (800, 4 * 64)
    assert server.client.xlen(redis_keys.dead_letters(redis_keys.verdicts())) == 0
    for step, ids in batches.items():
        again = ReplayService(BatchSampler(ReplayStore(server.client)))
        assert list(again.GetBatch(replay.GetBatchRequest(run_id=RUN, step=step), None).trajectory_ids) == ids


def test_a_redis_that_was_emptied_is_an_error_and_not_an_empty_buffer(server: Server, service: ReplayService) -> None:
    service.store.append(RUN, [trajectory(number) for number in range(8)])
    assert status_of(service).counts[0].available == 8
    server.client.flushall()

    with pytest.raises(NotFound, match="Redis was emptied"):
        status_of(service)
    with pytest.raises(NotFound, match="Redis was emptied"):
        service.SampleBatch(replay.SampleBatchRequest(run_id=RUN, batch_size=4), None)


def test_a_redis_set_back_to_an_older_state_is_noticed_and_served_as_it_is(
    server: Server, service: ReplayService
) -> None:
    service.store.append(RUN, [trajectory(number) for number in range(80)])
    assert status_of(service).counts[0].available == 80
    server.client.flushall()
    start_run(server.client, replay={"min_online": 4, "mix": [{"source": "online", "share": 1}]})
    # As many as before, but others.
    service.store.append(RUN, [trajectory(number) for number in range(100, 200)])

    request = replay.SampleBatchRequest(run_id=RUN, batch_size=64)
    with structlog.testing.capture_logs() as logs:
        numbers = {int(sample.trajectory.trajectory_id[19:]) for sample in service.sampler.sample(request)}

    assert numbers <= set(range(100, 200))
    (said,) = logs
    assert "must be made again" in said["event"]
    assert "traj_SOURCE_ONLINE_79, number 80" in said["lost"]
