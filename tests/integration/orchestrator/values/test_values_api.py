"""Values over REST: Qhat_0 with its interval, the policy as value per token, calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from services.orchestrator.container import AppContext
from spo import redis_keys
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec
from spo.v1 import value_service_pb2 as value
from spo.v1.value_pb2 import PromptValue
from spo.v1.value_service_pb2_grpc import ValueServiceServicer, add_ValueServiceServicer_to_server

Document = dict[str, Any]


class Values(ValueServiceServicer):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def GetTokenValues(self, request: value.GetTokenValuesRequest, context: Any) -> value.GetTokenValuesResponse:
        self.asked.append(request)
        found = value.TokenValues(
            trajectory_id=request.trajectory_ids[0], qhat_0=-0.5, q=[-0.25, -0.5], advantages=[0.25, -0.25], tokens="ab"
        )
        return value.GetTokenValuesResponse(trajectories=[found], policy_version=3)

    def GetCalibration(self, request: value.GetCalibrationRequest, context: Any) -> value.GetCalibrationResponse:
        self.asked.append(request)
        one = value.CalibrationBin(predicted=0.25, observed=0.5, outcomes=8, low=0.25, high=0.75)
        return value.GetCalibrationResponse(policy_version=3, bins=[one], expected_calibration_error=0.25, prefixes=8)


@pytest.fixture
def values() -> Values:
    return Values()  # type: ignore[abstract]


@pytest.fixture
def context(open_context: Callable[..., AppContext], values: Values) -> Iterator[AppContext]:
    server = RpcServer("127.0.0.1", 0)
    add_ValueServiceServicer_to_server(values, server.server)
    server.start()
    yield open_context(value_estimation_address=server.address)
    server.stop(1)


@pytest.fixture
def job_id(context: AppContext, document: Document) -> str:
    return context.jobs.submit(parse_job_spec(document), None)


def train_ids(context: AppContext, job_id: str) -> list[str]:
    return [problem.problem_id for problem in context.library.load(context.jobs.spec(job_id).tasks).train]


def test_a_prompt_shows_its_value_with_the_interval(context: AppContext, api: httpx.Client, job_id: str) -> None:
    prompt_id = train_ids(context, job_id)[0]
    known = PromptValue(prompt_id=prompt_id, samples=100, successes=10)
    context.redis.hset(redis_keys.run_values(job_id), prompt_id, known.SerializeToString())

    found = api.get(f"/v1/jobs/{job_id}/prompts/{prompt_id}").json()

    assert -1 < found["qhat_0_low"] < found["qhat_0"] < found["qhat_0_high"] < 0


def test_progress_shows_how_well_values_are_known(context: AppContext, api: httpx.Client, job_id: str) -> None:
    def progress() -> Document:
        found: Document = api.get(f"/v1/jobs/{job_id}").json()["progress"]
        return found

    assert (progress()["value_samples"], progress()["value_interval_width"]) == (0, None)
    widths = []
    for number, samples in enumerate((10, 1000)):
        known = PromptValue(prompt_id=f"{number}", samples=samples, successes=samples // 10)
        context.redis.hset(redis_keys.run_values(job_id), f"{number}", known.SerializeToString())
        widths.append(progress()["value_interval_width"])

    assert progress()["value_samples"] == 1010
    assert 0 < widths[1] < widths[0] < 1


def test_token_values_are_asked_of_value_estimation(
    context: AppContext, api: httpx.Client, job_id: str, values: Values
) -> None:
    found = api.get(f"/v1/jobs/{job_id}/trajectories/traj_1/values", params={"policy_version": 3}).json()

    assert found == {
        "trajectory_id": "traj_1",
        "policy_version": 3,
        "qhat_0": -0.5,
        "tokens": ["a", "b"],
        "q": [-0.25, -0.5],
        "advantages": [0.25, -0.25],
    }
    assert values.asked[0].policy_version == 3


def test_calibration_takes_prompts_along_only_for_fresh_continuations(
    context: AppContext, api: httpx.Client, job_id: str, values: Values
) -> None:
    stored = api.get(f"/v1/jobs/{job_id}/calibration").json()
    api.get(f"/v1/jobs/{job_id}/calibration", params={"continuations": 4, "trajectories": 3})

    assert stored["bins"] == [{"predicted": 0.25, "observed": 0.5, "outcomes": 8, "low": 0.25, "high": 0.75}]
    assert not values.asked[0].HasField("policy_version")
    assert not values.asked[0].prompts
    assert {prompt.prompt_id for prompt in values.asked[1].prompts} < set(train_ids(context, job_id))
    assert len(values.asked[1].prompts) == 3
