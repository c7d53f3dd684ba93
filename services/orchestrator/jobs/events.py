"""The history of a job as its readers see it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from spo.messaging.redis_client import StreamEntry


@dataclass(frozen=True)
class JobEvent:
    """One entry of a job's history; seq counts from 1 without gaps."""

    seq: int
    at: str
    actor: str
    kind: str
    body: dict[str, Any]


def event_of(entry: StreamEntry) -> JobEvent:
    """Decode one stream entry."""
    entry_id, fields = entry
    body = json.loads(fields[b"body"])
    if fields[b"kind"] == b"state":
        body = {"from": fields[b"from"].decode() or None, "to": fields[b"to"].decode(), **body}
    return JobEvent(
        seq=int(entry_id.split(b"-")[0]),
        at=fields[b"at"].decode(),
        actor=fields[b"actor"].decode(),
        kind=fields[b"kind"].decode(),
        body=body,
    )
