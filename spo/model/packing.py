"""Batches without padding: all sequences one after the other in one row.

Axes: B sequence, L position in the padded batch, T token of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spo.model.attention import ATTENTION


def is_packed(model: nn.Module) -> bool:
    """Whether its forwards take packed rows: it, or the language model within it, was loaded for that."""
    found = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return any(module.config._attn_implementation == ATTENTION for module in found)


@dataclass(frozen=True)
class PackedRow:
    """Where each token of a padded batch stands in the row.

    source_T: its place in the flattened (B, L). position_ids_1T: its number within its sequence. bounds: where each
    sequence begins, and where the last ends; (B + 1,). longest: tokens of the longest sequence. shape: (B, L).
    """

    source_T: Tensor
    position_ids_1T: Tensor
    bounds: Tensor
    longest: int
    shape: torch.Size

    @classmethod
    def of(cls, attention_mask_BL: Tensor) -> PackedRow:
        """The row of a batch; mask 0 at padding, which may be on either side."""
        mask_BL = attention_mask_BL.bool()
        lengths_B = mask_BL.sum(dim=1)
        lengths_B = lengths_B[lengths_B > 0]
        return cls(
            source_T=mask_BL.flatten().nonzero().flatten(),
            position_ids_1T=(mask_BL.long().cumsum(dim=1) - 1)[mask_BL][None],
            bounds=nn.functional.pad(lengths_B.cumsum(dim=0), (1, 0)).to(torch.int32),
            longest=int(lengths_B.max()) if len(lengths_B) else 0,
            shape=mask_BL.shape,
        )

    def model_inputs(self) -> dict[str, Tensor | int]:
        """What a transformers model is given beside the tokens, in the words of its attention kernels."""
        return {
            "position_ids": self.position_ids_1T,
            "cu_seq_lens_q": self.bounds,
            "cu_seq_lens_k": self.bounds,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }

    def pack(self, values_BL: Tensor) -> Tensor:
        """The values of the sequences' tokens; (1, T)."""
        return values_BL.flatten()[self.source_T][None]

    def unpack(self, values_1T: Tensor) -> Tensor:
        """The inverse of `pack`, with 0 at padding; (B, L)."""
        found = torch.zeros(self.shape.numel(), dtype=values_1T.dtype, device=values_1T.device)
        return found.index_put((self.source_T,), values_1T[0]).view(self.shape)
