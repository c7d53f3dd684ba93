"""Who asks and what they may: principals and scopes, API keys, OpenID Connect, rate limits, allowed paths, and the
audit log.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import jwt
import redis
from limits import parse
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.commit import timestamp
from services.orchestrator.settings import Settings
from spo.api import SCOPES, AuditRecord, Scope
from spo.errors import FieldViolation, InvalidInput, NotFound
from spo.messaging.redis_client import RedisClient, record_words, write_even_when_full
from spo.observability import get_logger
from spo.spec.section import record_of

READING = ("GET", "HEAD")

# Path, scope to read, scope to change; the first match counts, and a page needs what its REST counterpart needs.
# Other paths need jobs:read to read and jobs:write to change.
_RULES: tuple[tuple[str, Scope, Scope], ...] = (
    (r"(/v1)?/(keys|audit|dead-letters)(/|$)", "admin", "admin"),
    (r"/v1/scale(/|$)", "jobs:read", "admin"),
    (r"/v1/continual(/|$)", "jobs:read", "weights:push"),
    (r"/v1/(chat|completions|models|feedback|messages|responses)(/|$)", "models:query", "models:query"),
    (r"/s/ses_[^/]+(/|$)", "models:query", "models:query"),
    (r"/v1/agents(/|$)", "jobs:read", "agents:run"),
    (r"/v1/capture(/|$)", "trajectories:read", "datasets:write"),
    (r"/v1/served-models(/|$)", "jobs:read", "weights:push"),
    (r"/v1/jobs/[^/]+/weights(/|$)", "jobs:read", "weights:push"),
    (r"(/v1)?/jobs/[^/]+/(trajectories|prompts|dead-letters)(/|$)", "trajectories:read", "jobs:write"),
    (r"(/v1)?/experience(/|$)", "trajectories:read", "datasets:write"),
    (r"/v1/datasets(/|$)", "jobs:read", "datasets:write"),
    (r"/v1/platform(/|$)", "jobs:read", "admin"),
)

# About a year on a busy platform; older entries are trimmed, as the description of /v1/audit says.
KEPT_ENTRIES = 1_000_000

PREFIX = "spo_"
# For so long a key is known without asking Redis, so a revoked one may still work.
REMEMBER_SECONDS = 5.0
MAX_REMEMBERED = 10_000

log = get_logger("auth")

# Asymmetric only: with a shared secret among them, a public key could be used to forge a signature.
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"]
FETCH_SECONDS = 5
REFETCH_SECONDS = 10.0
WAIT_SECONDS = 1.0
KEEP_SECONDS = 300.0


@dataclass(frozen=True)
class Principal:
    """One key or person. `tenant` owns the jobs it submits and sees no others; an admin sees all."""

    name: str
    tenant: str = ""
    scopes: frozenset[Scope] = field(default_factory=frozenset)
    max_active_jobs: int | None = None

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes

    @property
    def sees_tenant(self) -> str | None:
        """The only tenant whose jobs it may see; None: every tenant's."""
        return None if self.is_admin else self.tenant

    def may(self, scope: Scope) -> bool:
        """Whether it has the scope; an admin has all."""
        return self.is_admin or scope in self.scopes

    def check(self, method: str, path: str) -> None:
        """Raises InvalidInput (code "forbidden", HTTP 403) naming the scope that is missing."""
        needed = needed_scope(method, path)
        if not self.may(needed):
            raise InvalidInput(f"this key lacks the scope {needed}", code="forbidden")


def needed_scope(method: str, path: str) -> Scope:
    """The scope that a request needs."""
    for pattern, to_read, to_change in _RULES:
        if re.match(pattern, path):
            return to_read if method in READING else to_change
    return "jobs:read" if method in READING else "jobs:write"


# Who has the configured key, and everybody on loopback where none is configured.
OPERATOR = Principal("operator", scopes=SCOPES)


def require_within(folders: Sequence[Path], named: Mapping[str, str | None]) -> None:
    """Refuse paths outside the folders, after following links; `named` maps JSON pointers of fields to paths.

    Raises InvalidInput (code "invalid_job_spec"), whether the file exists or not, so that nobody can probe for files.
    """
    opened = [folder.resolve() for folder in folders]
    outside = [
        pointer
        for pointer, path in named.items()
        if path is not None and not any(_resolved(path).is_relative_to(folder) for folder in opened)
    ]
    if not outside:
        return
    message = f"this key may name files in {', '.join(map(str, folders)) or 'no folder'} only"
    raise InvalidInput(
        message, code="invalid_job_spec", violations=tuple(FieldViolation(pointer, message) for pointer in outside)
    )


def _resolved(path: str) -> Path:
    try:
        return Path(path).resolve()
    except (OSError, ValueError, RuntimeError):
        # A NUL byte or a circle of links leads nowhere, so not into a folder.
        return Path("/")


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


class TokenChecker:
    """Accepts tokens of one issuer for one audience; scopes and tenant are read from claims."""

    def __init__(self, issuer: str, audience: str, tenant_claim: str) -> None:
        self.issuer = issuer.rstrip("/")
        self.audience = audience
        self.tenant_claim = tenant_claim
        self._lock = threading.Lock()
        self._place: jwt.PyJWKClient | None = None
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at = float("-inf")

    def principal(self, token: str) -> Principal | None:
        """Who the token names; None, with a log line, when it is not valid or the provider does not answer."""
        try:
            key = self._key(str(jwt.get_unverified_header(token).get("kid", "")))
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self.audience,
                issuer=self.issuer,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (jwt.PyJWTError, httpx.HTTPError, LookupError, ValueError, TypeError) as error:
            log.warning("a bearer token was refused", reason=f"{type(error).__name__}: {error}"[:200])
            return None
        granted = claims.get("scope", "")
        words = granted.split() if isinstance(granted, str) else []
        tenant = claims.get(self.tenant_claim, "")
        if not isinstance(tenant, str) or not tenant:
            log.warning("a bearer token names no tenant", claim=self.tenant_claim)
            return None
        return Principal(f"oidc:{claims['sub']}"[:200], tenant, frozenset(scope for scope in SCOPES if scope in words))

    def _key(self, kid: str) -> jwt.PyJWK:
        """The provider's key of this id. Raises LookupError, and what a fetch raises.

        Anyone can write any id into a token, so the provider is asked at most every REFETCH_SECONDS, whether it answers
        or not, by one thread, and nobody waits long for that thread. Its keys are asked for again after KEEP_SECONDS.
        """
        if kid in self._keys and time.monotonic() - self._fetched_at < KEEP_SECONDS:
            return self._keys[kid]
        if self._lock.acquire(timeout=WAIT_SECONDS):
            try:
                age = time.monotonic() - self._fetched_at
                if age >= KEEP_SECONDS or (kid not in self._keys and age >= REFETCH_SECONDS):
                    self._fetched_at = time.monotonic()
                    self._keys = {str(key.key_id): key for key in self._published().get_signing_keys(refresh=True)}
            finally:
                self._lock.release()
        if kid not in self._keys:
            raise LookupError("the provider published no such key when it was last asked")
        return self._keys[kid]

    def _published(self) -> jwt.PyJWKClient:
        if self._place is None:
            place = f"{self.issuer}/.well-known/openid-configuration"
            document = httpx.get(place, timeout=FETCH_SECONDS, trust_env=False).raise_for_status().json()
            if document["issuer"].rstrip("/") != self.issuer:
                raise ValueError("the provider calls itself by another name")
            self._place = jwt.PyJWKClient(document["jwks_uri"], cache_jwk_set=False, timeout=FETCH_SECONDS)
        return self._place


class Authenticator:
    """Checks tokens against the configured key, the stored keys and, if there is one, the identity provider."""

    def __init__(self, settings: Settings, client: RedisClient) -> None:
        self.keys = KeyStore(client)
        self._operator_key = settings.api_key.get_secret_value() if settings.api_key else None
        self._tokens = (
            TokenChecker(settings.oidc_issuer, settings.oidc_audience, settings.oidc_tenant_claim)
            if settings.oidc_issuer
            else None
        )

    def known(self, authorization: str) -> Principal | None:
        """Who asks, where that is known without Redis or the provider; None where `principal` must ask them."""
        if self._operator_key is None:
            return OPERATOR
        token = _token(authorization)
        if token and secrets.compare_digest(token.encode(), self._operator_key.encode()):
            return OPERATOR
        return self.keys.remembered(token) if token.startswith(PREFIX) else None

    def principal(self, authorization: str) -> Principal:
        """Who asks. May ask Redis or the provider. Raises InvalidInput (code "unauthorized")."""
        found = self.known(authorization)
        token = _token(authorization)
        if found is None and token.startswith(PREFIX):
            found = self.keys.principal(token)
        elif found is None and token and self._tokens:
            found = self._tokens.principal(token)
        if found is None:
            raise InvalidInput("an API key is needed: Authorization: Bearer <key>", code="unauthorized")
        return found

    def admits(self, authorization: str) -> bool:
        """Whether a header that was accepted before still would be; True while Redis does not answer."""
        try:
            self.principal(authorization)
        except InvalidInput:
            return False
        except redis.RedisError:
            return True
        return True


class RateLimit:
    """So many requests of one principal in a moving window, counted in this process (there is one orchestrator)."""

    def __init__(self, limit: str) -> None:
        self._limit = parse(limit)
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    async def seconds_to_wait(self, principal: str) -> int:
        """0 when the request may pass, else the seconds until the next one may."""
        if await self._limiter.hit(self._limit, principal):
            return 0
        window = await self._limiter.get_window_stats(self._limit, principal)
        return max(1, math.ceil(window.reset_time - time.time()))


def _token(authorization: str) -> str:
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    # Browsers can only be asked for Basic: the key is then its password.
    return _basic_password(credentials) if scheme.lower() == "basic" else ""


def _basic_password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        # No base 64, or no text in it.
        return ""
