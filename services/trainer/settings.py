"""How a trainer process behaves; the science of a job is in its JobSpec. Environment: SPO_TRAINER_<FIELD>."""

from __future__ import annotations

from pydantic import Field

from spo.service.settings import ServiceSettings


class Settings(ServiceSettings, service="trainer"):
    """Fields of every rank; only rank 0 talks to other services."""

    lease_wait_seconds: float = Field(default=10, gt=0, le=20, description="Long poll for a job.")
    batch_wait_seconds: float = Field(default=2, gt=0, le=60, description="Long poll for a batch; directives wait.")
    patience_seconds: float = Field(default=600, gt=0, description="How long an absent service is called again.")
    collective_timeout_seconds: float = Field(default=1800, gt=0, description="Longest wait of one rank for another.")
    reference_tolerance: float = Field(
        default=1e-3,
        gt=0,
        description="Reward units by which Q_t may depart from Qhat_0 on the first batch; float32 rounding over a "
        "thousand tokens stays below it, another engine's or precision's log-probs do not.",
    )
    reference_tolerance_bfloat16: float = Field(
        default=0.1, gt=0, description="The same for bfloat16 models, whose log-probs change with the batch's shape."
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
