"""What clients and broken peers send: unreadable entries, requests too large, requests that engines refuse."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import grpc
import httpx

from spo import redis_keys
from spo.client import Client
from spo.errors import SpoError
from spo.v1.judge_service_pb2 import JudgeRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from tests.chaos.faults.fault import Fault, Inflicted, Stage

SECONDS = 10
GIANT_BYTES = 80 << 20


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
        with contextlib.suppress(SpoError), Client(stage.platform.launcher.http_url, retry_seconds=SECONDS) as client:
            asked = client.request_evaluation(stage.job_id, samples=1, temperature=3.3, ks=[1])
            stage.evaluations.append(asked.id)
    else:
        path = "/usr" if kind == "folder of programs" else str(stage.platform.folder)
        document = {"model": {"path": path}, "tasks": {"kind": "toy"}}
        with contextlib.suppress(httpx.HTTPError):
            _post(stage, "/v1/jobs?validate_only=true", json=document)
    return Inflicted(f"a poisonous request ({kind})")


def _post(stage: Stage, path: str, **content: object) -> httpx.Response:
    url = stage.platform.launcher.http_url + path
    return httpx.post(url, timeout=SECONDS, trust_env=False, **content)  # type: ignore[arg-type]


REQUESTS = (
    Fault("malformed entry", _malformed_entry),
    Fault("giant request", _giant_request),
    Fault("poisonous request", _poisonous_request),
)
