"""Every endpoint against its own OpenAPI document, fuzzed by Schemathesis over a really running server with keys on.

What is checked: no 5xx, only declared statuses, media types, headers and bodies, requests that the document calls
invalid are refused, and nothing answers without a key. New endpoints are found in the document by themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.orchestrator.container import AppContext
from services.replay_buffer.sampling import BatchSampler
from services.replay_buffer.service import ReplayService
from services.replay_buffer.store import ReplayStore
from spo.errors import NotFound
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1 import value_service_pb2 as value
from spo.v1.prompt_pb2 import SOURCE_ONLINE
from spo.v1.replay_service_pb2_grpc import add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import Trajectory
from spo.v1.value_service_pb2_grpc import ValueServiceServicer, add_ValueServiceServicer_to_server
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, Verdict
from tests.support.budget import sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

Document = dict[str, Any]
KEY = "the-operators-own-key"
EXAMPLES = 24 if "SPO_TEST_ALL" in os.environ else 6
# Of the paths a run tries a quarter, half of them where what answers changed.
ANSWERING = ("services/orchestrator/http", "spo/api")
LIMIT_SECONDS = 480
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)
# What the fuzzer can write by itself; every other body is bytes to it.
WRITABLE = {"application/json", "application/octet-stream", "multipart/form-data", "text/plain"}
PATHS = {
    JobState.VALIDATING: [JobState.VALIDATING],
    JobState.RUNNING: [JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING],
    JobState.CANCELLED: [JobState.CANCELLED],
}


class Values(ValueServiceServicer):
    """Knows no trajectory, and says so as value-estimation does."""

    def GetTokenValues(self, request: value.GetTokenValuesRequest, context: Any) -> value.GetTokenValuesResponse:
        raise NotFound("there is no such trajectory", code="trajectory_not_found")

    def GetCalibration(self, request: value.GetCalibrationRequest, context: Any) -> value.GetCalibrationResponse:
        return value.GetCalibrationResponse(policy_version=request.policy_version)


@pytest.fixture
def context(open_context: Callable[..., AppContext], redis_client: redis.Redis) -> Iterator[AppContext]:
    """With a real replay buffer; inference and judge are played, and value-estimation knows nothing."""
    server = RpcServer("127.0.0.1", 0)
    store = ReplayStore(redis_client)
    add_ReplayServiceServicer_to_server(ReplayService(BatchSampler(store)), server.server)
    add_ValueServiceServicer_to_server(Values(), server.server)  # type: ignore[abstract]
    server.start()
    yield open_context(
        api_key=KEY,
        rate_limit="1000000/minute",
        replay_buffer_address=server.address,
        value_estimation_address=server.address,
    )
    server.stop(1)


@pytest.fixture
def known(context: AppContext, document: Document, redis_client: redis.Redis) -> dict[str, list[str]]:
    """Ids that the fuzzer may use beside those it makes up."""
    jobs = []
    for path in ([], *PATHS.values()):
        jobs.append(context.jobs.submit(parse_job_spec(document)))
        for state in path:
            context.jobs.transition(jobs[-1], state, "test")
    running = jobs[2]
    problem = context.library.load(context.jobs.spec(running).tasks).train[0]
    sampled = Trajectory(
        trajectory_id="traj_00",
        run_id=running,
        group_id="g",
        prompt_id=problem.problem_id,
        source=SOURCE_ONLINE,
        prompt_token_ids=[1],
        response_token_ids=[1, 2],
        sampling_logprobs=[-0.5, -0.25],
        reference_logprobs=[-0.5, -0.5],
        response_text="<b>\x00</b>",
        verdict=Verdict(outcome=OUTCOME_ACCEPTED),
        reward=0.0,
        policy_version_first=1,
        policy_version_last=1,
    )
    ReplayStore(redis_client).append(running, [sampled])
    key, _ = context.authenticator.keys.create("k", "red", ("jobs:read",))
    return {
        "job_id": [*jobs, running, running],
        "trajectory_id": ["traj_00"],
        "prompt_id": [problem.problem_id],
        "key_id": [key.key_id],
    }


def fuzz(url: str, folder: Path, known: dict[str, list[str]]) -> subprocess.CompletedProcess[str]:
    """Runs Schemathesis; `default` is taken out, so that each status must be declared by its number."""
    described = httpx.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False).json()
    chosen = sampled(sorted(described["paths"]), len(described["paths"]) // 4, lambda _: ANSWERING)
    described["paths"] = {path: described["paths"][path] for path in chosen}
    for operations in described["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("default", None)
    (folder / "openapi.json").write_text(json.dumps(described))
    settings = [f"[dictionaries.{name}]\nvalues = {json.dumps(ids)}\n" for name, ids in known.items()]
    # Those of Schemathesis, and what is too long to be read at all.
    refusals = ["400", "401", "403", "404", "405", "406", "409", "415", "422", "428", "429", "431", "5xx"]
    settings.append(f"[checks.negative_data_rejection]\nexpected-statuses = {json.dumps(refusals)}\n")
    settings.append("[parameters]")
    settings += [f'"path.{name}" = {{ dictionary = "{name}", probability = 0.7 }}' for name in known]
    (folder / "schemathesis.toml").write_text("\n".join(settings) + "\n")
    uploads = sorted(_media_types(described) - WRITABLE)
    alias = f"schemathesis.serializer.alias({uploads}, 'application/octet-stream')"
    (folder / "upload_hooks.py").write_text(f"import schemathesis\n\n{alias if uploads else ''}\n")
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json"]
    command += ["--url", url, "--header", f"Authorization: Bearer {KEY}", "--checks", ",".join(CHECKS)]
    command += ["--max-examples", str(EXAMPLES), "--phases", "examples,coverage,fuzzing", "--seed", "6"]
    command += ["--continue-on-failure", "--suppress-health-check", "all", "--request-timeout", "20", "--no-color"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "upload_hooks", "PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


def _media_types(described: Document) -> set[str]:
    operations = [each for found in described["paths"].values() for each in found.values()]
    return {kind for each in operations for kind in each.get("requestBody", {}).get("content", {})}


def test_every_endpoint_keeps_to_its_own_description(
    context: AppContext, serve: Callable[[AppContext], str], known: dict[str, list[str]], tmp_path: Path
) -> None:
    began = time.monotonic()
    done = fuzz(serve(context), tmp_path, known)

    print(f"fuzzed for {time.monotonic() - began:.0f} s")
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
