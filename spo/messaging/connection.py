"""Connecting to Redis within a time limit, with an error that says where it was looked for."""

from __future__ import annotations

import re
import time
from typing import cast

import redis
import redis.sentinel

from spo.errors import InternalError, NotReady, SpoError, Unreachable
from spo.messaging.redis_client import RedisClient
from spo.messaging.redis_url import open_server, parse_redis_url
from spo.observability.logs import get_logger

log = get_logger("redis")

OPERATION_TIMEOUT_SECONDS = 30.0
TELL_SECONDS = 5.0
OLDEST_REDIS = (7, 2)
NO_EVICTION = "noeviction"


def connect(url: str, wait_seconds: float = 30.0) -> RedisClient:
    """Return a client that has answered PING; payloads stay bytes.

    Raises Unreachable naming the address: "redis_unreachable" when the server does not answer in wait_seconds,
    "redis_failover" when its Sentinels name no primary in that time, "redis_refused" at once when it does not take the
    password; InvalidInput (code "bad_redis_url") when the URL is none.
    """
    client = open_client(url, OPERATION_TIMEOUT_SECONDS, connect_seconds=5.0)
    deadline = time.monotonic() + wait_seconds
    told_at = time.monotonic()
    while True:
        try:
            client.ping()
            return client
        except redis.AuthenticationError as error:
            raise Unreachable(
                f"Redis at {public_address(url)} refuses the user or password in SPO_REDIS_URL ({error})",
                code="redis_refused",
            ) from error
        except redis.RedisError as error:
            if time.monotonic() > deadline:
                if isinstance(error, redis.sentinel.MasterNotFoundError):
                    raise _failover(public_address(url), f"for {wait_seconds:g} s") from error
                raise Unreachable(
                    f"Redis at {public_address(url)} did not answer within {wait_seconds:g} s ({error}); "
                    "start it or set SPO_REDIS_URL",
                    code="redis_unreachable",
                ) from error
            if time.monotonic() - told_at > TELL_SECONDS:
                told_at = time.monotonic()
                # Loading its data is among the reasons, and can take minutes.
                log.warning("waiting for Redis", at=public_address(url), reason=str(error), seconds=wait_seconds)
            time.sleep(0.2)


def open_client(url: str, operation_seconds: float, connect_seconds: float) -> RedisClient:
    """A client that has not called the server yet; the one place where a redis.Redis gets the platform's types."""
    return cast(
        RedisClient,
        open_server(
            url, socket_timeout=operation_seconds, socket_connect_timeout=connect_seconds, health_check_interval=15
        ),
    )


def unfit(client: RedisClient) -> str:
    """Why what the platform keeps is not safe in this server, and what to do; "" where it is, or does not say more.

    INFO says it, which managed servers answer where they refuse CONFIG. Raises redis.RedisError where it is away.
    """
    try:
        told = client.info()
    except redis.ResponseError as error:
        return f"it does not answer INFO, which says whether it evicts ({error}): allow it, ACL SETUSER NAME +info"
    version = told.get("valkey_version") or told.get("redis_version", "")
    if (number := version_number(version)) and number < OLDEST_REDIS:
        return f"it is version {version}, and WAITAOF came with 7.2: take Redis 7.2 or newer, or Valkey"
    policy = told.get("maxmemory_policy", NO_EVICTION)
    if policy != NO_EVICTION:
        return (
            f"it evicts keys when its memory is full (maxmemory-policy {policy}), jobs and experience among them: "
            "CONFIG SET maxmemory-policy noeviction, and in its configuration"
        )
    return ""


def version_number(version: str) -> tuple[int, ...]:
    """MAJOR.MINOR; () where it cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def refuses_writes(error: redis.RedisError) -> bool:
    """Whether the server is full: its memory (maxmemory, noeviction) or the disk of its append-only file."""
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "MISCONF" in str(error)


def as_spo_error(error: redis.RedisError) -> SpoError:
    """What a failed command means for the caller of a service: later, where the server is full, away or starting."""
    if refuses_writes(error):
        return NotReady(f"Redis is full and refuses writes: {error}", code="redis_full")
    if isinstance(error, redis.sentinel.MasterNotFoundError):
        return _failover("Redis", f"now ({error})")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return Unreachable(f"Redis did not answer: {error}", code="redis_unreachable")
    return InternalError(f"{type(error).__name__}: {error}")


def public_address(url: str) -> str:
    """The URL without its password, for messages and logs. Raises InvalidInput (code "bad_redis_url")."""
    return parse_redis_url(url).address


def _failover(address: str, since: str) -> Unreachable:
    return Unreachable(
        f"{address}: no Sentinel names a primary that is up, {since}. A failover ends by itself; else SPO_REDIS_URL "
        "names a service that the Sentinels do not watch, or none of them answers",
        code="redis_failover",
    )
