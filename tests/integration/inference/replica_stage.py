"""A real replica process and what stands around it in tests: a test orchestrator, runs, weight versions, prompts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import redis

from spo import redis_keys
from spo.local.warm_parent import WarmProcess
from spo.messaging.streams.entries import publish
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.spec.job_spec import spec_to_json
from spo.testing.runs import toy_spec
from spo.testing.trainer import random_llama
from spo.v1 import orchestrator_service_pb2 as orchestrator
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub
from spo.v1.orchestrator_service_pb2_grpc import (
    OrchestratorServiceServicer,
    add_OrchestratorServiceServicer_to_server,
)
from spo.v1.prompt_pb2 import SOURCE_ONLINE, Prompt, PromptGroup, Sampling
from spo.v1.weights_pb2 import WeightAnnouncement
from spo.weights.store import StoredVersion, WeightStore
from tests.support.warm_services import start_warm

RUN = "job_01"
WAIT_SECONDS = 240.0
STATEMENT = "sum of the sorted numbers"


class Orchestrator(OrchestratorServiceServicer):
    """Takes heartbeats and answers with the assignment under test."""

    def __init__(self) -> None:
        self.response = orchestrator.HeartbeatResponse(next_heartbeat_seconds=0.2)
        self.beats: dict[int, orchestrator.HeartbeatRequest] = {}

    def Heartbeat(self, request: orchestrator.HeartbeatRequest, context: object) -> orchestrator.HeartbeatResponse:
        self.beats[request.pid] = request
        return self.response


class Platform:
    """What surrounds the replicas, and the replicas that were started."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.orchestrator = Orchestrator()
        self.server = RpcServer("127.0.0.1", 0)
        add_OrchestratorServiceServicer_to_server(self.orchestrator, self.server.server)
        self.server.start()
        self.store = WeightStore(folder / "weights")
        self.replicas: list[WarmProcess] = []

    def start_replica(self, module: str = "services.inference", **more: str) -> WarmProcess:
        settings = {
            "SPO_REDIS_URL": self.redis_url,
            "SPO_ORCHESTRATOR_ADDRESS": self.server.address,
            "SPO_STATE_PATH": str(self.folder),
            "SPO_INFERENCE_KV_CACHE_MEMORY_BYTES": str(32 << 20),
            "SPO_INFERENCE_RECLAIM_AFTER_SECONDS": "2",
            "SPO_INFERENCE_GROUPS_IN_FLIGHT": "8",
            "OMP_NUM_THREADS": "1",
            **more,
        }
        log = self.folder / f"replica-{len(self.replicas)}.log"
        log.unlink(missing_ok=True)
        replica = start_warm(module, os.environ | settings, log)
        self.replicas.append(replica)
        return replica

    def assign(self, run_id: str, model_path: Path | None = None) -> None:
        self.orchestrator.response = orchestrator.HeartbeatResponse(
            next_heartbeat_seconds=0.2, run_id=run_id, model_path=str(model_path or self.folder / "model")
        )

    def beat(self, replica: WarmProcess) -> orchestrator.HeartbeatRequest:
        assert replica.poll() is None, self.log_of(replica)
        return self.orchestrator.beats.get(replica.pid, orchestrator.HeartbeatRequest())

    def log_of(self, replica: WarmProcess) -> str:
        return (self.folder / f"replica-{self.replicas.index(replica)}.log").read_text()

    def client(self, replica: WarmProcess) -> RpcClient:
        return RpcClient("inference", self.beat(replica).address, InferenceServiceStub)

    def close(self) -> None:
        for replica in self.replicas:
            replica.kill()
            replica.wait(WAIT_SECONDS)
        self.server.stop(0)


def write_run(client: redis.Redis, run_id: str, model_path: Path, **model: object) -> None:
    spec = toy_spec({"model": {"path": str(model_path), **model}})
    client.set(redis_keys.run_spec(run_id), spec_to_json(spec))


def write_version(store: WeightStore, version: int) -> StoredVersion:
    tensors = {name: tensor.detach() for name, tensor in random_llama(version).state_dict().items()}
    return store.write(RUN, version, parent=0, step=version, dtype="float32", shards=[("a.safetensors", tensors)])


def announcement(stored: StoredVersion) -> WeightAnnouncement:
    return WeightAnnouncement(
        run_id=RUN,
        version=int(stored.manifest["version"]),
        uri=str(stored.path),
        manifest_digest=stored.manifest_digest,
        announced_unix_ms=int(time.time() * 1000),
    )


def announce(client: redis.Redis, stored: StoredVersion) -> None:
    publish(client, redis_keys.weights(RUN), [announcement(stored).SerializeToString()])


def prompt_group(number: int, *, text: str = STATEMENT, samples: int = 4, version: int | None = None) -> PromptGroup:
    return PromptGroup(
        group_id=f"group-{number}",
        run_id=RUN,
        prompt=Prompt(prompt_id="prompt", text=text),
        sampling=Sampling(
            samples=samples, temperature_min=0.1, temperature_max=0.8, top_p=0.95, max_tokens=40, seed=number
        ),
        policy_version=version,
        source=SOURCE_ONLINE,
    )
