"""The latest log lines of a job, from every service that worked on it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.http.dependencies import ContextOf, JobId, Limit
from services.orchestrator.replicas.registry import POOLS

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

LEVELS = ("debug", "info", "warning", "error", "critical")
MAX_SCANNED = 20_000
SCAN = 1000


class LogLine(BaseModel):
    """`fields` is the structured line, redacted when it was written."""

    service: str
    replica_id: str
    level: str
    at_unix_ms: int
    fields: dict[str, Any]


class LogPage(BaseModel):
    items: list[LogLine]
    next_cursor: str | None


@router.get("/{job_id}/logs")
def logs(
    context: ContextOf,
    job_id: JobId,
    service: Annotated[str, Query(pattern=f"^({'|'.join(POOLS)})?$")] = "",
    level: Literal["debug", "info", "warning", "error"] = "info",
    limit: Limit = 200,
    cursor: Annotated[str, Query(pattern=r"^(\d{1,16}-\d{1,16})?$")] = "",
) -> LogPage:
    """Lines of at least this level, newest first; the latest 20,000 of a job are kept."""
    context.jobs.state(job_id)
    levels = LEVELS[LEVELS.index(level) :]
    found: list[LogLine] = []
    scanned, newest = 0, f"({cursor}" if cursor else "+"
    while scanned < MAX_SCANNED:
        entries = context.redis.xrevrange(own_keys.job_logs(job_id), max=newest, count=SCAN)
        for entry_id, fields in entries:
            line = _line(fields)
            if line.level in levels and service in ("", line.service):
                found.append(line)
                if len(found) == limit:
                    return LogPage(items=found, next_cursor=entry_id.decode())
        if len(entries) < SCAN:
            break
        scanned += len(entries)
        newest = f"({entries[-1][0].decode()}"
    return LogPage(items=found, next_cursor=None)


def _line(fields: dict[bytes, bytes]) -> LogLine:
    text = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
    try:
        parsed = json.loads(text["line"])
    except ValueError:
        # Cut at the limit of a line.
        parsed = {"event": text["line"]}
    return LogLine(
        service=text["service"],
        replica_id=text["replica_id"],
        level="warning" if text["level"] == "warn" else "error" if text["level"] == "exception" else text["level"],
        at_unix_ms=int(text["at_unix_ms"]),
        fields=parsed if isinstance(parsed, dict) else {"event": parsed},
    )
