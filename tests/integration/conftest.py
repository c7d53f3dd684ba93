"""Fixtures of the integration tests."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests import conftest
from tests.support.s3_server import S3Server, serve_s3

if TYPE_CHECKING:
    from services.trainer.ranks import Ranks
    from spo.testing.runs import Surroundings


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listened a moment ago."""
    return conftest.free_port()


@pytest.fixture(scope="session")
def running_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One for all tests, since it takes seconds to start."""
    with serve_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_server(running_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server that this process knows as the AWS of its environment; use `bucket_url` for an empty bucket."""
    for name, value in running_s3.environment().items():
        monkeypatch.setenv(name, value)
    return running_s3


@pytest.fixture
def bucket_url(s3_server: S3Server) -> str:
    """s3://, then the name of an empty bucket that no other test has."""
    name = f"tests-{secrets.token_hex(8)}"
    s3_server.bucket(name)
    return f"s3://{name}"


@pytest.fixture(scope="module")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama of about 20,000 parameters."""
    from spo.testing.trainer import write_random_llama

    folder = tmp_path_factory.mktemp("model") / "pi0"
    write_random_llama(folder, seed=0, width=32)
    return folder


@pytest.fixture(scope="module")
def trajectories(tiny_model_path: Path) -> list[Any]:
    """SampledTrajectory messages for the tiny model, with its own reference log-probs."""
    from spo.testing.trainer import sampled_trajectories

    return sampled_trajectories(tiny_model_path, 24)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """This process as the only rank of a trainer."""
    import torch

    from services.trainer.deepspeed_engine import leave_deepspeed, prepare_deepspeed
    from services.trainer.ranks import join_ranks

    if torch.distributed.is_initialized():
        # Left over from another module's in-process inference engine.
        torch.distributed.destroy_process_group()
    torch.set_num_threads(1)
    joined = join_ranks(timeout_seconds=60)
    prepare_deepspeed(tmp_path_factory.mktemp("state"))
    yield joined
    leave_deepspeed()


@pytest.fixture(scope="session")
def value_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the random pi0 whose values are estimated; nobody writes into it."""
    from spo.testing.trainer import write_random_llama

    folder = tmp_path_factory.mktemp("pi0")
    write_random_llama(folder, seed=1)
    return folder


@pytest.fixture
def surroundings(
    redis_client: redis.Redis, value_model_path: Path, tmp_path: Path
) -> Iterator[Callable[..., Surroundings]]:
    """Builds what value-estimation works among; takes other doubles and Settings' fields."""
    import torch

    from services.replay_buffer.service import BatchSampler, ReplayService
    from services.replay_buffer.store import ReplayStore
    from services.value_estimation.reference import Policies, References
    from services.value_estimation.samples import connect_clients
    from services.value_estimation.service import TokenValuer, ValueService
    from services.value_estimation.settings import Settings
    from spo.model.tokenizer import load_tokenizer
    from spo.rpc.server import RpcServer
    from spo.testing.runs import EngineDouble, JudgeDouble, Surroundings
    from spo.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
    from spo.v1.judge_service_pb2_grpc import add_JudgeServiceServicer_to_server
    from spo.v1.replay_service_pb2_grpc import add_ReplayServiceServicer_to_server
    from spo.v1.value_service_pb2_grpc import add_ValueServiceServicer_to_server
    from spo.weights.store import WeightStore

    torch.set_num_threads(1)

    def build(engine_class: Any = EngineDouble, judge_class: Any = JudgeDouble, **fields: Any) -> Surroundings:
        server = RpcServer("127.0.0.1", 0)
        addresses = {
            f"{name}_address": server.address for name in ("inference", "sandbox_judge", "verifier", "replay_buffer")
        }
        settings = Settings(**{"patience_seconds": 20, "prompts_in_flight": 2, **addresses, **fields})
        clients = connect_clients(settings, threading.Event(), redis_client)
        store, weights = ReplayStore(redis_client), WeightStore(tmp_path / "weights")
        references = References(redis_client, 4096, "cpu")
        valuer = TokenValuer(redis_client, Policies(references, weights), clients)
        engine, judge = engine_class(load_tokenizer(value_model_path)), judge_class()
        add_InferenceServiceServicer_to_server(engine, server.server)
        add_JudgeServiceServicer_to_server(judge, server.server)
        add_ReplayServiceServicer_to_server(ReplayService(BatchSampler(store)), server.server)
        add_ValueServiceServicer_to_server(ValueService(redis_client, references, valuer), server.server)
        server.start()
        ended.callback(server.stop, 1)
        for client in (clients.inference, clients.judge, clients.replay):
            ended.callback(client.close)
        return Surroundings(
            redis_client,
            server.address,
            value_model_path,
            engine,
            judge,
            store,
            weights,
            clients,
            references,
            settings,
        )

    with ExitStack() as ended:
        yield build
