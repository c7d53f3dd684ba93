"""Which episodes a runner plays, and how (environment SPO_AGENT_RUNNER_*)."""

from __future__ import annotations

from pydantic import Field, SecretStr

from spo.service.settings import ServiceSettings


class Settings(ServiceSettings, service="agent_runner"):
    port: int = Field(default=7077, ge=0, le=65535)
    api_url: str = Field(default="http://127.0.0.1:8080", description="The platform's HTTP API.")
    api_key: SecretStr = Field(default=SecretStr(""), description="A key with the scope agents:run, and no other.")
    pool: str = Field(default="default", min_length=1, description="tasks.harness.runner_pool of the jobs.")
    harnesses: dict[str, str] = Field(
        default={}, description="Commands (JSON object), by the name that tasks.harness.name has."
    )
    score: str = Field(
        default="", description="Command whose last line is the reward; empty: the job's verifier decides."
    )
    most: int = Field(default=1, ge=1, le=64, description="Episodes at once.")
    confined: bool = Field(
        default=True,
        description="Agents see no secret, process or episode but their own (Landlock, Linux 5.13); false: they do.",
    )
    readable: list[str] = Field(
        default=[], description="Further folders that confined agents may read (JSON list); the image's own they may."
    )
    drain_seconds: float = Field(
        default=120, ge=0, description="Grace after SIGTERM: what is played may end within it, else it is given back."
    )
