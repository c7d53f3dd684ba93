"""API keys: shown once, stored as a digest, scoped, expiring, revocable."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from dataclasses import asdict, dataclass

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.auth.principals import Principal, Scope
from services.orchestrator.jobs.commit import timestamp
from spo.errors import NotFound
from spo.messaging.control_writes import write_even_when_full
from spo.messaging.redis_client import RedisClient
from spo.spec.stored import record_of

PREFIX = "spo_"
# For so long a key is known without asking Redis, so a revoked one may still work.
REMEMBER_SECONDS = 5.0
MAX_REMEMBERED = 10_000


@dataclass(frozen=True)
class ApiKey:
    """A key as stored: all but the secret. Times are RFC 3339 or empty, expiry is in unix seconds (0: never)."""

    key_id: str
    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    max_active_jobs: int | None
    digest: str
    created_at: str
    expires_unix: int
    revoked_at: str = ""

    @property
    def usable(self) -> bool:
        return not self.revoked_at and (not self.expires_unix or time.time() < self.expires_unix)


class KeyStore:
    """All keys in Redis. A secret has 256 random bits, so an unsalted digest of it is safe to store."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self._remembered: dict[str, tuple[float, Principal | None]] = {}

    def create(
        self,
        name: str,
        tenant: str,
        scopes: tuple[Scope, ...],
        max_active_jobs: int | None = None,
        expires_in_seconds: int | None = None,
    ) -> tuple[ApiKey, str]:
        """Make a key; returns it with its token, which is stored nowhere."""
        key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        token = f"{PREFIX}{key_id}_{secret}"
        expires_unix = int(time.time()) + expires_in_seconds if expires_in_seconds else 0
        key = ApiKey(key_id, name, tenant, scopes, max_active_jobs, _digest(token), timestamp(), expires_unix)
        self.client.hset(own_keys.api_keys(), key_id, json.dumps(asdict(key)))
        return key, token

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key, within REMEMBER_SECONDS everywhere; once more changes nothing. Raises NotFound."""
        key = self.get(key_id)
        if not key.revoked_at:
            key = ApiKey(**{**asdict(key), "revoked_at": timestamp()})
            write_even_when_full(self.client, ("HSET", own_keys.api_keys(), key_id, json.dumps(asdict(key))))
        self._remembered.clear()
        return key

    def get(self, key_id: str) -> ApiKey:
        """The key with this id, usable or not. Raises NotFound."""
        stored = self.client.hget(own_keys.api_keys(), key_id)
        if stored is None:
            raise NotFound("there is no such key", code="key_not_found")
        return _key_of(stored)

    def all(self) -> list[ApiKey]:
        """Every key, oldest first, revoked ones too."""
        stored = self.client.hvals(own_keys.api_keys())
        return sorted(map(_key_of, stored), key=lambda key: (key.created_at, key.key_id))

    def remembered(self, token: str) -> Principal | None:
        """Who holds this token, if that was looked up at most REMEMBER_SECONDS ago; does not ask Redis."""
        remembered = self._remembered.get(_digest(token))
        return remembered[1] if remembered and time.monotonic() < remembered[0] else None

    def principal(self, token: str) -> Principal | None:
        """Who holds this token; None when nobody may use it."""
        digest = _digest(token)
        remembered = self._remembered.get(digest)
        if remembered and time.monotonic() < remembered[0]:
            return remembered[1]
        found = self._look_up(token, digest)
        if len(self._remembered) >= MAX_REMEMBERED:
            # Guessed tokens must not fill the memory.
            self._remembered.clear()
        self._remembered[digest] = (time.monotonic() + REMEMBER_SECONDS, found)
        return found

    def _look_up(self, token: str, digest: str) -> Principal | None:
        key_id = token.removeprefix(PREFIX).partition("_")[0]
        try:
            key = self.get(key_id)
        except NotFound:
            return None
        if not secrets.compare_digest(key.digest, digest) or not key.usable:
            return None
        return Principal(f"key:{key.key_id}", key.tenant, frozenset(key.scopes), key.max_active_jobs)


def _key_of(stored: bytes) -> ApiKey:
    fields = json.loads(stored)
    return record_of(ApiKey, {**fields, "scopes": tuple(fields["scopes"])})


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
