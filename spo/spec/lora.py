"""Training a low-rank adapter in place of all weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from spo.model.adapter_folder import ALL_LINEAR
from spo.spec.section import Section

# The largest that the sampling engine has room for (vLLM's MaxLoRARanks).
HIGHEST_RANK = 512

ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length=200)]


class LoraSpec(Section):
    """A LoRA adapter (W + alpha / rank * B A, as peft has it); the model's own weights stay pi0's. No dropout."""

    rank: int = Field(default=16, ge=1, le=HIGHEST_RANK)
    alpha: int = Field(default=32, ge=1, le=65_536, description="The adapter counts alpha / rank times.")
    targets: Literal["all-linear"] | Annotated[tuple[ModuleName, ...], Field(min_length=1, max_length=1024)] = Field(
        default=ALL_LINEAR, description="Names, or ends of names, of linear layers; default: all but the last."
    )

    def peft_options(self) -> dict[str, Any]:
        """The fields of peft's LoraConfig."""
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return {"r": self.rank, "lora_alpha": self.alpha, "target_modules": targets}
