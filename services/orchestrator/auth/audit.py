"""The audit log: who changed what and when, and who was refused. Paths and statuses only, never bodies."""

from __future__ import annotations

from pydantic import BaseModel

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import timestamp
from spo.messaging.capped_log import record_words
from spo.messaging.control_writes import write_even_when_full
from spo.messaging.redis_client import RedisClient

# About a year on a busy platform; older entries are trimmed, as the description of /v1/audit says.
KEPT_ENTRIES = 1_000_000


class AuditRecord(BaseModel):
    """One request that changed something or was refused."""

    entry_id: str
    at: str
    principal: str
    tenant: str
    method: str
    path: str
    status: int
    request_id: str


class AuditLog:
    """The log as a stream in Redis, appended to and trimmed, never changed."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client

    def record(self, principal: str, tenant: str, method: str, path: str, status: int, request_id: str) -> None:
        """Append one entry."""
        fields: dict[str, str | int] = {
            "at": timestamp(),
            "principal": principal,
            "tenant": tenant,
            "method": method,
            "path": path[:500],
            "status": status,
            "request_id": request_id,
        }
        # Who deleted what while Redis was full is what people will look for.
        write_even_when_full(self.client, record_words(own_keys.audit_log(), fields, KEPT_ENTRIES))

    def page(self, cursor: str, limit: int) -> tuple[list[AuditRecord], str | None]:
        """Entries, newest first, and where the next page begins."""
        newest = f"({cursor}" if cursor else "+"
        found = self.client.xrevrange(own_keys.audit_log(), max=newest, count=limit)
        entries = [_entry(entry_id.decode(), fields) for entry_id, fields in found]
        return entries, entries[-1].entry_id if len(entries) == limit else None


def _entry(entry_id: str, fields: dict[bytes, bytes]) -> AuditRecord:
    words = {name.decode(): value.decode() for name, value in fields.items()}
    return AuditRecord.model_validate({"entry_id": entry_id, **words})
