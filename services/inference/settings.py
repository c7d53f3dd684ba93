"""The address of an inference replica and its share of the machine; everything about a job is in its JobSpec."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spo.service.settings import ServiceSettings

CPU_CACHE_BYTES = 256 << 20


class Settings(ServiceSettings, service="inference"):
    """SPO_INFERENCE_* of one replica."""

    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=0,
        description="KV cache; 0: what gpu_memory_utilization leaves. Default: 256 MiB on CPU, 0 on a GPU.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of a GPU for weights and cache, where the cache has no size."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that share the model.")
    max_sequences: int = Field(default=256, ge=1, description="Sequences decoded at once.")
    enforce_eager: bool | None = Field(default=None, description="Default: eager on CPU, captured graphs on GPUs.")
    groups_in_flight: int = Field(default=64, ge=1, description="Prompt groups taken from the stream at once.")
    served_streams: int = Field(
        default=256, ge=1, le=4096, description="Completions of people and programs that are sampled at once."
    )
    in_flight: Literal["auto", "finish", "keep", "keep_cache"] = Field(
        default="auto",
        description="New weights: finish started groups on the old ones first; or go on with them under the new, their "
        "prefixes computed anew (keep) or left as they are (keep_cache). auto: keep_cache where the job allows it.",
    )
    weight_transfer: Literal["files", "broadcast"] = Field(
        default="files", description="broadcast: take new versions from trainers that send them; files where it fails."
    )
    turn_seconds: float = Field(
        default=1.0, gt=0, description="How long one weight version may be served while another is waited for."
    )
    reclaim_after_seconds: float = Field(default=20.0, gt=0, description="A silent replica's groups go to another.")

    def cache_bytes(self, *, on_cpu: bool) -> int:
        """What the KV cache takes; 0: what the weights leave of the card's share."""
        if self.kv_cache_memory_bytes is None:
            return CPU_CACHE_BYTES if on_cpu else 0
        return self.kv_cache_memory_bytes
