"""How many replicas a pool should have: requested here, carried out by whatever starts processes.

local       the launcher of `spo up` follows the numbers in Redis
kubernetes  the number goes to the Deployment, or becomes the lower bound of its KEDA ScaledObject
none        nothing here starts processes: a request is refused
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from services.orchestrator.settings import Settings
from spo import redis_keys
from spo.errors import FieldViolation, InvalidInput, PreconditionFailed, Unreachable
from spo.messaging.control_writes import write_even_when_full
from spo.messaging.redis_client import RedisClient
from spo.observability.logs import get_logger

log = get_logger("scale")

SCALABLE = ("inference", "sandbox-judge", "verifier")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SECONDS = 10


class Scaler(Protocol):
    """Carries out requests for replicas."""

    def desired(self, pool: str) -> int:
        """The number of replicas requested last."""

    def scale(self, pool: str, replicas: int) -> None:
        """Request so many replicas. Raises Unreachable."""


class LocalScaler:
    """Requested numbers in Redis; every pool begins with one replica."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client

    def desired(self, pool: str) -> int:
        stored = self.client.hget(redis_keys.scale(), pool)
        return int(stored or 1)

    def scale(self, pool: str, replicas: int) -> None:
        write_even_when_full(self.client, ("HSET", redis_keys.scale(), pool, replicas))


class KubernetesScaler:
    """Patches the scale of one Deployment per pool, or the bound of its ScaledObject; needs a Role for just these."""

    def __init__(self, settings: Settings, account: Path = ACCOUNT) -> None:
        self._settings = settings
        self._account = account

    def desired(self, pool: str) -> int:
        found = self._ask("GET", self._path(pool))
        return int(found["spec"].get("minReplicaCount" if self._settings.scale_keda else "replicas", 0))

    def scale(self, pool: str, replicas: int) -> None:
        field = "minReplicaCount" if self._settings.scale_keda else "replicas"
        self._ask("PATCH", self._path(pool), {"spec": {field: replicas}})

    def _path(self, pool: str) -> str:
        name = quote(f"{self._settings.scale_prefix}{pool}", safe="")
        namespace = quote(self._read("namespace"), safe="")
        if self._settings.scale_keda:
            return f"/apis/keda.sh/v1alpha1/namespaces/{namespace}/scaledobjects/{name}"
        return f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text().strip()
        except OSError as error:
            raise Unreachable(
                f"the service account's {name} cannot be read: {error}; is its token mounted?", code="scaling_refused"
            ) from None

    def _ask(self, method: str, path: str, patch: dict[str, Any] | None = None) -> dict[str, Any]:
        # Read each time: the kubelet renews the token.
        headers = {"Authorization": f"Bearer {self._read('token')}"}
        if patch is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        authority = self._account / "ca.crt"
        verify: Any = str(authority) if authority.exists() else True
        try:
            with httpx.Client(
                base_url=self._settings.kubernetes_url, verify=verify, timeout=API_SECONDS, trust_env=False
            ) as client:
                answer = client.request(method, path, headers=headers, json=patch)
                answer.raise_for_status()
                found: dict[str, Any] = answer.json()
                return found
        except httpx.HTTPStatusError as error:
            reason = f"Kubernetes refused {method} {path}: HTTP {error.response.status_code}"
            raise Unreachable(f"{reason}; is the orchestrator's Role installed?", code="scaling_refused") from None
        except httpx.HTTPError as error:
            raise Unreachable(f"Kubernetes did not answer: {error}", code="kubernetes_unreachable") from None


class Scale:
    """The numbers of replicas people may request, within bounds."""

    def __init__(self, settings: Settings, client: RedisClient) -> None:
        self.kind = settings.scaler
        # The launcher's first replica is the one that others call by address.
        fewest = max(1, settings.min_replicas) if settings.scaler == "local" else settings.min_replicas
        self.bounds = dict.fromkeys(SCALABLE, (fewest, settings.max_replicas))
        self._scaler: Scaler | None = None
        if settings.scaler == "local":
            self._scaler = LocalScaler(client)
        elif settings.scaler == "kubernetes":
            self._scaler = KubernetesScaler(settings)

    def desired(self) -> dict[str, int | None]:
        """Requested replicas by pool; None where nothing can scale."""
        return {pool: self._scaler.desired(pool) if self._scaler else None for pool in SCALABLE}

    def request(self, wanted: dict[str, int]) -> None:
        """Ask for so many replicas, all pools or none.

        Raises InvalidInput by field, PreconditionFailed (code "scaling_unavailable"), Unreachable.
        """
        violations = [
            FieldViolation(f"/{pool}", f"must be from {low} to {high}")
            for pool, (low, high) in self.bounds.items()
            if pool in wanted and not low <= wanted[pool] <= high
        ]
        if violations:
            raise InvalidInput("outside the bounds", code="invalid_scale", violations=tuple(violations))
        if self._scaler is None:
            raise PreconditionFailed(
                "nobody scales this platform: replicas are set where it was installed", code="scaling_unavailable"
            )
        for pool, replicas in wanted.items():
            self._scaler.scale(pool, replicas)
            log.info("replicas requested", pool=pool, replicas=replicas)
