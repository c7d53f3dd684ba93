"""Bearer tokens of an OpenID Connect provider, checked by PyJWT against the provider's published keys."""

from __future__ import annotations

from typing import Any

import httpx
import jwt

from services.orchestrator.access.callers import SCOPES, Caller
from spo.logs import get_logger

log = get_logger("tokens")

# Asymmetric only: with a shared secret among them, a public key could be used to forge a signature.
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"]
FETCH_SECONDS = 5


class TokenChecker:
    """Accepts tokens of one issuer for one audience; scopes and tenant are read from claims."""

    def __init__(self, issuer: str, audience: str, tenant_claim: str) -> None:
        self.issuer = issuer.rstrip("/")
        self.audience = audience
        self.tenant_claim = tenant_claim
        self._keys: jwt.PyJWKClient | None = None

    def caller(self, token: str) -> Caller | None:
        """Who the token names; None when it is not valid here, or the provider does not answer (logged)."""
        try:
            key = self._published_keys().get_signing_key_from_jwt(token)
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self.audience,
                issuer=self.issuer,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (jwt.PyJWTError, httpx.HTTPError, KeyError, ValueError) as error:
            log.warning("a bearer token was refused", reason=f"{type(error).__name__}: {error}"[:200])
            return None
        granted = claims.get("scope", "")
        words = granted.split() if isinstance(granted, str) else []
        tenant = claims.get(self.tenant_claim, "")
        if not isinstance(tenant, str) or not tenant:
            log.warning("a bearer token names no tenant", claim=self.tenant_claim)
            return None
        return Caller(f"oidc:{claims['sub']}"[:200], tenant, frozenset(scope for scope in SCOPES if scope in words))

    def _published_keys(self) -> jwt.PyJWKClient:
        if self._keys is None:
            place = f"{self.issuer}/.well-known/openid-configuration"
            document = httpx.get(place, timeout=FETCH_SECONDS, trust_env=False).raise_for_status().json()
            if document["issuer"].rstrip("/") != self.issuer:
                raise ValueError("the provider calls itself by another name")
            self._keys = jwt.PyJWKClient(document["jwks_uri"], cache_keys=True, timeout=FETCH_SECONDS)
        return self._keys
