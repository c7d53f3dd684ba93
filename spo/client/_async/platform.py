"""The platform's own part of the SDK: replicas, API keys, the audit log, whether it is up."""

from __future__ import annotations

from collections.abc import Sequence

from spo import errors
from spo.client._async.connection import AsyncConnection
from spo.client.models import (
    AttentionEntry,
    AttentionList,
    AuditPage,
    AuditRecord,
    Key,
    Keys,
    NewKey,
    PlatformView,
    RebuiltJob,
    RebuiltJobs,
    ScaleView,
    Version,
)


class AsyncPlatformCalls:
    """What operators ask; keys and the audit log need the scope admin."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def scale(self) -> ScaleView:
        """Desired and live replicas of each pool, with bounds."""
        return await self._connection.ask(ScaleView, "GET", "/v1/scale")

    async def set_scale(self, **replicas: int) -> ScaleView:
        """Ask for so many replicas: inference=3, sandbox_judge=2. Raises InvalidInput with a pointer per pool."""
        pools = {pool.replace("_", "-"): count for pool, count in replicas.items()}
        return await self._connection.ask(ScaleView, "PUT", "/v1/scale", json=pools)

    async def attention(self) -> list[AttentionEntry]:
        """What is wrong now and what to do about it, errors first."""
        return (await self._connection.ask(AttentionList, "GET", "/v1/attention")).items

    async def create_key(
        self,
        name: str,
        tenant: str,
        scopes: Sequence[str],
        max_active_jobs: int | None = None,
        expires_in_seconds: int | None = None,
    ) -> NewKey:
        """Make an API key; its `token` is in this answer and nowhere else. Raises InvalidInput."""
        body = {
            "name": name,
            "tenant": tenant,
            "scopes": list(scopes),
            "max_active_jobs": max_active_jobs,
            "expires_in_seconds": expires_in_seconds,
        }
        return await self._connection.ask(NewKey, "POST", "/v1/keys", json=body, repeatable=False)

    async def keys(self) -> list[Key]:
        """Every API key, revoked ones too, without secrets."""
        return (await self._connection.ask(Keys, "GET", "/v1/keys")).items

    async def revoke_key(self, key_id: str) -> Key:
        """Make a key useless, within five seconds. Raises NotFound."""
        return await self._connection.ask(Key, "DELETE", f"/v1/keys/{key_id}")

    async def audit(self, limit: int = 100) -> list[AuditRecord]:
        """Changes and refusals, newest first."""
        return await self._connection.pages(AuditPage, "/v1/audit", {}, limit)

    async def describe(self) -> PlatformView:
        """Which platform this is, what it lost, and the jobs whose records are gone."""
        return await self._connection.ask(PlatformView, "GET", "/v1/platform")

    async def rebuild(self, job_ids: Sequence[str] | None = None, *, resume: bool = False) -> list[RebuiltJob]:
        """Make the records of lost jobs again, by default of all, and acknowledge the loss. Raises InvalidInput."""
        body = {"job_ids": None if job_ids is None else list(job_ids), "resume": resume}
        return (await self._connection.ask(RebuiltJobs, "POST", "/v1/platform/rebuild", json=body)).items

    async def version(self) -> Version:
        """The orchestrator's release."""
        return await self._connection.ask(Version, "GET", "/version")

    async def is_ready(self) -> bool:
        """Whether the platform takes requests now; false while it drains or lacks Redis, or does not answer."""
        try:
            await self._connection.content("GET", "/readyz", patience_seconds=0)
        except errors.NotReady:
            return False
        return True

    async def is_alive(self) -> bool:
        """Whether the orchestrator answers at all. Raises Unreachable when it does not."""
        return bool(await self._connection.content("GET", "/healthz"))

    async def prometheus(self) -> str:
        """The orchestrator's metrics in Prometheus' text format."""
        return str(await self._connection.content("GET", "/metrics"))
