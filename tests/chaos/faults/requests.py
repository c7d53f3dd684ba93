"""What clients and broken peers send: unreadable entries, requests too large or refused by engines, calls that nobody
waits for, and all that another tenant can think of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random
from typing import Any

import grpc
import httpx

from spo import redis_keys
from spo.client import Client
from spo.errors import SpoError
from spo.v1.inference_service_pb2 import GenerateRequest
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub
from spo.v1.judge_service_pb2 import JudgeRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.prompt_pb2 import Prompt, PromptGroup, Sampling
from spo.v1.value_service_pb2 import ComputeReferenceLogprobsRequest, TokenSequence
from spo.v1.value_service_pb2_grpc import ValueServiceStub
from tests.chaos.faults.fault import Fault, Inflicted, Stage

SECONDS = 10
GIANT_BYTES = 80 << 20
GIVEN_UP = 6


def _malformed_entry(stage: Stage, random: Random) -> Inflicted:
    """Bytes that are no message, on a stream that all runs share: a dead letter, and nobody else's trouble."""
    stream = random.choice((redis_keys.rollouts(), redis_keys.verdicts(), redis_keys.estimates()))
    stage.injected_dead_letters[stream] += 1
    fields: dict[Any, Any] = random.choice(({"payload": b"\xff" * random.randint(1, 2000)}, {"nonsense": b"\xff"}))
    stage.platform.redis.xadd(stream, fields)
    return Inflicted(f"a malformed entry, {next(iter(fields))}, on {stream}")


def _giant_request(stage: Stage, random: Random) -> Inflicted:
    """More than any of the borders takes: they answer with a refusal, and go on."""
    kind = random.choice(("body", "head", "message"))
    if kind == "message":
        judge = JudgeServiceStub(grpc.insecure_channel(stage.platform.child("sandbox-judge").address))
        with contextlib.suppress(grpc.RpcError):
            judge.Judge(JudgeRequest(raw_programs=[b"#" * GIANT_BYTES]), timeout=SECONDS)
    else:
        head = {"X-Giant": "x" * (130 << 10)} if kind == "head" else {}
        body = b"x" * (GIANT_BYTES if kind == "body" else 1)
        with contextlib.suppress(httpx.HTTPError):
            _post(stage, "/v1/jobs", content=body, headers=head)
    return Inflicted(f"a giant request ({kind})")


def _poisonous_request(stage: Stage, random: Random) -> Inflicted:
    """What passes for a request and cannot be carried out."""
    kind = random.choice(("hot evaluation", "folder of programs", "nothing to train"))
    if kind == "hot evaluation":
        with contextlib.suppress(SpoError), _client(stage, stage.platform.api_key) as client:
            asked = client.request_evaluation(stage.job_id, samples=1, temperature=3.3, ks=[1])
            stage.evaluations.append(asked.id)
    else:
        path = "/usr" if kind == "folder of programs" else str(stage.platform.folder)
        document = {"model": {"path": path}, "tasks": {"kind": "toy"}}
        with contextlib.suppress(httpx.HTTPError):
            _post(stage, "/v1/jobs?validate_only=true", json=document)
    return Inflicted(f"a poisonous request ({kind})")


def _callers_that_give_up(stage: Stage, random: Random) -> Inflicted:
    """More often than a work that kills engines is tried; nothing of it may be held against anybody."""
    addresses = stage.platform.launcher.addresses
    prompt = Prompt(prompt_id="given up", text="1 2")
    sampling = Sampling(samples=8, temperature_min=1, temperature_max=1, top_p=1, max_tokens=32)
    group = PromptGroup(group_id="given-up", run_id=stage.job_id, prompt=prompt, sampling=sampling, policy_version=0)
    sequences = [TokenSequence(prompt_token_ids=[1, 2], response_token_ids=[3] * 32)] * 256
    scored = ComputeReferenceLogprobsRequest(run_id=stage.job_id, sequences=sequences)
    judged = JudgeRequest(programs=["while True: pass"] * 8, language="python")
    with (
        grpc.insecure_channel(addresses["inference"]) as inference,
        grpc.insecure_channel(addresses["value-estimation"]) as values,
        grpc.insecure_channel(addresses["sandbox-judge"]) as judge,
    ):
        calls: tuple[tuple[Any, object], ...] = (
            (InferenceServiceStub(inference).Generate, GenerateRequest(group=group)),
            (InferenceServiceStub(inference).GenerateParts, GenerateRequest(group=group)),
            (ValueServiceStub(values).ComputeReferenceLogprobs, scored),
            (ValueServiceStub(values).ReferenceLogprobsParts, scored),
            (JudgeServiceStub(judge).JudgeParts, judged),
        )
        for _ in range(GIVEN_UP):
            for call, request in calls:
                with contextlib.suppress(grpc.RpcError):
                    answer = call(request, timeout=random.uniform(0.02, 0.2))
                    for _ in answer if isinstance(answer, Iterator) else ():
                        pass
    return Inflicted(f"{GIVEN_UP * len(calls)} calls that their callers give up")


def _other_tenant(stage: Stage, random: Random) -> Inflicted | None:
    """Jobs, most of them cancelled at once, specs that are none, and questions about what belongs to others."""
    spec = {"model": {"path": stage.model}, "tasks": {"kind": "toy"}, "value": {"samples": 64}}
    try:
        with _client(stage, stage.platform.api_key) as operator:
            token = operator.platform.create_key("other", "other", ["jobs:read", "jobs:write"]).token
        with _client(stage, token) as other:
            for number in range(random.randint(3, 6)):
                job = other.submit(spec)
                stage.other_jobs.append(job.id)
                if number:
                    other.cancel(job.id)
            for _ in range(10):
                for fault in (
                    lambda: other.submit({"model": {"path": "/"}, "tasks": {"kind": "toy"}}),
                    lambda: other.get(stage.job_id),
                    lambda: other.cancel(stage.job_id),
                    lambda: other.request_evaluation(stage.job_id),
                ):
                    try:
                        fault()
                    except SpoError:
                        continue
                    stage.broken.append("another tenant was served what is not its own")
    except SpoError:
        return None
    seconds = random.uniform(8, 12)
    return Inflicted(f"another tenant with {len(stage.other_jobs)} jobs for {seconds:.1f} s", seconds, lambda: None)


def end_other_tenant(stage: Stage, client: Client) -> None:
    """What it left is cancelled and deleted. Raises SpoError while that is not possible yet."""
    for job_id in list(stage.other_jobs):
        with contextlib.suppress(SpoError):
            client.cancel(job_id)
        client.delete(job_id)
        stage.other_jobs.remove(job_id)


def _client(stage: Stage, key: str) -> Client:
    return Client(stage.platform.launcher.http_url, api_key=key, retry_seconds=SECONDS)


def _post(stage: Stage, path: str, **content: Any) -> httpx.Response:
    url = stage.platform.launcher.http_url + path
    key = {"Authorization": f"Bearer {stage.platform.api_key}"}
    sent: dict[str, Any] = {**content, "headers": {**key, **content.get("headers", {})}}
    return httpx.post(url, timeout=SECONDS, trust_env=False, **sent)


REQUESTS = (
    Fault("malformed entry", _malformed_entry),
    Fault("giant request", _giant_request),
    Fault("poisonous request", _poisonous_request),
    Fault("callers give up", _callers_that_give_up),
    Fault("other tenant", _other_tenant),
)
