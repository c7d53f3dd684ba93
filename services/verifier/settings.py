"""Where a verifier lives and how patient it is (environment SPO_VERIFIER_*)."""

from __future__ import annotations

from pydantic import Field

from spo.service.settings import ServiceSettings


class Settings(ServiceSettings, service="verifier"):
    port: int = Field(default=7076, ge=0, le=65535)
    stream_groups: int = Field(default=16, gt=0, description="Groups of a run scored by one of its two calls at once.")
    reclaim_seconds: float = Field(default=20, gt=0, description="A silent verifier's groups go to another after it.")
    max_waiting_responses: int = Field(default=4096, gt=0, description="Beyond it callers get RESOURCE_EXHAUSTED.")
    environment_servers: dict[str, str] = Field(
        default={},
        description="Environments in processes of their own (JSON object of name to gRPC target); no others are asked.",
    )
    http_networks: list[str] = Field(
        default=[], description="Networks (JSON list of CIDR) that named hosts may be in without being public."
    )
    http_secret: str = Field(default="", description="Requests are signed with it; empty: they are not.")
    http_batch: int = Field(default=64, gt=0, le=1024, description="Responses in one request.")
    http_calls: int = Field(default=32, gt=0, le=1024, description="Requests under way at once.")
    http_answer_bytes: int = Field(default=4 << 20, gt=0, le=64 << 20, description="Longer answers are refused.")
    model_keys: dict[str, str] = Field(
        default={}, description="Keys of models as judges by host (JSON object); sent as bearer tokens to that host."
    )
    model_seconds: float = Field(default=120, gt=0, le=600, description="For one vote of a model, retries apart.")
    model_tokens: int = Field(default=1024, gt=0, le=65536, description="Tokens that a vote may have.")
    model_temperature: float = Field(default=0.7, ge=0, le=2, description="At which a model votes.")
    attempts: int = Field(default=4, ge=1, le=20, description="Times that a request is made before it has failed.")
    backoff_seconds: float = Field(default=0.5, gt=0, description="Before the second attempt; twice as long each time.")
    failures_to_rest: int = Field(default=8, ge=1, description="Failures in a row after which a service is left alone.")
    rest_seconds: float = Field(default=15, gt=0, description="How long it is left alone.")
    cache_seconds: int = Field(default=7 * 86400, ge=0, description="Life of a remembered verdict; 0 switches it off.")
    cache_bytes: int = Field(
        default=64 << 20, ge=1 << 20, description="Redis memory of all remembered verdicts; the oldest go first."
    )
    recheck_rate: float = Field(
        default=0.01, ge=0, le=1, description="Share of responses that are asked about again, to see how sure it is."
    )
    group_failures: int = Field(
        default=5, ge=1, description="A group is set aside after so many failures of a service that is there."
    )
