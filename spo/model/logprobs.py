"""A causal language model as the mathematics sees it: log-probs of given tokens, from packed rows by one forward,
with or without an adapter.

Axes: B row, H head, G head of keys, L position in a row, D width of a head, T token of a packed row.

Axes: B sequence, L position in the padded batch, T token of the row.

Axes: B sequence, L position, T token, D hidden width, V vocabulary, N columns of one block. Log-probs in nats, float32.

Axes: B sequence, L position in the padded sequence, T token of a packed row, V vocabulary. Log-probs in nats, float32.

Attention over a row that holds several sequences, each of which sees itself only: no mask of L x L is ever made.
Registered with transformers under the name ATTENTION. Where a forward says where its sequences begin (`cu_seq_lens_q`),
each is attended to by a call of its own, or all by torch's varlen kernel on a GPU; any other forward goes the way of
sdpa. What a sequence gets does not depend on what else is in the row: on a CPU bfloat16 log-probs agree to the last
bit, where padding moves the sum over a response by tenths of a nat.

The last layer of a language model as log-probs of given tokens, never as logits of all of them.
The logits of a real model are most of a training step's memory: 8 sequences of 4,096 tokens over 152,000 words are
20 GB in float32, and autograd keeps them until the backward pass. Here they exist in blocks of the vocabulary only, in
the forward pass and once more in the backward pass.

`token_logprobs` is the one forward of the platform: the trainer (policy) and value-estimation (reference pi0) both call
it, so at equal weights their numbers agree to rounding and Q_T starts at Qhat_0. A model that was loaded to be packed
computes all sequences of a batch in one row without padding, any other one computes them padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack, cast

import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from spo.errors import IntegrityError, InvalidInput
from spo.model.folder import PREFIX, inspect_model_folder, open_tensors, read_tensors
from spo.model.folder_names import whole_shape

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

# What a block of logits may take, widened to float32.
BLOCK_BYTES = 64 << 20
TOKENS_PER_CHUNK = 8192
# Settings by which models change their logits after the last layer, and the values that change nothing.
CHANGED_LOGITS: dict[str, tuple[object, ...]] = {
    "final_logit_softcapping": (None, 0.0),
    "logits_scaling": (None, 1.0),
    "logit_scale": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
    "dim_model_base": (None,),
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Tokens whose logits are widened to float32 at once, in models without a LogprobHead.
WIDENED_TOKENS = 1024

NAME = "default"

# From here on a layer's activations outweigh the time to compute them again.
LARGE_MODEL_PARAMETERS = 50_000_000


def attention_for(config: Mapping[str, Any], *, packing: bool) -> str:
    """The name of the attention that a model with this config.json is loaded with; ATTENTION: it can be packed."""
    if config.get("attn_logit_softcapping"):
        # Every other implementation leaves the soft cap out.
        return "eager"
    return ATTENTION if packing and config.get("model_type") in PACKABLE else "sdpa"


LocalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


class SharedRow(Protocol):
    """Ranks that compute a packed row together: each has one of `size` equal stretches of its tokens, all log-probs."""

    rank: int
    size: int

    def attention(self, attend_to: LocalAttention, query_BLHD: Tensor, key_BLGD: Tensor, value_BLGD: Tensor) -> Tensor:
        """From this rank's stretch of all heads to its stretch of their results (B, L, H, D), gradients included.

        attend_to: gets the whole row of this rank's share of the heads.
        """

    def gathered(self, part_1N: Tensor) -> Tensor:
        """The stretches of all ranks, (1, size N); a rank's gradients go to its own stretch."""


def part_of(values_1T: Tensor, shared: SharedRow) -> Tensor:
    """This rank's stretch of a row, which is filled up with zeros to equal ones; (1, N)."""
    filled = nn.functional.pad(values_1T, (0, -values_1T.shape[1] % shared.size))
    return filled.chunk(shared.size, dim=1)[shared.rank]


class AttentionOptions(TypedDict, total=False):
    """What transformers tells an attention function beside its tensors, as far as it counts here.

    cu_seq_lens_q: where each sequence of the only row begins, and where the last ends; int32. max_length_q: tokens of
    the longest. shared_row: with whom the row is computed; the bounds are those of the whole row.
    """

    dropout: float
    scaling: float | None
    is_causal: bool | None
    sliding_window: int | None
    cu_seq_lens_q: Tensor | None
    max_length_q: int | None
    shared_row: SharedRow | None


def attend(
    module: nn.Module,
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    attention_mask: Tensor | None,
    **told: Unpack[AttentionOptions],
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it; (B, L, H, D). Without a mask and bounds each row is one sequence."""
    shared = told.get("shared_row")
    if shared is not None:
        return _attend_together(shared, query_BHLD, key_BGLD, value_BGLD, {**told, "shared_row": None}), None
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


def _attend_together(
    shared: SharedRow, query_BHLD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor, told: AttentionOptions
) -> Tensor:
    """Each rank attends over the whole row with its share of the heads; (B, L, H, D) of this rank's stretch."""
    heads = query_BHLD.shape[1] // key_BGLD.shape[1]
    if key_BGLD.shape[1] % shared.size:
        # Fewer heads of keys than ranks: each query's goes with it.
        key_BGLD, value_BGLD = (found.repeat_interleave(heads, dim=1) for found in (key_BGLD, value_BGLD))
        heads = 1
    # Stands for the layer, of which sdpa reads how many queries share a key.
    layer = nn.Module()
    vars(layer)["num_key_value_groups"] = heads

    def attend_to(query_BLHD: Tensor, key_BLGD: Tensor, value_BLGD: Tensor) -> Tensor:
        whole_row = query_BLHD.transpose(1, 2), key_BLGD.transpose(1, 2), value_BLGD.transpose(1, 2)
        return attend(layer, whole_row[0], whole_row[1], whole_row[2], None, **told)[0]

    return shared.attention(attend_to, *(found.transpose(1, 2) for found in (query_BHLD, key_BGLD, value_BGLD)))


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


def is_packed(model: nn.Module) -> bool:
    """Whether its forwards take packed rows: it, or the language model within it, was loaded for that."""
    found = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return any(module.config._attn_implementation == ATTENTION for module in found)


@dataclass(frozen=True)
class PackedRow:
    """Where each token of a padded batch stands in the row.

    source_T: its place in the flattened (B, L). position_ids_1T: its number within its sequence. bounds: where each
    sequence begins, and where the last ends; (S + 1,), S >= B. longest: tokens of the longest sequence. shape: (B, L).
    """

    source_T: Tensor
    position_ids_1T: Tensor
    bounds: Tensor
    longest: int
    shape: torch.Size

    @classmethod
    def of(cls, attention_mask_BL: Tensor) -> PackedRow:
        """The row of a batch; mask 0 at padding, which may be on either side.

        Another number in the mask is another sequence: the branches of an episode are numbered from 1.
        """
        source_T = attention_mask_BL.flatten().nonzero().flatten()
        row_T, number_T = source_T // attention_mask_BL.shape[1], attention_mask_BL.flatten()[source_T]
        begins_T = torch.ones_like(source_T, dtype=torch.bool)
        begins_T[1:] = (row_T[1:] != row_T[:-1]) | (number_T[1:] != number_T[:-1])
        start_S = begins_T.nonzero().flatten()
        bounds = nn.functional.pad(start_S, (0, 1), value=len(source_T))
        return cls(
            source_T=source_T,
            position_ids_1T=(torch.arange(len(source_T), device=source_T.device) - start_S[begins_T.cumsum(0) - 1])[
                None
            ],
            bounds=bounds.to(torch.int32),
            longest=int(bounds.diff().max()) if len(source_T) else 0,
            shape=attention_mask_BL.shape,
        )

    def model_inputs(self, shared: SharedRow | None = None) -> dict[str, Tensor | int | SharedRow]:
        """What a transformers model is given beside the tokens, in the words of its attention kernels.

        shared: the model gets this rank's stretch, and its attention the bounds of the whole row, in which what fills
        the stretches up is a sequence of its own.
        """
        positions_1T, bounds, longest = self.position_ids_1T, self.bounds, self.longest
        beside: dict[str, Tensor | int | SharedRow] = {}
        if shared is not None:
            positions_1T, beside = part_of(positions_1T, shared), {"shared_row": shared}
            spare = -len(self.source_T) % shared.size
            if spare:
                bounds = nn.functional.pad(bounds, (0, 1), value=len(self.source_T) + spare)
                longest = max(longest, spare)
        return {
            "position_ids": positions_1T,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
            **beside,
        }

    def pack(self, values_BL: Tensor) -> Tensor:
        """The values of the sequences' tokens; (1, T)."""
        return values_BL.flatten()[self.source_T][None]

    def unpack(self, values_1T: Tensor) -> Tensor:
        """The inverse of `pack`, with 0 at padding; (B, L)."""
        found = torch.zeros(self.shape.numel(), dtype=values_1T.dtype, device=values_1T.device)
        return found.index_put((self.source_T,), values_1T[0]).view(self.shape)

    def places(self) -> Tensor:
        """The place in the flattened (B, L) of each token, a sequence in each row; (S, longest), -1 at padding."""
        sequence_T = torch.repeat_interleave(self.bounds.diff().long())
        found_SN = torch.full((len(self.bounds) - 1, self.longest), -1, device=self.source_T.device)
        return found_SN.index_put((sequence_T, self.position_ids_1T[0]), self.source_T)


class LogprobHead(nn.Module):
    """In the place of a model's output layer, with its parameters: logits, or log-probs of the tokens asked for.

    What is asked for is kept on the module: one forward at a time.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._asked: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def asked(self, tokens_BL: Tensor, wanted_BL: Tensor) -> Iterator[None]:
        """While the body runs, forward returns logprob_BL of these tokens where wanted, 0 elsewhere; no logits."""
        self._asked = tokens_BL, wanted_BL
        try:
            yield
        finally:
            self._asked = None

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """(B, L, V) logits; (B, L) log-probs within `asked`."""
        if self._asked is None:
            return nn.functional.linear(hidden_BLD, self.weight, self.bias)
        tokens_BL, wanted_BL = self._asked
        found_T = chosen_logprobs(hidden_BLD[wanted_BL], self.weight, self.bias, tokens_BL[wanted_BL])
        found_BL = torch.zeros(tokens_BL.shape, dtype=torch.float32, device=hidden_BLD.device)
        return found_BL.masked_scatter(wanted_BL, found_T)


def give_logprob_head(model: PreTrainedModel) -> bool:
    """Put a LogprobHead in the place of the output layer; False where the logits are no plain linear layer's."""
    output = model.get_output_embeddings()
    changed = any(getattr(model.config, name, same[0]) not in same for name, same in CHANGED_LOGITS.items())
    if changed or type(output) is not nn.Linear:
        return False
    model.set_output_embeddings(LogprobHead(output))
    return True


def chosen_logprobs(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tokens_T: Tensor) -> Tensor:
    """ln softmax(hidden W' + b) at one token each; (T,), nats, float32. Gradients in the dtypes of their tensors."""
    found: Tensor = _ChosenLogprobs.apply(hidden_TD, weight_VD, bias_V, tokens_T)  # type: ignore[no-untyped-call]
    return found


class BackwardContext(Protocol):
    """What autograd hands to a backward pass."""

    saved_tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]
    needs_input_grad: tuple[bool, bool, bool, bool]


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tokens_T: Tensor
    ) -> Tensor:
        chosen_T = torch.zeros(len(tokens_T), dtype=torch.float32, device=hidden_TD.device)
        total_T = torch.full_like(chosen_T, -torch.inf)
        for rows, columns in _row_blocks(len(tokens_T), len(weight_VD)):
            logits_TN = _logits(hidden_TD[rows], weight_VD[columns], None if bias_V is None else bias_V[columns])
            total_T[rows] = torch.logaddexp(total_T[rows], logits_TN.logsumexp(dim=-1))
            within_T, places_T1 = _places(tokens_T[rows], columns)
            chosen_T[rows] += torch.where(within_T, logits_TN.gather(1, places_T1)[:, 0], 0.0)
        # Without a bias None is kept in its place.
        ctx.save_for_backward(hidden_TD, weight_VD, cast(Tensor, bias_V), tokens_T, total_T)
        return chosen_T - total_T

    @staticmethod
    def backward(ctx: BackwardContext, gradient_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, tokens_T, total_T = ctx.saved_tensors
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        to_hidden_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32, device=hidden_TD.device)
        to_weight_VD = torch.zeros_like(weight_VD) if wants_weight else None
        to_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        for rows, columns in _row_blocks(len(tokens_T), len(weight_VD)):
            weight_ND, bias_N = weight_VD[columns], None if bias_V is None else bias_V[columns]
            slope_TN = _logits(hidden_TD[rows], weight_ND, bias_N)
            slope_TN.sub_(total_T[rows, None]).exp_().mul_(-gradient_T[rows, None])
            within_T, places_T1 = _places(tokens_T[rows], columns)
            slope_TN.scatter_add_(1, places_T1, torch.where(within_T, gradient_T[rows], 0.0)[:, None])
            if to_bias_V is not None:
                to_bias_V[columns] += slope_TN.sum(dim=0).to(to_bias_V)
            slope_TN = slope_TN.to(weight_VD.dtype)
            if wants_hidden:
                to_hidden_TD[rows] += slope_TN @ weight_ND
            if to_weight_VD is not None:
                to_weight_VD[columns] += slope_TN.t() @ hidden_TD[rows]
        return to_hidden_TD.to(hidden_TD.dtype) if wants_hidden else None, to_weight_VD, to_bias_V, None


def _places(tokens_T: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Which tokens are among these columns, and their places there; the others' are some place.

    Without an index of varying length: for one a device would wait for the host at each block.
    """
    within_T = (tokens_T >= columns.start) & (tokens_T < columns.stop)
    return within_T, (tokens_T - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None]


def _logits(hidden_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    """In float32 from the start: rounded to bfloat16 a logit of 20 is off by .06 nats, and so is its log-prob."""
    if hidden_TD.dtype == torch.float32:
        return nn.functional.linear(hidden_TD, weight_ND, bias_N)
    if hidden_TD.is_cuda:
        logits_TN = torch.mm(hidden_TD, weight_ND.t(), out_dtype=torch.float32)
    else:
        logits_TN = hidden_TD.float() @ weight_ND.float().t()
    return logits_TN if bias_N is None else logits_TN + bias_N.float()


def _row_blocks(tokens: int, words: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the logits, a block at a time."""
    for first in range(0, tokens, TOKENS_PER_CHUNK):
        rows = slice(first, min(first + TOKENS_PER_CHUNK, tokens))
        columns = max(1, BLOCK_BYTES // (4 * (rows.stop - rows.start)))
        for start in range(0, words, columns):
            yield rows, slice(start, min(start + columns, words))


# transformers maps safetensors files, for as long as the parameters are theirs.
vars(transformers.modeling_utils)["safe_open"] = open_tensors


def load_policy(path: str | Path, dtype: str, *, packing: bool = True) -> PreTrainedModel:
    """Load a causal LM in evaluation mode from an inspected folder; InvalidInput when the folder may not be loaded.

    packing: its batches are packed, where that is right for the model.
    """
    folder = inspect_model_folder(path)
    # Its bars would be written between the lines of a service's JSON log.
    transformers.utils.logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder.path,
        dtype=DTYPES[dtype],
        # Named, so that trainer and value-estimation can never pick different kernels.
        attn_implementation=attention_for(folder.config, packing=packing),
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
    )
    model.eval()
    give_logprob_head(model)
    return model


def token_logprobs(
    model: nn.Module,
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor,
    wanted_BL: Tensor | None = None,
    shared: SharedRow | None = None,
) -> Tensor:
    """Return logprobs_BL: at l the log-prob of token l given the tokens before it, 0 at padding and at first tokens.

    `model` is a module called like a transformers causal LM, a DeepSpeed engine included. Padding on either side. Where
    wanted_BL is given and false, 0: what nobody needs costs neither time nor memory in the last layer. Tokens of
    different numbers in the mask, those of an episode's branches, do not see each other. shared: ranks that call this
    together with equal tensors, of a model that is packed; each computes its stretch, and all get all log-probs.
    """
    row = PackedRow.of(attention_mask_BL) if is_packed(model) else None
    if row is None:
        if (attention_mask_BL > 1).any():
            return _logprobs_of_branches(model, input_ids_BL, attention_mask_BL, wanted_BL)
        mask_BL = attention_mask_BL.long()
        position_ids_BL = (mask_BL.cumsum(dim=-1) - 1).clamp(min=0)
        has_context_BL = (mask_BL[:, 1:] * mask_BL[:, :-1]).bool()
        if wanted_BL is not None:
            has_context_BL &= wanted_BL[:, 1:]
        beside = {"attention_mask": mask_BL, "position_ids": position_ids_BL}
        asked = _asked(input_ids_BL, has_context_BL)
        return _after_the_first(_next_token_logprobs(model, input_ids_BL, beside, *asked))
    ids_1T = row.pack(input_ids_BL)
    has_context_1T = row.position_ids_1T[:, 1:] > 0
    if wanted_BL is not None:
        has_context_1T &= row.pack(wanted_BL)[:, 1:]
    own_1N, (tokens_1N, asked_1N) = ids_1T, _asked(ids_1T, has_context_1T)
    if shared is not None:
        own_1N, tokens_1N, asked_1N = (part_of(whole, shared) for whole in (own_1N, tokens_1N, asked_1N))
    found_1T = _next_token_logprobs(model, own_1N, row.model_inputs(shared), tokens_1N, asked_1N)
    if shared is not None:
        found_1T = shared.gathered(found_1T)[:, : ids_1T.shape[1]]
    return row.unpack(_after_the_first(found_1T))


def _asked(ids_BL: Tensor, wanted_BL: Tensor) -> tuple[Tensor, Tensor]:
    """After each position the token that follows and whether it is wanted; after the last 0 and not."""
    return nn.functional.pad(ids_BL[:, 1:], (0, 1)), nn.functional.pad(wanted_BL, (0, 1))


def _after_the_first(of_next_BL: Tensor) -> Tensor:
    """Each token's own value, from those that positions have of the next one; 0 at the first."""
    return nn.functional.pad(of_next_BL[:, :-1], (1, 0))


def _logprobs_of_branches(
    model: nn.Module, input_ids_BL: Tensor, numbers_BL: Tensor, wanted_BL: Tensor | None
) -> Tensor:
    """The same for a model that is padded: each branch is a row of its own in the forward."""
    places_SN = PackedRow.of(numbers_BL).places()
    inside_SN = places_SN >= 0
    ids_SN, asked_SN = (
        None if tensor is None else tensor.flatten()[places_SN.clamp(min=0)] for tensor in (input_ids_BL, wanted_BL)
    )
    found_SN = token_logprobs(
        model, cast(Tensor, ids_SN), inside_SN.long(), None if asked_SN is None else asked_SN & inside_SN
    )
    found = torch.zeros(numbers_BL.numel(), dtype=found_SN.dtype, device=found_SN.device)
    return found.index_put((places_SN[inside_SN],), found_SN[inside_SN]).view(numbers_BL.shape)


@torch.no_grad()
def response_logprobs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    max_tokens_per_batch: int,
    trained: Sequence[Sequence[bool] | None] | None = None,
    starts: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Return log pi(a_t | a_<t, x) for each token of each response; a forward computes at most that many tokens.

    A single sequence longer than `max_tokens_per_batch` makes a batch of its own. trained: of each response which
    tokens are wanted, None: all; the others get 0. starts: how many tokens stand before each branch after the first.
    """
    if starts is not None and any(starts):
        masks = trained if trained is not None else [None] * len(responses)
        return _response_logprobs_by_branch(model, prompts, responses, max_tokens_per_batch, masks, starts)
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    device = next(model.parameters()).device
    found: list[list[float]] = [[] for _ in sequences]
    lengths = [len(sequence) for sequence in sequences]
    for rows in length_buckets(lengths, max_tokens_per_batch, packed=is_packed(model)):
        longest = max(len(sequences[row]) for row in rows)
        input_ids_BL = torch.zeros((len(rows), longest), dtype=torch.long)
        mask_BL = torch.zeros((len(rows), longest), dtype=torch.long)
        wanted_BL = torch.zeros((len(rows), longest), dtype=torch.bool)
        for index, row in enumerate(rows):
            input_ids_BL[index, : len(sequences[row])] = torch.tensor(sequences[row])
            mask_BL[index, : len(sequences[row])] = 1
            mask = trained[row] if trained else None
            wanted_BL[index, len(prompts[row]) : len(sequences[row])] = True if mask is None else torch.tensor(mask)
        on_device = input_ids_BL.to(device), mask_BL.to(device), wanted_BL.to(device)
        logprobs_BL = token_logprobs(model, *on_device).cpu()
        for index, row in enumerate(rows):
            found[row] = logprobs_BL[index, len(prompts[row]) : len(sequences[row])].tolist()
    return found


def _response_logprobs_by_branch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    max_tokens_per_batch: int,
    trained: Sequence[Sequence[bool] | None],
    starts: Sequence[Sequence[int]],
) -> list[list[float]]:
    """The same with each branch as a response of its own; of its first token, its prompt, nothing is asked."""
    cut_prompts, cut_responses = [], []
    asked: list[Sequence[bool] | None] = []
    for prompt, response, mask, begun in zip(prompts, responses, trained, starts, strict=True):
        for number, (start, end) in enumerate(pairwise((0, *begun, len(response)))):
            first = start + 1 if number else 0
            cut_prompts.append(response[start:first] if number else prompt)
            cut_responses.append(response[first:end])
            asked.append(None if mask is None else mask[first:end])
    found = iter(response_logprobs(model, cut_prompts, cut_responses, max_tokens_per_batch, asked))
    joined = []
    for begun in starts:
        logprobs = next(found)
        for _ in begun:
            logprobs = [*logprobs, 0.0, *next(found)]
        joined.append(logprobs)
    return joined


def _next_token_logprobs(
    model: nn.Module,
    input_ids_BL: Tensor,
    beside: Mapping[str, Tensor | int | SharedRow],
    tokens_BL: Tensor,
    asked_BL: Tensor,
) -> Tensor:
    """One forward: the log-prob of the token that follows each position where it is asked for, else 0; (B, L)."""
    head = next((found for found in model.modules() if isinstance(found, LogprobHead)), None)
    if head is None:
        logits_BLV = model(input_ids=input_ids_BL, **beside, use_cache=False).logits
        return _chosen_logprobs(logits_BLV, tokens_BL).masked_fill(~asked_BL, 0.0)
    with head.asked(tokens_BL, asked_BL):
        logprobs_BL: Tensor = model(input_ids=input_ids_BL, **beside, use_cache=False).logits
    return logprobs_BL


def _chosen_logprobs(logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
    """Log-softmax at the given tokens in float32 or wider, for models whose last layer has no LogprobHead."""
    if logits_BLV.dtype in (torch.float32, torch.float64):
        return _gather_minus_logsumexp(logits_BLV, tokens_BL)
    # In parts: without gradients only one of a low-precision batch is widened to float32 at a time.
    tensors = logits_BLV.flatten(0, 1), tokens_BL.flatten()
    parts = zip(*(torch.split(tensor, WIDENED_TOKENS) for tensor in tensors), strict=True)
    found = [_gather_minus_logsumexp(logits_TV.float(), tokens_T) for logits_TV, tokens_T in parts]
    return torch.cat(found).view(tokens_BL.shape)


def _gather_minus_logsumexp(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def length_buckets(lengths: Sequence[int], max_tokens_per_batch: int, *, packed: bool) -> Iterator[list[int]]:
    """Yield rows in order of length, as many at once as fit; unless packed, padded to the longest of them."""
    rows: list[int] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        tokens = tokens + lengths[row] if packed else (len(rows) + 1) * lengths[row]
        if rows and tokens > max_tokens_per_batch:
            yield rows
            rows, tokens = [], lengths[row]
        rows.append(row)
    if rows:
        yield rows


def add_adapter(model: PreTrainedModel, lora: dict[str, Any], *, seed: int) -> dict[str, Any]:
    """Freeze the model and give it an adapter that changes nothing yet, in the model's dtype; returns peft's config.

    lora: r, lora_alpha, target_modules. The draw of A follows `seed` alone, so every rank draws the same. Raises
    InvalidInput (code "lora_targets") when a target is no linear layer of the model.
    """
    config = LoraConfig(**lora, task_type="CAUSAL_LM", base_model_name_or_path=model.config.name_or_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=NAME)
        except ValueError as error:
            raise InvalidInput(f"the adapter does not fit the model: {error}", code="lora_targets") from error
    document = config.to_dict() | {"inference_mode": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in document.items()}


def adapter_name(parameter: str) -> str:
    """The name that peft gives a parameter of an adapter when it saves it."""
    return PREFIX + parameter.replace(f".{NAME}.", ".")


@torch.no_grad()
def take_adapter(model: nn.Module, files: Sequence[Path]) -> None:
    """Put published tensors in place of an adapter's own. Raises IntegrityError when they are another adapter's."""
    found = {
        name: tensor for file in files if file.suffix == ".safetensors" for name, tensor in read_tensors(file).items()
    }
    own = {adapter_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if own.keys() != found.keys() or any(found[name].shape != own[name].shape for name in own):
        raise IntegrityError(f"{files[0].parent} holds an adapter of other layers or another rank than the job's")
    for name, parameter in own.items():
        parameter.copy_(found[name])


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """While the body runs, the model computes what it computes without its adapter."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


def checkpoint_activations(model: nn.Module, *, reentrant: bool) -> bool:
    """Have the layers of a model keep their inputs only; False, with nothing changed, where it cannot.

    The model is in training mode afterwards, as transformers wants it, with every dropout at 0: it computes what it
    computes in evaluation mode. reentrant: for ZeRO stage 3, whose parameters are gone when a layer runs again.
    """
    language_model = next((found for found in model.modules() if isinstance(found, PreTrainedModel)), None)
    if language_model is None or not language_model.supports_gradient_checkpointing:
        return False
    language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant and not all(parameter.requires_grad for parameter in model.parameters()):
        # A layer run again gets gradients only where its input wants one, which frozen embeddings do not.
        language_model.enable_input_require_grads()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(vars(module).get("attention_dropout"), float):
            vars(module)["attention_dropout"] = 0.0
    return True


def is_large(model: nn.Module) -> bool:
    """Whether its activations are worth computing twice; counts parameters that ZeRO stage 3 has cut, too."""
    sizes = (whole_shape(parameter).numel() for parameter in model.parameters())
    return sum(sizes) >= LARGE_MODEL_PARAMETERS
