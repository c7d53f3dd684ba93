"""Where a process lives: environment variables only, `SPO_<FIELD>` for all and `SPO_<SERVICE>_<FIELD>` for one.

The science of a job is in `spo.spec.job_spec`; there is no configuration below these two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

# Where containers find secrets as files named like the variables (spo_redis_url); a variable goes before its file.
CONTAINER_SECRETS = Path("/run/secrets")


class PlatformSettings(BaseSettings):
    """What every process needs: Redis, the addresses of the services, the state folder.

    Addresses are gRPC targets: `host:port`, `dns:///service:port` (all pods) or `ipv4:a:1,b:2` (listed replicas).
    """

    model_config = SettingsConfigDict(
        env_prefix="SPO_",
        extra="ignore",
        frozen=True,
        populate_by_name=True,
        secrets_dir=CONTAINER_SECRETS if CONTAINER_SECRETS.is_dir() else None,
    )

    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_wait_seconds: float = Field(default=30, gt=0, description="How long a start waits for Redis.")
    orchestrator_address: str = "127.0.0.1:7070"
    inference_address: str = "127.0.0.1:7071"
    sandbox_judge_address: str = "127.0.0.1:7072"
    replay_buffer_address: str = "127.0.0.1:7073"
    value_estimation_address: str = "127.0.0.1:7074"
    trainer_address: str = "127.0.0.1:7075"
    verifier_address: str = "127.0.0.1:7076"
    tinker_address: str = Field(default="", description="Of the service behind /tinker; empty: there is none.")
    verifier_http_hosts: list[str] = Field(
        default=[],
        description="Hosts that verifiers may ask (JSON list): name (ports 80 and 443) or name:port. Empty: none.",
    )
    rpc_token: SecretStr = Field(
        default=SecretStr(""),
        description="What services show each other; empty: gRPC answers everybody. Several by commas: the first is "
        "shown, all are accepted.",
    )
    state_path: Path = Field(default=Path(".spo"), description="Weights, checkpoints and caches live below it.")
    experience_url: str = Field(
        default="",
        description="Folder, s3://bucket/folder or fsspec URL; default: experience/ in the state path.",
    )
    traces_endpoint: str = Field(
        default="", description="OTLP/HTTP collector of traces, http://host:4318; OTEL_EXPORTER_OTLP_ENDPOINT does too."
    )
    state_store_url: str = Field(
        default="",
        description="Folder or s3:// URL of what the orchestrator keeps in files; default: the state path.",
    )
    weight_store_url: str = Field(
        default="", description="Folder or s3:// URL of the weight versions; default: weights/ in the state path."
    )
    checkpoint_store_url: str = Field(
        default="", description="Folder or s3:// URL of the checkpoints; default: checkpoints/ in the state path."
    )
    weight_cache_path: str = Field(
        default="",
        description="Where a machine keeps versions of an object store; default: /dev/shm where they fit, else TMPDIR.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"

    @property
    def experience_place(self) -> str:
        """Where the experience store is."""
        return self.experience_url or str(self.state_path.absolute() / "experience")

    @property
    def state_place(self) -> str:
        """Where the orchestrator keeps datasets, older events, manifests and identity."""
        return self.state_store_url.rstrip("/") or str(self.state_path.absolute())

    @property
    def weight_place(self) -> str:
        """Where the weight store is."""
        return self.weight_store_url.rstrip("/") or str(self.state_path.absolute() / "weights")

    @property
    def checkpoint_place(self) -> str:
        """Where checkpoints are, below a folder or prefix per job."""
        return self.checkpoint_store_url.rstrip("/") or str(self.state_path.absolute() / "checkpoints")


class ServiceSettings(PlatformSettings):
    """One service's settings: `class Settings(ServiceSettings, service="inference")`.

    Its own fields are read from SPO_INFERENCE_<FIELD>, the shared ones from SPO_<FIELD>.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Prometheus port; 0 switches it off.")
    advertise_address: str = Field(default="", description="Address told to the orchestrator; default host:port.")
    drain_seconds: float = Field(default=20, ge=0, description="Grace after SIGTERM.")

    @classmethod
    def __pydantic_init_subclass__(cls, service: str = "", **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in cls.model_fields.items():
            if name not in PlatformSettings.model_fields:
                field.validation_alias = f"SPO_{service}_{name}".upper()
        cls.model_rebuild(force=True)

    def __init_subclass__(cls, service: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
