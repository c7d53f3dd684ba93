"""How much waits on a stream, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spo.messaging.redis_client import GroupState, RedisClient


@dataclass(frozen=True)
class StreamDepth:
    """lag: entries no consumer has seen; pending: entries delivered and not finished."""

    lag: int
    pending: int


def depth(client: RedisClient, stream: str, group: str) -> StreamDepth:
    """How much work waits on a stream for a group; zeros when the stream does not exist yet."""
    return depths(client, [(stream, group)])[0]


def depths(client: RedisClient, wanted: Sequence[tuple[str, str]]) -> list[StreamDepth]:
    """The depths of several (stream, group) in one round trip."""
    with client.pipeline(transaction=False) as pipe:
        for stream, _ in wanted:
            pipe.xlen(stream)
            pipe.xinfo_groups(stream)
        # XINFO of a stream that does not exist yet is an error, in its place among the replies.
        replies = pipe.execute(raise_on_error=False)
    found = zip(wanted, replies[::2], replies[1::2], strict=True)
    return [_depth(length, groups, group) for (_, group), length, groups in found]


def _depth(length: int | Exception, groups: list[GroupState] | Exception, group: str) -> StreamDepth:
    if isinstance(length, Exception):
        raise length
    for facts in [] if isinstance(groups, Exception) else groups:
        if facts["name"] == group.encode():
            lag = facts.get("lag")
            return StreamDepth(lag=length if lag is None else int(lag), pending=int(facts["pending"]))
    return StreamDepth(lag=length, pending=0)


def oldest_unix_ms(client: RedisClient, stream: str) -> int | None:
    """When the oldest entry that is not finished was appended, by the server's clock; None when nothing waits."""
    first = client.xrange(stream, count=1)
    return int(first[0][0].split(b"-")[0]) if first else None
