"""The platform's own part of the SDK: replicas to wish for, API keys, the audit log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Ask = Callable[..., Any]


class PlatformCalls:
    """What operators ask; keys and the audit log need the scope admin."""

    def __init__(self, ask: Ask, entries: Callable[[str, dict[str, Any], int], list[dict[str, Any]]]) -> None:
        self._ask = ask
        self._entries = entries

    def scale(self) -> dict[str, Any]:
        """Wished and live replicas of each pool, with bounds."""
        found: dict[str, Any] = self._ask("GET", "/v1/scale")
        return found

    def wish(self, **replicas: int) -> dict[str, Any]:
        """Ask for so many replicas: inference=3, sandbox_judge=2. Raises InvalidInput by field."""
        pools = {pool.replace("_", "-"): count for pool, count in replicas.items()}
        found: dict[str, Any] = self._ask("PUT", "/v1/scale", json=pools)
        return found

    def create_key(
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
        found: dict[str, Any] = self._ask("POST", "/v1/keys", json=body)
        return found

    def keys(self) -> list[dict[str, Any]]:
        """Every API key, revoked ones too, without secrets."""
        return list(self._ask("GET", "/v1/keys")["items"])

    def revoke_key(self, key_id: str) -> dict[str, Any]:
        """Make a key useless, within five seconds. Raises NotFound."""
        found: dict[str, Any] = self._ask("DELETE", f"/v1/keys/{key_id}")
        return found

    def audit(self, limit: int = 100) -> list[dict[str, Any]]:
        """Changes and refusals, newest first."""
        return self._entries("/v1/audit", {}, limit)
