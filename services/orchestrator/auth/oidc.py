"""Bearer tokens of an OpenID Connect provider, checked by PyJWT against the provider's published keys."""

from __future__ import annotations

import threading
import time

import httpx
import jwt

from services.orchestrator.auth.principals import SCOPES, Principal
from spo.observability.logs import get_logger

log = get_logger("oidc")

# Asymmetric only: with a shared secret among them, a public key could be used to forge a signature.
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"]
FETCH_SECONDS = 5
REFETCH_SECONDS = 10.0
WAIT_SECONDS = 1.0
KEEP_SECONDS = 300.0


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
