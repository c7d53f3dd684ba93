"""What the API says of training: curves, evaluations, weight versions, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class MetricSeries(BaseModel):
    """Columns of equal length; axis names what `steps` counts."""

    axis: Literal["step", "unix_ms"]
    steps: list[int]
    series: dict[str, list[float | None]]


class WeightVersion(BaseModel):
    version: int
    step: int
    uri: str
    manifest_digest: str
    size_bytes: int
    published_at: str
    announced: bool
    applied: list[str]
    pending: list[str]
    failed: list[str]


class WeightVersions(BaseModel):
    items: list[WeightVersion]


class Checkpoint(BaseModel):
    """parent: the step of the checkpoint before it, null for the first; epoch: of the lease it was written under."""

    step: int
    parent: int | None = None
    path: str
    manifest_digest: str
    weight_version: int
    epoch: int = 0


class Checkpoints(BaseModel):
    items: list[Checkpoint]


class Evaluations(BaseModel):
    items: list[dict[str, object]]
