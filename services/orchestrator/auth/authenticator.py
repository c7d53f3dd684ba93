"""Who sent a request, by its Authorization header, and whether it comes too often."""

from __future__ import annotations

import base64
import math
import secrets
import time

import redis
from limits import parse
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter

from services.orchestrator.auth.api_keys import PREFIX, KeyStore
from services.orchestrator.auth.oidc import TokenChecker
from services.orchestrator.auth.principals import OPERATOR, Principal
from services.orchestrator.settings import Settings
from spo.errors import InvalidInput
from spo.messaging.redis_client import RedisClient


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
