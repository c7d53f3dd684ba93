"""The platform's own part of the SDK: replicas to wish for, API keys, the audit log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spo import errors

Ask = Callable[..., Any]


class AsyncPlatformCalls:
    """What operators ask; keys and the audit log need the scope admin."""

    def __init__(self, ask: Ask, entries: Ask) -> None:
        self._ask = ask
        self._entries = entries

    async def scale(self) -> dict[str, Any]:
        """Wished and live replicas of each pool, with bounds."""
        found: dict[str, Any] = await self._ask("GET", "/v1/scale")
        return found

    async def requested(self, **replicas: int) -> dict[str, Any]:
        """Ask for so many replicas: inference=3, sandbox_judge=2. Raises InvalidInput by field."""
        pools = {pool.replace("_", "-"): count for pool, count in replicas.items()}
        found: dict[str, Any] = await self._ask("PUT", "/v1/scale", json=pools)
        return found

    async def create_key(
        self,
        name: str,
        tenant: str,
        scopes: Sequence[str],
        max_active_jobs: int | None = None,
        expires_in_seconds: int | None = None,
    ) -> dict[str, Any]:
        """A new API key; its `token` is in this answer and nowhere else."""
        body = {
            "name": name,
            "tenant": tenant,
            "scopes": list(scopes),
            "max_active_jobs": max_active_jobs,
            "expires_in_seconds": expires_in_seconds,
        }
        found: dict[str, Any] = await self._ask("POST", "/v1/keys", json=body, repeatable=False)
        return found

    async def keys(self) -> list[dict[str, Any]]:
        """Every API key, revoked ones too, without secrets."""
        found: dict[str, Any] = await self._ask("GET", "/v1/keys")
        return list(found["items"])

    async def revoke_key(self, key_id: str) -> dict[str, Any]:
        """Make a key useless, within five seconds. Raises NotFound."""
        found: dict[str, Any] = await self._ask("DELETE", f"/v1/keys/{key_id}")
        return found

    async def audit(self, limit: int = 100) -> list[dict[str, Any]]:
        """Changes and refusals, newest first."""
        found: list[dict[str, Any]] = await self._entries("/v1/audit", {}, limit)
        return found

    async def version(self) -> dict[str, Any]:
        """The orchestrator's version."""
        found: dict[str, Any] = await self._ask("GET", "/version")
        return found

    async def is_ready(self) -> bool:
        """Whether the platform takes requests now; false while it drains or lacks Redis."""
        try:
            await self._ask("GET", "/readyz", patience_seconds=0)
        except errors.NotReady:
            return False
        return True

    async def is_alive(self) -> bool:
        """Whether the orchestrator answers at all. Raises Unreachable when it does not."""
        return bool(await self._ask("GET", "/healthz"))

    async def prometheus(self) -> str:
        """The orchestrator's metrics in Prometheus' text format."""
        found: str = await self._ask("GET", "/metrics")
        return found
