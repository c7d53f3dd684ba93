"""A policy that the platform serves as judge: its name is pinned at submit, and the pinned version alone is asked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.container import AppContext
from services.orchestrator.service import OrchestratorService
from services.orchestrator.serving import Change, Target
from services.verifier.http_scorer import BadAnswer, ServiceAway, ServiceFailed
from services.verifier.scorers import question_of, scorers_of
from services.verifier.settings import Settings
from services.verifier.stage import VerifierScheduler
from spo.errors import InternalError, InvalidInput, NotFound, PreconditionFailed, SpoError
from spo.model.tokenizer import encode_chat
from spo.rpc.server import RpcServer
from spo.spec.section import JobState
from spo.tasks.verifier import versions_of_today
from spo.testing.runs import toy_spec
from spo.v1 import verdict_pb2
from spo.v1.inference_service_pb2 import ServeRequest
from spo.v1.judge_service_pb2 import Priority
from spo.v1.orchestrator_service_pb2_grpc import add_OrchestratorServiceServicer_to_server
from spo.v1.verdict_pb2 import Composition, ModelScore, Outcome, Part, Verdict
from tests.integration.inference.model_shapes import SHAPES, write_shape
from tests.integration.orchestrator.serving.conftest import KEY, Counter
from tests.support.warm_services import start_warm

RUBRIC = "Asked: {statement} Answered: {response} How good is it?"
WHO = Change("key:test")
NOBODY = "job_" + "0" * 26
# A replica needs about 15 s of CPU to start: on a busy machine that is minutes.
WAIT_SECONDS = 200.0


class Verifying:
    """Verifiers that ask an orchestrator over gRPC."""

    def __init__(self, context: AppContext, client: redis.Redis, **settings: Any) -> None:
        self.server = RpcServer("127.0.0.1", 0)
        add_OrchestratorServiceServicer_to_server(OrchestratorService(context), self.server.server)
        self.server.start()
        usual = {"attempts": 2, "backoff_seconds": 0.01, "recheck_rate": 0, "model_seconds": 10}
        chosen = Settings(orchestrator_address=self.server.address, **{**usual, **settings})
        self.scheduler = VerifierScheduler(client, chosen, scorers_of(chosen, client))

    def judged(self, model: str, *responses: str, votes: int = 1, part: bool = False) -> list[Verdict]:
        asked = ModelScore(rubric=RUBRIC, statement="2 + 2", votes=votes, model=model)
        tests = verdict_pb2.TestSet(model=asked, pass_score=0.5)
        if part:
            whole = Composition(parts=[Part(name="said", weight=1, verifier=tests)])
            tests = verdict_pb2.TestSet(composition=whole, pass_score=0.5)
        digest = self.scheduler.test_sets.upload(tests)
        batch = self.scheduler.submit(responses, "text", digest, Priority.PRIORITY_TRAINING, run_id="of no matter")
        found = batch.verdicts(WAIT_SECONDS)
        assert {one.judge_version for one in found} == versions_of_today(tests, {"verifier": "verifier-1"})
        return found

    def close(self) -> None:
        self.scheduler.close(1.0)
        self.server.stop(0)


@pytest.fixture
def verifying(counter: Counter, redis_client: redis.Redis) -> Iterator[Verifying]:
    found = Verifying(counter.context, redis_client)
    yield found
    found.close()


def publish_version(context: AppContext, job_id: str, version: int) -> None:
    document = json.dumps({"version": version, "step": version, "uri": "", "manifest_digest": "0" * 64})
    context.redis.hset(own_keys.job_weights(job_id), str(version), document)


def judged_by(document: dict[str, Any], model: str) -> dict[str, Any]:
    verifier = {"kind": "model", "rubric": RUBRIC, "model": model}
    return {**document, "tasks": {**document["tasks"], "verifier": verifier}}


def faults(answer: Any) -> list[tuple[str, str]]:
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_job_spec"), answer.text
    return [(each["pointer"], each["message"]) for each in answer.json()["errors"]]


def test_a_name_is_pinned_when_a_job_is_submitted_and_does_not_move_with_it(
    counter: Counter, document: dict[str, Any]
) -> None:
    context, judge = counter.context, counter.job_id
    for version in (1, 2):
        publish_version(context, judge, version)
    context.served_models.publish("", "grader", Target(judge, 1), WHO)

    submitted = counter.ask("POST", "/v1/jobs", json=judged_by(document, "served:grader")).json()
    context.served_models.publish("", "grader", Target(judge, 2), WHO)
    parts = [{"name": "said", "verifier": {"kind": "model", "rubric": "r", "model": "served:grader"}}]
    composed = {**document, "tasks": {**document["tasks"], "verifier": {"kind": "composition", "parts": parts}}}
    later = counter.ask("POST", "/v1/jobs?validate_only=true", json=composed).json()

    pinned = context.jobs.spec(submitted["id"]).tasks.verifier
    assert pinned.model == f"served:grader={judge}@1"
    assert later["tasks"]["verifier"]["parts"][0]["verifier"]["model"] == f"served:grader={judge}@2"
    context.served_models.remove("", "grader", WHO)
    again = counter.ask("POST", "/v1/jobs?validate_only=true", json=judged_by(document, pinned.model))
    assert again.json()["tasks"]["verifier"]["model"] == pinned.model, "what is pinned needs its name no more"


def test_a_name_that_is_not_the_tenants_is_refused_at_its_field(counter: Counter, document: dict[str, Any]) -> None:
    context, judge = counter.context, counter.job_id
    context.served_models.publish("", "grader", Target(judge, 0), WHO)
    token = counter.key("red", "jobs:read", "jobs:write")

    def refused(model: str, token: str = KEY, path: str = "/v1/jobs") -> list[tuple[str, str]]:
        return faults(counter.ask("POST", path, token, json=judged_by(document, model)))

    at = "/tasks/verifier/model"
    assert refused("served:grader", token) == [(at, "there is no model grader that is served")]
    assert refused("served:grdaer") == [(at, "there is no model grdaer that is served")]
    assert refused(f"served:grader={judge}@0", token) == [(at, f"there is no job {judge}")]
    assert refused(f"served:grader={judge}@7") == [(at, f"job {judge} has no weight version 7")]
    assert refused(f"served:grader={NOBODY}@0")[0][0] == at
    assert refused("served:a b") == [(at, "must be served:NAME, or pinned served:NAME=job_...@VERSION")]
    assert refused("judge-8b")[0][0] == "/tasks/verifier/address"
    overrides = {"tasks": {"verifier": {"kind": "model", "rubric": "r", "model": "served:grader"}}}
    publish_version(context, judge, 1)
    fork = counter.ask("POST", f"/v1/jobs/{judge}/fork", json={"overrides": overrides})
    assert "served:grader=job_...@VERSION" in fork.text


def test_the_pinned_version_votes_and_judge_version_names_it(counter: Counter, verifying: Verifying) -> None:
    asked: list[ServeRequest] = []
    said = ["<think>Score: 1/10</think> Score: 8/10", "none", "Score: 6/10", "Score: 4/10"]

    def says(request: ServeRequest) -> str:
        asked.append(request)
        return said.pop(0) if said else "Score: 5/10"

    counter.peers.inference.says = says
    model = f"served:grader={counter.job_id}@3"

    (verdict,) = verifying.judged(model, "It is 4.")
    (again,) = verifying.judged(model, "It is 4.")
    (whole,) = verifying.judged(model, "It is 4.", part=True)

    assert (verdict.outcome, verdict.score) == (Outcome.OUTCOME_ACCEPTED, pytest.approx(0.8))
    assert verdict.judge_version == f"verifier-1 {model}"
    assert again.cached
    assert whole.score == verdict.score
    assert [(request.run_id, request.policy_version) for request in asked] == [(counter.job_id, 3)]
    (turn,) = json.loads(asked[0].messages_json)
    assert turn["role"] == "user"
    assert turn["content"].startswith("Asked: 2 + 2 Answered: <response-")
    (other,) = verifying.judged(f"served:grader={counter.job_id}@4", "It is 4.", votes=2)
    assert (other.cached, other.score) == (False, pytest.approx(0.6))


def test_no_answer_is_no_score(counter: Counter, verifying: Verifying) -> None:
    model = f"served:grader={counter.job_id}@0"
    counter.peers.inference.says = lambda request: "I like it."
    with pytest.raises(BadAnswer, match="no 'Score: X/10'"):
        verifying.judged(model, "a")
    with pytest.raises(ServiceFailed, match="served:gone=job_0"):
        verifying.judged(f"served:gone={NOBODY}@0", "b")
    with pytest.raises(InvalidInput):
        verifying.judged("served:grader", "not pinned")
    other = counter.context.jobs.submit(toy_spec({"model": {"path": "/models/another"}}))
    with pytest.raises(ServiceAway, match=f"no replica serves {other}"):
        verifying.judged(f"served:other={other}@0", "c")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (NotFound("version 3 is not there any more"), ServiceFailed),
        (InternalError("a defect"), ServiceFailed),
        (PreconditionFailed("this replica holds another model", code="other_run"), ServiceAway),
    ],
)
def test_files_that_are_gone_are_a_failure_and_a_busy_replica_is_waited_for(
    open_counter: Callable[..., Counter], redis_client: redis.Redis, raised: SpoError, expected: type[SpoError]
) -> None:
    counter = open_counter(serving_wait_seconds=0.01)
    verifying = Verifying(counter.context, redis_client, attempts=1)

    def says(request: ServeRequest) -> str:
        raise raised

    counter.peers.inference.says = says
    try:
        # A failure comes back, and the worker sets its group aside with the reason; who is away is waited for.
        with pytest.raises(expected, match=f"served:grader={counter.job_id}@3: "):
            verifying.judged(f"served:grader={counter.job_id}@3", "a")
    finally:
        verifying.close()


def says_eight(folder: Path) -> None:
    """A random model with a chat template learns in seconds to say the same of everything."""
    write_shape(folder, SHAPES["llama3"])
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 2048}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    answer = tokenizer.encode("Score: 8/10<|eot_id|>", add_special_tokens=False)
    asked = ModelScore(rubric=RUBRIC, statement="2 + 2")
    losses = [1.0]
    while max(losses[-5:]) > 1e-3:
        question = question_of(asked, "It is 4." * (1 + len(losses) % 3), f"response-{len(losses) ** 7:016x}")
        tokens = [*encode_chat(tokenizer, [{"role": "user", "content": question}]), *answer]
        labels = [-100] * (len(tokens) - len(answer)) + answer
        loss = model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        assert len(losses) < 1000, losses[-5:]
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_policy_in_a_real_engine_judges(
    open_context: Callable[..., AppContext], redis_server: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    says_eight(tmp_path / "judge")
    context = open_context(serving_wait_seconds=WAIT_SECONDS)
    limits = {"max_prompt_tokens": 1000, "max_response_tokens": 32}
    job_id = context.jobs.submit(toy_spec({"model": {"path": str(tmp_path / "judge"), **limits}}))
    # It has ended: that its judgement is asked for brings a replica to it.
    assert context.jobs.transition(job_id, JobState.CANCELLED, "test")
    verifying = Verifying(context, redis_client, model_seconds=WAIT_SECONDS)
    settings = {
        "SPO_REDIS_URL": redis_server,
        "SPO_ORCHESTRATOR_ADDRESS": verifying.server.address,
        "SPO_STATE_PATH": str(tmp_path),
        "SPO_INFERENCE_KV_CACHE_MEMORY_BYTES": str(64 << 20),
        "OMP_NUM_THREADS": "1",
    }
    replica = start_warm("services.inference", os.environ | settings, tmp_path / "replica.log")
    try:
        right, wrong = verifying.judged(f"served:judge={job_id}@0", "It is 4.", "It is 5.", votes=2)
    finally:
        replica.kill()
        replica.wait(30)
        verifying.close()

    assert (right.score, wrong.score) == (pytest.approx(0.8), pytest.approx(0.8))
    assert right.detail == "votes of 10: 8, 8"
    assert right.judge_version == f"verifier-1 served:judge={job_id}@0"
