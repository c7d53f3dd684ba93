"""Fixtures of the tests in a browser: Chromium, a real orchestrator on a real Redis, a trainer that reports by RPC."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.service import OrchestratorService
from spo import redis_keys
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.peers import ServiceDoubles
from spo.v1 import orchestrator_service_pb2 as wire, value_service_pb2 as value
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub, add_OrchestratorServiceServicer_to_server
from spo.v1.prompt_pb2 import SOURCE_ONLINE, SOURCE_REFERENCE
from spo.v1.trajectory_pb2 import Annotation, Hop, Trajectory
from spo.v1.value_pb2 import PromptValue
from spo.v1.value_service_pb2_grpc import ValueServiceServicer, add_ValueServiceServicer_to_server
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER, Verdict

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; the extra `dev` has it")

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
PATIENCE_MS = 30_000
# Whatever the page's own policy refuses becomes a complaint.
TELL_REFUSALS = """document.addEventListener("securitypolicyviolation", (refusal) =>
  console.error(`refused ${refusal.violatedDirective} ${refusal.blockedURI} of ${refusal.sourceFile}:` +
    `${refusal.lineNumber} ${refusal.sample} at ${refusal.target?.outerHTML?.slice(0, 300)} in ${document.URL}`));"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium is not installed; `make system-deps` installs it")
        pytest.skip("chromium is not installed; `make system-deps` installs it")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--no-proxy-server"])
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """Console errors, script errors, refusals of the page's policy, and dialogs that only injected markup opens."""
    return []


@pytest.fixture
def page(chromium: Any, api: httpx.Client, complaints: list[str]) -> Iterator[Any]:
    context = chromium.new_context(base_url=str(api.base_url), viewport={"width": 1280, "height": 900})
    context.add_init_script(TELL_REFUSALS)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))

    def answer(dialog: Any) -> None:
        if dialog.type == "confirm":
            dialog.accept()
            return
        complaints.append(f"dialog {dialog.message}")
        dialog.dismiss()

    page.on("dialog", answer)
    yield page
    context.close()


class Values(ValueServiceServicer):
    """The policy as value of the trajectories that the test has: the first half of the tokens helps, the rest harms."""

    def __init__(self, peers: ServiceDoubles) -> None:
        self.peers = peers

    def GetTokenValues(self, request: value.GetTokenValuesRequest, context: Any) -> value.GetTokenValuesResponse:
        wanted = request.trajectory_ids[0]
        text = next(each.response_text for each in self.peers.replay.trajectories if each.trajectory_id == wanted)
        tokens = [text[start : start + 4] for start in range(0, len(text), 4)]
        advantages = [0.1 if index < len(tokens) // 2 else -0.05 for index in range(len(tokens))]
        q = [-0.5 + sum(advantages[: index + 1]) for index in range(len(tokens))]
        found = value.TokenValues(trajectory_id=wanted, qhat_0=-0.5, q=q, advantages=advantages, tokens=tokens)
        return value.GetTokenValuesResponse(trajectories=[found], policy_version=request.policy_version)

    def GetCalibration(self, request: value.GetCalibrationRequest, context: Any) -> value.GetCalibrationResponse:
        bins = [
            value.CalibrationBin(predicted=at, observed=at, outcomes=9, low=at / 2, high=at) for at in (0.2, 0.5, 0.9)
        ]
        return value.GetCalibrationResponse(policy_version=2, bins=bins, prefixes=27, brier_score=0.125)


@pytest.fixture
def context(open_context: Callable[..., AppContext], peers: ServiceDoubles) -> Iterator[AppContext]:
    server = RpcServer("127.0.0.1", 0)
    add_ValueServiceServicer_to_server(Values(peers), server.server)  # type: ignore[abstract]
    server.start()
    yield open_context(value_estimation_address=server.address, scaler="local")
    server.stop(1)


@pytest.fixture
def job_id(context: AppContext, peers: ServiceDoubles, document: dict[str, Any]) -> str:
    """A running job with hostile labels, values of half its prompts, and trajectories of two of them."""
    document |= {"name": "browsed", "labels": {"note": HOSTILE}, "value": {"pivotal": {}}}
    found = context.jobs.submit(parse_job_spec(document))
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(found, state, "test")
    prompts = [each.problem_id for each in context.library.load(context.jobs.spec(found).tasks).train]
    for number, prompt_id in enumerate(prompts[:3]):
        known = PromptValue(prompt_id=prompt_id, samples=100, successes=30 * number)
        context.redis.hset(redis_keys.run_values(found), prompt_id, known.SerializeToString())
    peers.replay.trajectories = [_trajectory(number, prompts[number // 4]) for number in range(8)]
    return found


def _trajectory(number: int, prompt_id: str) -> Trajectory:
    right = number % 2 == 0
    verdict = Verdict(
        outcome=OUTCOME_ACCEPTED if right else OUTCOME_WRONG_ANSWER,
        tests_passed=12 if right else 3,
        tests_total=12,
        detail="" if right else HOSTILE,
    )
    return Trajectory(
        trajectory_id=f"traj_{number}",
        group_id=f"group-{number // 4}",
        prompt_id=prompt_id,
        source=SOURCE_ONLINE if number < 4 else SOURCE_REFERENCE,
        response_text=f"print({number})  # {HOSTILE}",
        response_token_ids=range(12),
        created_unix_ms=1_790_000_000_000,
        verdict=verdict,
        reward=0 if right else -1,
        hops=[
            Hop(service=name, at_unix_ms=1_790_000_000_000 + 1500 * place)
            for place, name in enumerate(("inference", "sandbox-judge"))
        ],
        annotations=[Annotation(position=2, rollouts=8, successes=1), Annotation(position=3, rollouts=8, successes=7)],
    )


@dataclass
class Trainer:
    """Holds the lease of a job and reports over the orchestrator's own RPC, as the trainer service does."""

    orchestrator: RpcClient
    owner: dict[str, Any]
    checkpoints: Path

    def report(self, *steps: int, alarm: str = "") -> None:
        """Scalars of some steps."""
        metrics = {"loss": 0.5, "reward": -0.5, "reward/online": -0.4, "kl_to_reference": 0.1, "entropy": 0.7}
        metrics |= {"staleness": 0.5, "wait_seconds": 1.5, "step_seconds": 0.5}
        alarms = {"entropy": alarm} if alarm else {}
        reports = [wire.StepReport(step=step, metrics=metrics, alarms=alarms) for step in steps]
        self.orchestrator.call("RenewLease", wire.RenewLeaseRequest(**self.owner, reports=reports))

    def publish(self, version: int) -> None:
        """A weight version at ten steps each."""
        about = {"uri": "file:///w", "manifest_digest": f"{version:064d}", "size_bytes": 7_000_000}
        request = wire.PublishWeightsRequest(**self.owner, version=version, step=10 * version, **about)
        self.orchestrator.call("PublishWeights", request)

    def checkpoint(self, step: int) -> None:
        """A saved step."""
        folder = self.checkpoints / f"{step:010d}"
        folder.mkdir(parents=True)
        request = wire.ReportCheckpointRequest(**self.owner, step=step, path=str(folder), manifest_digest="d", keep=2)
        self.orchestrator.call("ReportCheckpoint", request)


@pytest.fixture
def trainer(context: AppContext, job_id: str) -> Iterator[Trainer]:
    server = RpcServer("127.0.0.1", 0)
    add_OrchestratorServiceServicer_to_server(OrchestratorService(context), server.server)
    server.start()
    orchestrator = RpcClient("orchestrator", server.address, OrchestratorServiceStub)
    requested = wire.LeaseJobRequest(trainer_id="trainer", wait_seconds=5)
    grant: wire.LeaseJobResponse = orchestrator.call("LeaseJob", requested)
    owner = {"run_id": job_id, "trainer_id": "trainer", "epoch": grant.epoch}
    yield Trainer(orchestrator, owner, Path(grant.checkpoint_path))
    orchestrator.close()
    server.stop(1)


@pytest.fixture
def evaluated(context: AppContext, job_id: str) -> None:
    """Two evaluations of the job."""
    for step, score in ((0, 0.1), (10, 0.4)):
        interval = {"value": score, "low": score - 0.05, "high": score + 0.05}
        result = {"step": step, "version": step // 10, "pass_at_k": {"1": interval, "10": interval}}
        context.redis.hset(own_keys.evaluations(job_id), str(step), json.dumps(result))
