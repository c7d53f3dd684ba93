"""Where the judge lives and how strict it is (environment SPO_SANDBOX_JUDGE_*)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spo.service.settings import ServiceSettings

# Strongest first.
IsolationTier = Literal["namespaces+seccomp+landlock", "namespaces+seccomp", "docker", "seccomp+landlock"]


class Settings(ServiceSettings, service="sandbox_judge"):
    port: int = Field(default=7072, ge=0, le=65535)
    workers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Programs run at once; 0: one per core of the cgroup's quota, as far as the memory of all fits.",
    )
    isolation: IsolationTier | Literal["auto"] = Field(
        default="auto", description="Use exactly this tier instead of the strongest one that works; docker only so."
    )
    minimum_isolation: IsolationTier = Field(
        default="seccomp+landlock", description="Refuse to judge below this tier (they are listed strongest first)."
    )
    programs_per_zygote: int = Field(default=2000, gt=0, description="A zygote is replaced after so many programs.")
    max_source_bytes: int = Field(default=64 << 10, gt=0, le=128 << 10, description="Longer programs are not run.")
    max_queued_programs: int = Field(default=4096, gt=0, description="Beyond it callers get RESOURCE_EXHAUSTED.")
    stream_groups: int = Field(default=8, gt=0, description="Groups of a run judged by one of its two calls at once.")
    reclaim_seconds: float = Field(default=20, gt=0, description="A silent judge's groups go to another after it.")
    cache_seconds: int = Field(default=7 * 86400, ge=0, description="Life of a cached verdict; 0 switches it off.")
    cache_bytes: int = Field(
        default=256 << 20, ge=1 << 20, description="Redis memory of all cached verdicts; the oldest go first."
    )
    recheck_rate: float = Field(
        default=0.01, ge=0, le=1, description="Share of programs judged twice to measure how noisy verdicts are."
    )
    memory_cgroup: str = Field(
        default="auto",
        description='Where memory of whole trees is limited: "auto" (the judge\'s own cgroup), "off" or a folder.',
    )
    python_prefixes: list[str] = Field(
        default=[], description="Prefixes of further Python versions outside /usr (JSON list): offered as python3.x."
    )
    docker_image: str = Field(
        default="", description="Image of tier docker: one with the python3 of this judge, such as the judge's own."
    )
    docker_runtime: str = Field(default="", description="Its runtime, for example runsc; default: the engine's.")
    docker_python: str = Field(default="python3", description="The interpreter's path in the image.")
    docker_folder: str = Field(
        default="", description="Folder that judge and engine both see under this path; default: the temporary one."
    )
    docker_memory_bytes: int = Field(default=2 << 30, ge=128 << 20, description="Memory of one worker's container.")
