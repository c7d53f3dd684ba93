"""Redis' append-only file after its disk was full: written anew, because it may have a hole that no restart survives.

A server that has rewritten its file since it started goes on in one that it did not open for appending. After a write
that found no room it cuts the file back, but the next one lands behind the cut: the bytes between are zeros, and the
server refuses to load such a file. Seen with Valkey 9.1; harmless where it does not happen.
"""

from __future__ import annotations

import time

import redis

from services.orchestrator.jobs.commit import without_append_only_file
from spo.errors import PreconditionFailed
from spo.messaging.redis_client import RedisClient, ServerFacts
from spo.observability.logs import get_logger

log = get_logger("append_only_file")

AGAIN_SECONDS = 30.0


def require_append_only_file(client: RedisClient, address: str, *, accept_none: bool) -> None:
    """Raises PreconditionFailed (code "no_append_only_file") where Redis keeps none, unless that is accepted.

    INFO says it, which managed servers answer where they refuse CONFIG. PreconditionFailed (code "redis_unfit") where
    WAITAOF, which says that a write is in the file, is not allowed.
    """
    if client.info("persistence").get("aof_enabled"):
        if not accept_none:
            _require_waitaof(client, address)
        return
    if not accept_none:
        raise without_append_only_file(address)
    log.warning(
        "Redis keeps no append-only file, as was accepted: a crash of it loses what was acknowledged", at=address
    )


def _require_waitaof(client: RedisClient, address: str) -> None:
    try:
        with client.pipeline(transaction=False) as pipe:
            pipe.execute_command("WAITAOF", 0, 0, 0)
            pipe.execute()
    except redis.ResponseError as error:
        raise PreconditionFailed(
            f"Redis at {address} is not fit for the platform: it does not answer WAITAOF, by which an accepted job is "
            f"known to outlive a crash ({error}): allow it, ACL SETUSER NAME +waitaof, or accept the loss with "
            "SPO_ORCHESTRATOR_DURABLE_WRITES=false",
            code="redis_unfit",
        ) from error


class AppendOnlyFile:
    """Has the file rewritten once after each time that the server could not write it."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self._refusals = 0
        self._due = False
        self._asked_at = float("-inf")

    def look(self) -> None:
        """One round; begins a rewrite where one is due. Raises redis.RedisError."""
        facts = self.client.info("persistence", "errorstats")
        if not facts.get("aof_enabled"):
            return
        # Counted by the server for as long as it runs: also what came and went between two looks.
        refusals = int(facts.get("errorstat_MISCONF", {}).get("count", 0))
        if refusals > self._refusals or facts["aof_last_write_status"] != "ok":
            self._due, self._asked_at = True, float("-inf")
        self._refusals = refusals
        if not self._due or facts["aof_last_write_status"] != "ok" or _is_rewriting(facts):
            return
        if self._asked_at > 0 and facts["aof_last_bgrewrite_status"] == "ok":
            self._due = False
            log.info("the append-only file of Redis is whole again")
        elif time.monotonic() - self._asked_at > AGAIN_SECONDS:
            self._asked_at = time.monotonic()
            log.warning("Redis could not write its append-only file for a while; it is written anew")
            with self.client.pipeline(transaction=False) as pipe:
                pipe.execute_command("BGREWRITEAOF")
                pipe.execute()


def _is_rewriting(facts: ServerFacts) -> bool:
    return bool(facts["aof_rewrite_in_progress"] or facts["aof_rewrite_scheduled"])
