"""Reward services of people's own: signed batches by guarded POST, circuits for those that fail, and scores that
become verdicts.

POST to an address that a job's owner chose: only where the rules allow, within a deadline, never too long an answer.
Names are resolved once per connection, and the connection goes to the address that was checked. Redirects are not
followed, proxies of the environment not used, answers not unpacked.

The contract is docs/reward_service.openapi.json.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

import httpcore
import httpx

from services.verifier.settings import Settings
from spo.errors import InvalidInput, NotReady
from spo.rpc.pools import AddressRules
from spo.spec.reward import reaches, score_in_range
from spo.v1.verdict_pb2 import Outcome, PartScore, TestSet, Verdict

_LONGEST_REASON = 200

Result = TypeVar("Result")

DETAIL_CHARACTERS = 500
MOST_NAMES = 16
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")

VERSION = 1
TIMESTAMP, SIGNATURE, IDEMPOTENCY = "SPO-Timestamp", "SPO-Signature", "Idempotency-Key"
DEFAULT_SECONDS = 30.0
_BUSY = (408, 425, 429, 503)
_SHOWN_BYTES = 200


class BadAnswer(InvalidInput):
    """What a service answered is none: said by name, tried again, then the responses are set aside; never a score."""

    default_code = "verifier_bad_answer"


class ServiceFailed(NotReady):
    """The service is there and did not do it: an error of its own, or no answer in time."""

    default_code = "verifier_error"


class ServiceAway(NotReady):
    """The service is not there: nobody listens, or it says that it is busy or down."""

    default_code = "verifier_away"


@dataclass(frozen=True)
class ServiceAnswer:
    """What came back."""

    status: int
    body: bytes


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connections to allowed addresses alone."""

    def __init__(self, rules: AddressRules) -> None:
        self._rules = rules
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve, check, connect. Raises InvalidInput, httpcore.ConnectError."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(f"{host}: {error}") from None
        addresses = list(dict.fromkeys(str(facts[4][0]) for facts in found))
        # One inside address among public ones is no accident.
        if refused := [address for address in addresses if not self._rules.reaches(address)]:
            raise InvalidInput(
                f"{host} is {refused[0]}, which is no public address; SPO_VERIFIER_HTTP_NETWORKS may allow it",
                code="address_not_allowed",
            )
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        """As the event loop does."""
        await asyncio.sleep(seconds)


class GuardedPost:
    """Posts bodies; all calls come from one event loop."""

    def __init__(self, rules: AddressRules, max_answer_bytes: int, connections: int) -> None:
        self.rules = rules
        self.max_answer_bytes = max_answer_bytes
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            max_connections=connections,
            keepalive_expiry=30.0,
            network_backend=GuardedBackend(rules),
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], timeout_seconds: float) -> ServiceAnswer:
        """The answer, whatever its status.

        Raises InvalidInput (code "address_not_allowed"), BadAnswer, ServiceAway, ServiceFailed.
        """
        self.rules.require_named(url)
        sent = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._pool.stream(
                    "POST", url, headers=[(name.encode(), value.encode()) for name, value in sent.items()], content=body
                ) as response,
            ):
                return ServiceAnswer(response.status, await self._read(response, url))
        except TimeoutError:
            raise ServiceFailed(f"{url} did not answer within {timeout_seconds:g} s") from None
        except (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout) as error:
            raise ServiceAway(f"{url} cannot be reached: {_reason(error)}") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise ServiceFailed(f"{url} broke off: {_reason(error)}") from None
        except (httpcore.UnsupportedProtocol, ValueError, UnicodeError) as error:
            raise BadAnswer(f"{url} cannot be asked: {_reason(error)}") from None

    async def _read(self, response: httpcore.Response, url: str) -> bytes:
        packed = [value for name, value in response.headers if name.lower() == b"content-encoding"]
        if packed and packed != [b"identity"]:
            raise BadAnswer(f"{url} packed its answer, though only identity was asked for")
        parts, size = [], 0
        async for part in response.aiter_stream():
            parts.append(part)
            size += len(part)
            if size > self.max_answer_bytes:
                raise BadAnswer(f"{url} answered with more than {self.max_answer_bytes} bytes")
        return b"".join(parts)

    async def close(self) -> None:
        """End the connections."""
        await self._pool.aclose()


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_LONGEST_REASON]


@dataclass(frozen=True)
class RetryRule:
    """How often something is tried, and what ends that."""

    attempts: int
    backoff_seconds: float
    failures_to_open: int
    rest_seconds: float
    most_seconds: float = 15.0

    def pause(self, attempt: int) -> float:
        """Seconds before the next attempt: twice as long each time, and never the same for all."""
        return float(min(self.most_seconds, self.backoff_seconds * 2**attempt) * random.uniform(0.5, 1.0))


@dataclass
class Circuit:
    """Of one service: closed while it works; open after failures in a row; then one call tries whether it is back."""

    patience: RetryRule
    _failures: int = field(default=0, init=False)
    _opened_at: float = field(default=0.0, init=False)
    _reason: str = field(default="", init=False)

    async def call(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Ask, and again after a failure. Raises what the last attempt raised, ServiceAway while it is open."""
        for attempt in range(self.patience.attempts):
            self._require_closed()
            try:
                answer = await ask()
            except (ServiceAway, ServiceFailed) as error:
                self._failed(error.message)
                if attempt + 1 == self.patience.attempts:
                    raise
            except BadAnswer:
                # It is there, and answers others as it should.
                self._failures = 0
                if attempt + 1 == self.patience.attempts:
                    raise
            else:
                self._failures = 0
                return answer
            await asyncio.sleep(self.patience.pause(attempt))
        raise AssertionError("unreachable: attempts are at least 1")

    def _require_closed(self) -> None:
        if self._failures < self.patience.failures_to_open:
            return
        left = self._opened_at + self.patience.rest_seconds - time.monotonic()
        if left > 0:
            raise ServiceAway(f"left alone for {left:.0f} s after {self._failures} failures; the last: {self._reason}")
        # Whoever comes meanwhile waits for the outcome of this one call.
        self._opened_at = time.monotonic()

    def _failed(self, reason: str) -> None:
        self._failures += 1
        self._reason = reason
        self._opened_at = time.monotonic()


class Circuits:
    """One per address."""

    def __init__(self, patience: RetryRule, most: int = 1000) -> None:
        self._patience = patience
        self._most = most
        self._known: dict[str, Circuit] = {}

    def of(self, address: str) -> Circuit:
        """The circuit of an address."""
        if len(self._known) >= self._most:
            self._known.clear()
        return self._known.setdefault(address, Circuit(self._patience))


def number_in(value: object, what: str) -> float:
    """A score as it came. Raises BadAnswer unless it is a finite number between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadAnswer(f"{what} is {type(value).__name__}, not a number")
    if (score := score_in_range(value)) is None:
        raise BadAnswer(f"{what} is {str(value)[:40]}, not between 0 and 1")
    return score


def scored(value: object, what: str, pass_score: float, detail: str = "") -> Verdict:
    """The verdict of a number, or of numbers by name, whose mean is the score. Raises BadAnswer."""
    parts: list[PartScore] = []
    if isinstance(value, dict):
        if not 0 < len(value) <= MOST_NAMES or not all(NAME.fullmatch(name) for name in value):
            raise BadAnswer(f"{what} must hold between 1 and {MOST_NAMES} names of letters, digits, '_', '.' and '-'")
        parts = [PartScore(name=name, score=number_in(each, f"{what}.{name}")) for name, each in value.items()]
        score = fmean(part.score for part in parts)
    else:
        score = number_in(value, what)
    right = reaches(score, pass_score)
    outcome = Outcome.OUTCOME_ACCEPTED if right else Outcome.OUTCOME_WRONG_ANSWER
    told = detail or ("" if right else f"score {score:g}; {pass_score or 1.0:g} passes")
    return Verdict(
        outcome=outcome,
        score=score,
        parts=parts,
        detail=told.encode(errors="replace").decode()[:DETAIL_CHARACTERS],
        tests_total=1,
        tests_passed=int(right),
        runs=1,
    )


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
