"""Attention over a row that holds several sequences, each of which sees itself only: no mask of L x L is ever made.

Registered with transformers under the name ATTENTION. Where a forward says where its sequences begin (`cu_seq_lens_q`),
each is attended to by a call of its own, or all by torch's varlen kernel on a GPU; any other forward goes the way of
sdpa. What a sequence gets does not depend on what else is in the row: on a CPU bfloat16 log-probs agree to the last
bit, where padding moves the sum over a response by tenths of a nat.

Axes: B row, H head, G head of keys, L position in a row, D width of a head, T token of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "sdpa_per_sequence"
# Model types whose packed log-probs and gradients a test holds against one sequence at a time. Others are padded:
# state that runs through a whole row, as in recurrent and hybrid models, does not end where a sequence does.
PACKABLE = (
    "gemma",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
# Widest head of the GPU kernel.
VARLEN_WIDTH = 256


def attention_for(config: Mapping[str, Any], *, packing: bool) -> str:
    """The name of the attention that a model with this config.json is loaded with; ATTENTION: it can be packed."""
    if config.get("attn_logit_softcapping"):
        # Every other implementation leaves the soft cap out.
        return "eager"
    return ATTENTION if packing and config.get("model_type") in PACKABLE else "sdpa"


class AttentionOptions(TypedDict, total=False):
    """What transformers tells an attention function beside its tensors, as far as it counts here.

    cu_seq_lens_q: where each sequence of the only row begins, and where the last ends; int32. max_length_q: tokens of
    the longest.
    """

    dropout: float
    scaling: float | None
    is_causal: bool | None
    sliding_window: int | None
    cu_seq_lens_q: Tensor | None
    max_length_q: int | None


def attend(
    module: nn.Module,
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    attention_mask: Tensor | None,
    **told: Unpack[AttentionOptions],
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it; (B, L, H, D). Without a mask and bounds each row is one sequence."""
    dropout, scaling = told.get("dropout", 0.0), told.get("scaling")
    if attention_mask is not None:
        tensors = query_BHLD, key_BGLD, value_BGLD, attention_mask
        return sdpa_attention_forward(module, *tensors, dropout, scaling, told.get("is_causal"))
    window, starts = told.get("sliding_window"), told.get("cu_seq_lens_q")
    longest = told.get("max_length_q")
    if starts is not None and longest and _has_varlen_kernel(query_BHLD, value_BGLD):
        query_THD, key_TGD, value_TGD = (found[0].transpose(0, 1) for found in (query_BHLD, key_BGLD, value_BGLD))
        found_THD = varlen_attn(
            query_THD,
            key_TGD,
            value_TGD,
            *(starts, starts, longest, longest),
            scale=scaling,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
        )
        # A tensor, as no auxiliary results were asked for.
        return cast(Tensor, found_THD)[None], None
    if starts is None and key_BGLD.shape[2] != query_BHLD.shape[2]:
        # The queries are the last positions: keys of those before come out of a cache.
        seen_LL = _seen_after_cache(query_BHLD.shape[2], key_BGLD.shape[2], window, query_BHLD.device)
        return sdpa_attention_forward(module, query_BHLD, key_BGLD, value_BGLD, seen_LL, dropout, scaling)
    bounds = [0, query_BHLD.shape[2]] if starts is None else starts.tolist()
    parts = []
    for rows, columns, mask_LL in _blocks(bounds, window, query_BHLD.device):
        given = query_BHLD[:, :, rows], key_BGLD[:, :, columns], value_BGLD[:, :, columns]
        parts.append(sdpa_attention_forward(module, *given, mask_LL, dropout, scaling)[0])
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _has_varlen_kernel(query_BHLD: Tensor, value_BGLD: Tensor) -> bool:
    narrow = query_BHLD.shape[-1] == value_BGLD.shape[-1] <= VARLEN_WIDTH
    return query_BHLD.is_cuda and query_BHLD.dtype in (torch.bfloat16, torch.float16) and narrow


def _seen_after_cache(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    query_L = torch.arange(keys - queries, keys, device=device)[:, None]
    key_L = torch.arange(keys, device=device)
    return (key_L <= query_L) & (key_L > query_L - (window or keys))


def _blocks(
    bounds: Sequence[int], window: int | None, device: torch.device
) -> list[tuple[slice, slice, Tensor | None]]:
    """Positions that attend, those they attend to, and the mask between them; None: causal."""
    found: list[tuple[slice, slice, Tensor | None]] = []
    for start, end in pairwise(bounds):
        if not window or end - start <= window:
            found.append((slice(start, end), slice(start, end), None))
            continue
        # A window at a time: what its queries see spans two windows at most, however long the sequence.
        for first in range(start, end, window):
            rows, columns = slice(first, min(first + window, end)), max(start, first - window + 1)
            query_L = torch.arange(rows.start, rows.stop, device=device)[:, None]
            key_L = torch.arange(columns, rows.stop, device=device)
            mask_LL = (key_L <= query_L) & (key_L > query_L - window)
            found.append((rows, slice(columns, rows.stop), mask_LL))
    return found


def mask_of_padding(*, attention_mask: Tensor | None = None, **others: object) -> Tensor | None:
    """The mask of a padded batch as sdpa wants it; None where there is no padding: `attend` knows what to do."""
    make = cast(Callable[..., Tensor | None], sdpa_mask)
    return None if attention_mask is None else make(attention_mask=attention_mask, **others)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, mask_of_padding)
