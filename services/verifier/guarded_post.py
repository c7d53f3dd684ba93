"""POST to an address that a job's owner chose: only where the rules allow, within a deadline, never too long an answer.

Names are resolved once per connection, and the connection goes to the address that was checked. Redirects are not
followed, proxies of the environment not used, answers not unpacked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpcore
import httpx

from spo.errors import InvalidInput, NotReady
from spo.rpc.address_rules import AddressRules

_LONGEST_REASON = 200


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
