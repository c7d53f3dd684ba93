"""Records that are kept for people to read, the newest so many of them: audit entries, log lines.

Not work: nobody consumes them, so trimming loses nothing that is owed. Work travels by `spo.messaging.streams`.
"""

from __future__ import annotations

from collections.abc import Mapping

from spo.messaging.redis_client import RedisClient, RedisPipeline


def append_record(client: RedisClient | RedisPipeline, stream: str, fields: Mapping[str, str | int], keep: int) -> None:
    """Append one record (also to a pipeline) and let go of those beyond about `keep`."""
    client.xadd(stream, fields, maxlen=keep, approximate=True)


def record_words(stream: str, fields: Mapping[str, str | int], keep: int) -> list[str | int]:
    """The command of append_record, for a log that goes on while Redis is full."""
    return ["XADD", stream, "MAXLEN", "~", keep, "*", *(word for field in fields.items() for word in field)]
