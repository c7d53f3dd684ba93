"""Where the service of the Tinker API lives and how much it takes on (environment SPO_TINKER_*)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from spo.service.settings import ServiceSettings


class Settings(ServiceSettings, service="tinker"):
    port: int = Field(default=7077, ge=0, le=65535)
    model: Path = Field(default=Path("model"), description="Folder of the base model that all adapters share.")
    model_name: str = Field(default="", description="What clients call it; default: the folder's path.")
    tokenizer: str = Field(
        default="", description="Where clients load its tokenizer: a folder of theirs or a hub's name; default: model."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Of the base; adapters are float32.")
    max_models: int = Field(default=16, ge=1, description="Training clients at once.")
    max_models_per_tenant: int = Field(default=4, ge=1, description="Of them, of one tenant.")
    max_sessions_per_tenant: int = Field(default=64, ge=1, description="Client processes of one tenant.")
    max_samplers_per_tenant: int = Field(default=1024, ge=1, description="Sampling clients of one tenant.")
    max_rank: int = Field(default=128, ge=1, description="Largest rank of an adapter.")
    max_waiting: int = Field(default=1024, ge=1, description="Operations of one tenant that wait or run.")
    max_checkpoints_per_tenant: int = Field(default=500, ge=1, description="Saved states and samplers of one tenant.")
    max_context_tokens: int = Field(
        default=8192, ge=2, description="Longest sequence, the model's own limit apart: one is computed at once."
    )
    max_new_tokens: int = Field(default=4096, ge=1, description="Most tokens of one sample.")
    max_sequences: int = Field(default=64, ge=1, description="Samples drawn at once, and most of one request.")
    tokens_per_pass: int = Field(default=2048, ge=1, description="Padded tokens of one forward and backward.")
    sampler_slots: int = Field(default=4, ge=1, description="Saved adapters held in memory to sample from.")
    kept_samplers: int = Field(default=8, ge=1, description="Unnamed saves for sampling that stay of one model.")
    autosave_steps: int = Field(default=10, ge=0, description="Optimiser steps between saves to `autosave`; 0: never.")
    operation_seconds: float = Field(default=600, gt=0, description="Longest life of an operation, its wait included.")
    result_seconds: float = Field(default=900, gt=0, description="How long a result can be collected.")
    silence_seconds: float = Field(default=600, gt=0, description="Sessions without a heartbeat for so long end.")
