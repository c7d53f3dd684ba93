"""The value worker takes stored experience and published wrong solutions before it estimates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from services.value_estimation.samples import StoredSelections
from services.value_estimation.workers import ValueWorker
from spo import redis_keys
from spo.experience.columns import StoredTrajectory
from spo.experience.store import ExperienceStore, Origin
from spo.testing.runs import RIGHT, WRONG, Surroundings
from spo.v1.prompt_pb2 import SOURCE_OTHER_RUN, Prompt
from spo.v1.trajectory_pb2 import FINISH_REASON_STOP, Trajectory
from spo.v1.value_pb2 import EstimateRequest, PromptValue

RUN = "job_NOW"
PROMPT = Prompt(prompt_id="p" * 64, text="sum of the even numbers", tests_digest="t", response_format="raw")


@pytest.fixture
def worker(surroundings: Callable[..., Surroundings], tmp_path: Path) -> ValueWorker:
    around = surroundings(prompts_in_flight=1)
    around.start(
        RUN,
        value=None,
        algorithm={"losses": [{"objective": "supervised"}]},
        offline={"experience": [{"run": "theirs"}], "keep_reference_samples": False, "wrong_human_solutions": True},
        replay={"mix": [{"source": "other_run", "share": 0.5}, {"source": "human", "share": 0.5}]},
    )
    made = ValueWorker(around.client, around.references, around.clients, around.settings, "worker")
    made.selections = StoredSelections(around.client, str(tmp_path / "experience"))
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
    return made


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
