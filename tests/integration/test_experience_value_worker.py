"""The value worker takes stored experience and published wrong solutions before it estimates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from services.replay_buffer.batches import BatchDrawer
from services.replay_buffer.service import ReplayService
from services.replay_buffer.store import ReplayStore
from services.value_estimation.experience import StoredSelections
from services.value_estimation.peers import connect_peers
from services.value_estimation.reference import References
from services.value_estimation.settings import Settings
from services.value_estimation.value_worker import ValueWorker
from spo import redis_keys
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.job_spec import parse_job_spec, spec_to_json
from spo.policy_model import load_tokenizer
from spo.rpc import RpcServer
from spo.testing_models import write_random_llama
from spo.testing_value import RIGHT, WRONG, Engine, Judge
from spo.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from spo.v1.judge_service_pb2_grpc import add_JudgeServiceServicer_to_server
from spo.v1.prompt_pb2 import SOURCE_OTHER_RUN, Prompt
from spo.v1.replay_service_pb2_grpc import add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Trajectory
from spo.v1.value_pb2 import EstimateRequest, PromptValue

RUN = "job_NOW"
PROMPT = Prompt(prompt_id="p" * 64, text="sum of the even numbers", tests_digest="t", response_format="raw")


@pytest.fixture
def worker(redis_client: redis.Redis, tmp_path: Path) -> Iterator[ValueWorker]:
    torch.set_num_threads(1)
    write_random_llama(tmp_path / "pi0", seed=1)
    spec = {
        "model": {"path": str(tmp_path / "pi0")},
        "value": None,
        "algorithm": {"losses": [{"objective": "supervised"}]},
        "offline": {"experience": [{"run": "theirs"}], "keep_reference_samples": False, "wrong_human_solutions": True},
        "replay": {"mix": [{"source": "other_run", "share": 0.5}, {"source": "human", "share": 0.5}]},
    }
    redis_client.set(redis_keys.run_spec(RUN), spec_to_json(parse_job_spec(spec)))
    redis_client.set(redis_keys.run_state(RUN), "estimating")
    store = ReplayStore(redis_client)
    server = RpcServer("127.0.0.1", 0)
    add_InferenceServiceServicer_to_server(Engine(load_tokenizer(tmp_path / "pi0")), server.server)  # type: ignore[abstract]
    add_JudgeServiceServicer_to_server(Judge(), server.server)  # type: ignore[abstract]
    add_ReplayServiceServicer_to_server(ReplayService(store, BatchDrawer(store)), server.server)
    server.start()
    addresses = {f"{name}_address": server.address for name in ("inference", "sandbox_judge", "replay_buffer")}
    settings = Settings(patience_seconds=20, prompts_in_hand=1, **addresses)
    references = References(redis_client, 4096, "cpu")
    made = ValueWorker(
        redis_client, references, connect_peers(settings, threading.Event(), redis_client), settings, "worker"
    )
    made.selections = StoredSelections(redis_client, str(tmp_path / "experience"))
    theirs = Trajectory(
        trajectory_id="traj_1",
        run_id="theirs",
        prompt_id=PROMPT.prompt_id,
        source=SOURCE_OTHER_RUN,
        response_text=RIGHT,
        finish_reason=FINISH_REASON_STOP,
    )
    origin = Origin("theirs", "import", "toy")
    ExperienceStore(str(tmp_path / "experience")).write(origin, "part-1", [StoredTrajectory(theirs, PROMPT)])
    yield made
    server.stop(1)


def test_a_job_without_values_gets_its_offline_experience_once(worker: ValueWorker, redis_client: redis.Redis) -> None:
    request = EstimateRequest(run_id=RUN, prompt=PROMPT, import_experience=True, wrong_solutions=[WRONG, RIGHT])

    worker.estimate(request)
    redis_client.delete(redis_keys.run_values(RUN))  # as after a kill before the value was written
    worker.estimate(request)

    counters: Any = redis_client.hgetall(redis_keys.replay_counters(RUN))
    assert (counters[b"inserted:other_run"], counters[b"correct:other_run"]) == (b"1", b"1")
    assert counters[b"inserted:human"] == b"1", "the published wrong solution that is wrong"
    stored: Any = redis_client.hget(redis_keys.run_values(RUN), PROMPT.prompt_id)
    assert PromptValue.FromString(stored).samples == 0


def test_a_copy_of_a_held_out_prompt_gets_none(worker: ValueWorker, redis_client: redis.Redis) -> None:
    worker.estimate(EstimateRequest(run_id=RUN, prompt=PROMPT, import_experience=False))

    assert redis_client.hlen(redis_keys.run_values(RUN)) == 1
    assert redis_client.zcard(redis_keys.replay_ids(RUN)) == 0
