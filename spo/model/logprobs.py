"""A causal language model as the mathematics sees it: log-probabilities of given tokens.

`token_logprobs` is the one forward of the platform: the trainer (policy) and value-estimation (reference pi0) both call
it, so at equal weights their numbers agree to rounding and Q_T starts at Qhat_0. A model that was loaded to be packed
computes all sequences of a batch in one row without padding, any other one computes them padded.

Axes: B sequence, L position in the padded sequence, T token of a packed row, V vocabulary. Log-probs in nats, float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spo.model.attention import attention_for
from spo.model.folder import inspect_model_folder
from spo.model.head import LogprobHead, give_logprob_head
from spo.model.packing import PackedRow, is_packed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Tokens whose logits are widened to float32 at once, in models without a LogprobHead.
WIDENED_TOKENS = 1024


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
    model: nn.Module, input_ids_BL: Tensor, attention_mask_BL: Tensor, wanted_BL: Tensor | None = None
) -> Tensor:
    """Return logprobs_BL: at l the log-prob of token l given the tokens before it, 0 at padding and at first tokens.

    `model` is a module called like a transformers causal LM, a DeepSpeed engine included. Padding on either side. Where
    wanted_BL is given and false, 0: what nobody needs costs neither time nor memory in the last layer.
    """
    row = PackedRow.of(attention_mask_BL) if is_packed(model) else None
    if row is None:
        mask_BL = attention_mask_BL.long()
        position_ids_BL = (mask_BL.cumsum(dim=-1) - 1).clamp(min=0)
        has_context_BL = (mask_BL[:, 1:] * mask_BL[:, :-1]).bool()
        if wanted_BL is not None:
            has_context_BL &= wanted_BL[:, 1:]
        beside = {"attention_mask": mask_BL, "position_ids": position_ids_BL}
        return nn.functional.pad(_next_token_logprobs(model, input_ids_BL, beside, has_context_BL), (1, 0))
    ids_1T = row.pack(input_ids_BL)
    has_context_1T = row.position_ids_1T[:, 1:] > 0
    if wanted_BL is not None:
        has_context_1T &= row.pack(wanted_BL)[:, 1:]
    chosen_1T = _next_token_logprobs(model, ids_1T, row.model_inputs(), has_context_1T)
    return row.unpack(nn.functional.pad(chosen_1T, (1, 0)))


@torch.no_grad()
def response_logprobs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    max_tokens_per_batch: int,
    trained: Sequence[Sequence[bool] | None] | None = None,
) -> list[list[float]]:
    """Return log pi(a_t | a_<t, x) for each token of each response; a forward computes at most that many tokens.

    A single sequence longer than `max_tokens_per_batch` makes a batch of its own. trained: of each response which
    tokens are wanted, None: all; the others get 0.
    """
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
        inputs = (tensor.to(device) for tensor in (input_ids_BL, mask_BL, wanted_BL))
        logprobs_BL = token_logprobs(model, *inputs).cpu()
        for index, row in enumerate(rows):
            found[row] = logprobs_BL[index, len(prompts[row]) : len(sequences[row])].tolist()
    return found


def _next_token_logprobs(
    model: nn.Module, input_ids_BL: Tensor, beside: Mapping[str, Tensor | int], wanted_BL: Tensor
) -> Tensor:
    """One forward: at l < L - 1 the log-prob of token l + 1 where wanted (B, L - 1), else 0."""
    next_tokens_BL = input_ids_BL[:, 1:]
    head = next((found for found in model.modules() if isinstance(found, LogprobHead)), None)
    if head is None:
        logits_BLV = model(input_ids=input_ids_BL, **beside, use_cache=False).logits[:, :-1]
        return _chosen_logprobs(logits_BLV, next_tokens_BL).masked_fill(~wanted_BL, 0.0)
    # Nothing follows the last position.
    tokens_BL, asked_BL = (nn.functional.pad(found, (0, 1)) for found in (next_tokens_BL, wanted_BL))
    with head.asked(tokens_BL, asked_BL):
        logprobs_BL: Tensor = model(input_ids=input_ids_BL, **beside, use_cache=False).logits
    return logprobs_BL[:, :-1]


def _chosen_logprobs(logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
    """Log-softmax at the given tokens in float32, for models whose last layer has no LogprobHead."""
    if logits_BLV.dtype == torch.float32:
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
