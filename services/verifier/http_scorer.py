"""Reward services of people's own: responses go out in signed batches, scores come back.

The contract is docs/reward_service.openapi.json.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from typing import Any

from services.verifier.circuit import Circuits
from services.verifier.guarded_post import BadAnswer, GuardedPost, ServiceAnswer, ServiceAway, ServiceFailed
from services.verifier.scores import scored
from services.verifier.settings import Settings
from spo.v1.verdict_pb2 import TestSet, Verdict

VERSION = 1
TIMESTAMP, SIGNATURE, IDEMPOTENCY = "SPO-Timestamp", "SPO-Signature", "Idempotency-Key"
DEFAULT_SECONDS = 30.0
_BUSY = (408, 425, 429, 503)
_SHOWN_BYTES = 200


def signature_of(secret: str, timestamp: str, body: bytes) -> str:
    """The value of SPO-Signature: HMAC-SHA256 of the timestamp, a full stop and the body, in hexadecimal."""
    return "v1=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class HttpScorer:
    """Asks reward services, several batches at once."""

    def __init__(self, post: GuardedPost, circuits: Circuits, settings: Settings) -> None:
        self._post = post
        self._circuits = circuits
        self._settings = settings
        self._room = asyncio.Semaphore(settings.http_calls)

    async def verdicts(
        self, responses: Sequence[str], test_set: TestSet, language: str = "", look: int = 0
    ) -> list[Verdict]:
        """One verdict per response. Raises BadAnswer, ServiceAway, ServiceFailed, InvalidInput."""
        size = self._settings.http_batch
        batches = [responses[start : start + size] for start in range(0, len(responses), size)]
        found = await asyncio.gather(*(self._batch(batch, test_set, look) for batch in batches))
        return [verdict for verdicts in found for verdict in verdicts]

    async def _batch(self, responses: Sequence[str], test_set: TestSet, look: int) -> list[Verdict]:
        asked = test_set.http
        arguments = json.loads(asked.arguments_json or "{}")
        body = json.dumps({"version": VERSION, "responses": list(responses), "arguments": arguments}).encode()
        # The same for every attempt, and for whoever tries the same batch later; a second look is another question.
        again = f"\0{look}".encode() if look else b""
        key = hashlib.sha256(asked.url.encode() + b"\0" + body + again).hexdigest()

        async def ask() -> list[Verdict]:
            async with self._room:
                answer = await self._post.post(
                    asked.url, body, self._headers(key, body), asked.timeout_seconds or DEFAULT_SECONDS
                )
            return verdicts_in(answer, asked.url, len(responses), test_set.pass_score)

        return await self._circuits.of(asked.url).call(ask)

    def _headers(self, key: str, body: bytes) -> dict[str, str]:
        timestamp = str(int(time.time()))
        headers = {IDEMPOTENCY: key, TIMESTAMP: timestamp}
        if self._settings.http_secret:
            headers[SIGNATURE] = signature_of(self._settings.http_secret, timestamp, body)
        return headers


def verdicts_in(answer: ServiceAnswer, url: str, responses: int, pass_score: float) -> list[Verdict]:
    """What a service's answer says. Raises BadAnswer, ServiceAway, ServiceFailed."""
    require_success(answer, url)
    document = json_object(answer, url)
    scores, details = document.get("scores"), document.get("details", [""] * responses)
    for name, column in (("scores", scores), ("details", details)):
        if not isinstance(column, list):
            raise BadAnswer(f"{url} answered without a list of {name}")
        if len(column) != responses:
            raise BadAnswer(f"{url} answered {len(column)} {name} for {responses} responses")
    if not all(detail is None or isinstance(detail, str) for detail in details):
        raise BadAnswer(f"{url} answered details that are no text")
    return [
        scored(score, f"{url}: scores[{number}]", pass_score, detail or "")
        for number, (score, detail) in enumerate(zip(scores or [], details, strict=True))
    ]


def require_success(answer: ServiceAnswer, url: str) -> None:
    """Raises ServiceAway, ServiceFailed or BadAnswer as the status says."""
    if answer.status == 200:
        return
    said = answer.body[:_SHOWN_BYTES].decode(errors="replace").strip()
    message = f"{url} answered with status {answer.status}: {said}".removesuffix(": ")
    if answer.status in _BUSY:
        raise ServiceAway(message)
    if answer.status >= 500:
        raise ServiceFailed(message)
    raise BadAnswer(message)


def json_object(answer: ServiceAnswer, url: str) -> dict[str, Any]:
    """The body as a JSON object. Raises BadAnswer."""
    try:
        document = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"{url} answered with what is no JSON: {str(error)[:100]}") from None
    if not isinstance(document, dict):
        raise BadAnswer(f"{url} answered with JSON that is no object")
    return document
