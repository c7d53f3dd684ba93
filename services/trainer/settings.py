"""How a trainer process behaves; the science of a job is in its JobSpec. Environment: SPO_TRAINER_<FIELD>."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Literal

from pydantic import Field

from spo.service.settings import ServiceSettings

# What torch's allocator of device memory is told by; the second is its older name.
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


class Settings(ServiceSettings, service="trainer"):
    """Fields of every rank; only rank 0 talks to other services, but each fetches its rows from the replay buffer."""

    lease_wait_seconds: float = Field(default=10, gt=0, le=20, description="Long poll for a job.")
    batch_wait_seconds: float = Field(default=2, gt=0, le=60, description="Long poll for a batch; directives wait.")
    patience_seconds: float = Field(default=600, gt=0, description="How long an absent service is called again.")
    collective_timeout_seconds: float = Field(default=1800, gt=0, description="Longest wait of one rank for another.")
    reference_tolerance: float = Field(
        default=1.0,
        gt=0,
        description="Factor on how far the first batch may be off its reference by rounding, which follows from dtype "
        "and length.",
    )
    max_quarantined: int = Field(default=5, ge=1, description="Unusable batches in a row after which a run fails.")
    checkpoints_kept: int = Field(default=2, ge=1, description="Newest checkpoints kept per run.")
    checkpoint_share: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of the time that checkpoints between the spec's intervals may take; 0: none.",
    )
    weight_anchor_interval: int = Field(
        default=0,
        ge=0,
        description="Every so many versions one is stored whole, the others as what changed; 1: all whole; 0: all in a "
        "shared folder, every 10th in an object store.",
    )
    weights_kept: int = Field(default=20, ge=2, description="Newest weight versions kept per run.")
    weight_transfer: Literal["files", "broadcast"] = Field(
        default="files",
        description="broadcast: a new version is also sent to the run's replicas, over NCCL or gloo, for a private "
        "network of theirs: it is not encrypted. Its files are written either way.",
    )
    broadcast_host: str = Field(
        default="", description="This machine's address on that network; default: the host, or what its name means."
    )
    broadcast_port: int = Field(default=0, ge=0, le=65535, description="Where replicas join; 0 takes a free one.")
    broadcast_window_seconds: float = Field(
        default=10, gt=0, description="How long replicas may take to join; who is later takes the files."
    )
    broadcast_seconds: float = Field(default=120, gt=0, description="How long the transfer may take from there.")


def keep_memory_whole(environment: MutableMapping[str, str]) -> None:
    """Have device memory in segments that grow, unless the allocator is told otherwise; before torch is imported.

    Micro-batches have as many tokens as come: segments of fixed sizes would be left with holes that none fits into.
    """
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"
