"""The latest log lines of a job, from every service that worked on it, as people read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from services.orchestrator import redis_keys as own_keys
from services.orchestrator import schemas
from services.orchestrator.container import AppContext

LogLevel = Literal["debug", "info", "warning", "error"]
LEVELS = ("debug", "info", "warning", "error", "critical")
# A filter that matches next to nothing reads so many lines of a page before it ends.
MAX_SCANNED = 20_000
SCAN = 1000


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted: of at least a level, of one service or (empty) of all."""

    service: str = ""
    level: LogLevel = "info"

    def takes(self, line: schemas.LogLine) -> bool:
        return line.level in LEVELS[LEVELS.index(self.level) :] and self.service in ("", line.service)


def logs(context: AppContext, job_id: str, wanted: LogFilter, limit: int, cursor: str) -> schemas.LogPage:
    """A page of lines, newest first. Raises NotFound."""
    context.jobs.state(job_id)
    found: list[schemas.LogLine] = []
    scanned, newest = 0, f"({cursor}" if cursor else "+"
    while scanned < MAX_SCANNED:
        entries = context.redis.xrevrange(own_keys.job_logs(job_id), max=newest, count=SCAN)
        for entry_id, fields in entries:
            line = _line(fields)
            if wanted.takes(line):
                found.append(line)
                if len(found) == limit:
                    return schemas.LogPage(items=found, next_cursor=entry_id.decode())
        if len(entries) < SCAN:
            break
        scanned += len(entries)
        newest = f"({entries[-1][0].decode()}"
    return schemas.LogPage(items=found, next_cursor=None)


def _line(fields: dict[bytes, bytes]) -> schemas.LogLine:
    text = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
    try:
        parsed = json.loads(text["line"])
    except ValueError:
        # Cut off: the line was longer than a line may be.
        parsed = {"event": text["line"]}
    return schemas.LogLine(
        service=text["service"],
        replica_id=text["replica_id"],
        level="warning" if text["level"] == "warn" else "error" if text["level"] == "exception" else text["level"],
        at_unix_ms=int(text["at_unix_ms"]),
        fields=parsed if isinstance(parsed, dict) else {"event": parsed},
    )
