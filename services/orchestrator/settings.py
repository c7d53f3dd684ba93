"""Where the orchestrator listens and how patient it is: `SPO_ORCHESTRATOR_<FIELD>`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from spo.service.settings import ServiceSettings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Settings(ServiceSettings, service="orchestrator"):
    long_polls: int = Field(default=448, ge=1, le=4096, description="Trainers that may wait for a job at once.")
    http_port: int = Field(default=8080, ge=0, le=65535, description="REST and web page; 0 takes a free one.")
    api_key: SecretStr | None = Field(default=None, description="Bearer key of the API; without it loopback only.")
    max_body_bytes: int = Field(default=1 << 20, ge=1024, description="Largest request body.")
    max_import_bytes: int = Field(default=64 << 20, ge=1024, description="Largest file of an experience import.")
    max_part_bytes: int = Field(default=64 << 20, ge=1024, description="Largest part of a dataset's upload.")
    max_dataset_bytes: int = Field(default=16 << 30, ge=1024, description="Largest dataset.")
    max_connections: int = Field(default=512, ge=1, le=60_000, description="HTTP connections open at once.")
    rate_limit: str = Field(
        default="3000/minute",
        pattern=r"^\d{1,9}/(second|minute|hour|day)$",
        description="Requests of one caller; health checks and open event streams do not count.",
    )
    oidc_issuer: str = Field(default="", description="OpenID Connect provider whose bearer tokens are accepted.")
    oidc_audience: str = Field(default="", description="Audience the provider's tokens must name.")
    oidc_tenant_claim: str = Field(default="tenant", description="Claim that names the tenant.")
    tenant_paths: str = Field(
        default="/models:/tasks",
        description="Folders, with colons between, where tenants may name models and task files; admins: anywhere.",
    )
    shared_state: bool = Field(
        default=True,
        description="Whether other services see this state folder, where forks put models.",
    )
    scaler: Literal["none", "local", "kubernetes"] = Field(
        default="none", description="Who starts and stops replicas when PUT /v1/scale asks for it."
    )
    min_replicas: int = Field(default=1, ge=0, description="Fewest replicas of a pool that may be asked for.")
    max_replicas: int = Field(default=8, ge=1, description="Most replicas of a pool that may be asked for.")
    scale_prefix: str = Field(default="", description="Kubernetes: what precedes the pool in a Deployment's name.")
    scale_keda: bool = Field(default=False, description="Kubernetes: move the bound of KEDA's ScaledObject instead.")
    kubernetes_url: str = Field(default="https://kubernetes.default.svc", description="Kubernetes API.")
    durable_writes: bool = Field(
        default=True,
        description="Control-plane writes wait for Redis' append-only file; false accepts a Redis that keeps none.",
    )
    durable_replicas: int = Field(
        default=0, ge=0, le=16, description="And for so many replicas of Redis: a failover to one of them loses none."
    )
    max_running_jobs: int = Field(
        default=0,
        ge=0,
        description="Jobs past `queued` at one time; 0: as many as live trainers and inference replicas.",
    )
    lease_seconds: float = Field(default=15, gt=0, description="A trainer silent for this long loses its job.")
    replica_silence_seconds: float = Field(default=10, gt=0, description="A replica silent for this long is dropped.")
    pause_grace_seconds: float = Field(default=60, gt=0, description="Longest wait for the trainer's checkpoint.")
    stall_seconds: float = Field(default=120, gt=0, description="No progress for this long becomes an event.")
    most_trainer_deaths: int = Field(
        default=5, ge=1, description="Deaths of a job's trainer without a step in between, after which the job fails."
    )
    max_dead_letter_share: float = Field(default=0.05, ge=0, le=1, description="Above it a job fails loudly.")
    most_fruitless_windows: int = Field(
        default=4,
        ge=1,
        description="Windows of rollouts with too few correct ones for a batch, where only such are served, before a"
        " job fails.",
    )
    evaluation_requests: int = Field(
        default=32, ge=1, le=256, description="Held-out problems of one evaluation in flight at once."
    )
    evaluation_attempts: int = Field(
        default=5, ge=1, description="Failures of an evaluation after which it is given up on; outages are none."
    )
    evaluation_patience_seconds: float = Field(
        default=600, gt=0, description="An evaluation without any answer for this long gives its turn to others."
    )
    evaluations_kept: int = Field(
        default=1000, ge=1, description="Evaluations that stay of a job: of its schedule, and of the requested ones."
    )

    serving_streams: int = Field(default=128, ge=1, le=4096, description="Completions under way at once.")
    serving_streams_per_tenant: int = Field(default=64, ge=1, description="Of one tenant, completions under way.")
    serving_tokens_per_minute: int = Field(
        default=0, ge=0, description="Prompt and response tokens of one tenant in a minute; 0: no limit."
    )
    serving_seconds: float = Field(default=300, gt=0, description="Longest completion.")
    serving_wait_seconds: float = Field(
        default=30, ge=0, description="How long a completion waits for a replica to come up and load its model."
    )
    serving_streams_per_replica: int = Field(
        default=32, ge=1, description="Completions at once of ended jobs' policies that one more replica is wanted for."
    )

    @property
    def tenant_folders(self) -> tuple[Path, ...]:
        """`tenant_paths`, and where models that the platform makes itself are kept."""
        opened = [Path(path) for path in self.tenant_paths.split(":") if path]
        return (*opened, self.state_path / "cache" / "models")

    @model_validator(mode="after")
    def open_only_on_loopback(self) -> Self:
        if self.api_key is None and self.host not in LOOPBACK:
            raise ValueError(f"listening on {self.host} needs SPO_ORCHESTRATOR_API_KEY; without a key only loopback is")
        if self.oidc_issuer and (self.api_key is None or not self.oidc_audience):
            raise ValueError("SPO_ORCHESTRATOR_OIDC_ISSUER needs SPO_ORCHESTRATOR_OIDC_AUDIENCE and _API_KEY")
        return self

    @model_validator(mode="after")
    def bounds_hold_a_number(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("SPO_ORCHESTRATOR_MIN_REPLICAS must not be above SPO_ORCHESTRATOR_MAX_REPLICAS")
        return self
