"""Joining the platform: what every service asks of Redis before it does anything else.

The schema of what services keep in Redis and exchange on streams has a version, MAJOR.MINOR. Fields, keys and streams
are added under the same major number, and each release reads what the others of that number wrote; a change that they
would misread raises it. The version in Redis is that of the newest release that ever joined.
"""

from __future__ import annotations

import time
from typing import cast

from spo import redis_keys
from spo.errors import PreconditionFailed, Unreachable
from spo.messaging.connection import connect, public_address, unfit
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger
from spo.service.settings import PlatformSettings

log = get_logger("join")

SCHEMA = (1, 0)
POLL_SECONDS = 0.5

# KEYS: the platform's hash.  ARGV: this release's schema.  Keeps the newer of the two, and returns what was there, ''
# on a Redis that has none. A release of another major number changes nothing.
_JOIN = """#!lua flags=allow-oom
local found = redis.call('HGET', KEYS[1], 'schema_version')
local own_major, own_minor = string.match(ARGV[1], '^(%d+)%.(%d+)$')
if not found then redis.call('HSET', KEYS[1], 'schema_version', ARGV[1]) return '' end
local major, minor = string.match(found, '^(%d+)%.(%d+)$')
if tonumber(own_major) == tonumber(major) and tonumber(own_minor) > tonumber(minor) then
  redis.call('HSET', KEYS[1], 'schema_version', ARGV[1])
end
return found
"""


def join_platform(settings: PlatformSettings, schema: tuple[int, int] = SCHEMA) -> RedisClient:
    """Connect once Redis answers, has loaded its data and takes writes; check that this release may work on them.

    Raises Unreachable when Redis was not ready within redis_wait_seconds, and PreconditionFailed: "redis_unfit" when it
    evicts, is too old or hides which, "newer_schema" when a later release has changed what is stored there.
    """
    deadline = time.monotonic() + settings.redis_wait_seconds
    client = connect(settings.redis_url, settings.redis_wait_seconds)
    require_fit(client, public_address(settings.redis_url))
    _await_primary(client, settings, deadline)
    require_schema(client, public_address(settings.redis_url), schema)
    return client


def require_fit(client: RedisClient, address: str) -> None:
    """Raises PreconditionFailed (code "redis_unfit") where this server would lose what it is given."""
    if reason := unfit(client):
        raise PreconditionFailed(f"Redis at {address} is not fit for the platform: {reason}", code="redis_unfit")


def require_schema(client: RedisClient, address: str, schema: tuple[int, int] = SCHEMA) -> None:
    """Raises PreconditionFailed (code "newer_schema") unless this release may work on what Redis holds."""
    own = f"{schema[0]}.{schema[1]}"
    found = cast(bytes, client.eval(_JOIN, 1, redis_keys.platform(), own)).decode()
    if found and int(found.partition(".")[0]) > schema[0]:
        raise PreconditionFailed(
            f"Redis at {address} holds schema {found}, and this release knows {schema[0]}.x at most: start the release "
            "that wrote it, or a later one, or restore the backup from before that upgrade",
            code="newer_schema",
        )


def _await_primary(client: RedisClient, settings: PlatformSettings, deadline: float) -> None:
    """A replica refuses writes until it is promoted."""
    told = False
    while client.info("replication").get("role") == "slave":
        reason = f"Redis at {public_address(settings.redis_url)} is a replica, which takes no writes until promoted"
        if time.monotonic() > deadline:
            raise Unreachable(f"{reason}; waited {settings.redis_wait_seconds:g} s", code="redis_unreachable")
        if not told:
            log.warning("waiting for Redis", reason=reason, seconds=settings.redis_wait_seconds)
        told = True
        time.sleep(POLL_SECONDS)
