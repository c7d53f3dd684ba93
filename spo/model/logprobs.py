"""A causal language model as the mathematics sees it: log-probabilities of given tokens.

`token_logprobs` is the one forward of the platform: the trainer (policy) and value-estimation (reference pi0) both call
it, so at equal weights their numbers agree to rounding and Q_T starts at Qhat_0.

Axes: B sequence, L position in the padded sequence, V vocabulary. Log-probs in nats, float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from spo.model.folder import inspect_model_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(path: str | Path, dtype: str) -> PreTrainedModel:
    """Load a causal LM in evaluation mode from an inspected folder; InvalidInput when the folder may not be loaded."""
    folder = inspect_model_folder(path).path
    # Its bars would be written between the lines of a service's JSON log.
    transformers.utils.logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=DTYPES[dtype],
        # Named, so that trainer and value-estimation can never pick different kernels.
        attn_implementation="sdpa",
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
    )
    model.eval()
    return model


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an inspected folder; InvalidInput when the folder may not be loaded."""
    folder = inspect_model_folder(path).path
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the prompt's tokens: one user turn of the chat template, or plain text where there is no template."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(text))
    turn = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a whole response written by someone else, with the end-of-sequence token."""
    return [*tokenizer.encode(text, add_special_tokens=False), int(tokenizer.eos_token_id)]


def token_logprobs(model: nn.Module, input_ids_BL: Tensor, attention_mask_BL: Tensor) -> Tensor:
    """Return logprobs_BL: at l the log-prob of token l given the tokens before it, 0 at padding and at first tokens.

    `model` is a module called like a transformers causal LM, a DeepSpeed engine included. Padding on either side.
    """
    mask_BL = attention_mask_BL.long()
    position_ids_BL = (mask_BL.cumsum(dim=-1) - 1).clamp(min=0)
    logits_BLV = model(
        input_ids=input_ids_BL, attention_mask=mask_BL, position_ids=position_ids_BL, use_cache=False
    ).logits
    chosen_BL = _chosen_logprobs(logits_BLV[:, :-1], input_ids_BL[:, 1:])
    has_context_BL = (mask_BL[:, 1:] * mask_BL[:, :-1]).bool()
    return torch.nn.functional.pad(chosen_BL.masked_fill(~has_context_BL, 0.0), (1, 0))


def packed_token_logprobs(model: nn.Module, input_ids_BL: Tensor, attention_mask_BL: Tensor) -> Tensor:
    """Return what `token_logprobs` returns, computed on rows of length L that hold several whole sequences each.

    Sequences do not see each other: transformers keeps apart what restarts at position 0. Axes: R packed row.
    """
    lengths = attention_mask_BL.sum(dim=-1).tolist()
    bins = _first_fit(lengths, input_ids_BL.shape[1])
    shape = (len(bins), max(sum(lengths[row] for row in rows) for rows in bins))
    # Where no token goes, position 0 again and again: single tokens that nobody asks about.
    position_RL = torch.zeros(shape, dtype=torch.long)
    source_RL = torch.full(shape, -1, dtype=torch.long)
    starts = attention_mask_BL.int().argmax(dim=-1).tolist()
    for packed_row, rows in enumerate(bins):
        offset = 0
        for row in rows:
            end = offset + lengths[row]
            position_RL[packed_row, offset:end] = torch.arange(lengths[row])
            first = row * input_ids_BL.shape[1] + starts[row]
            source_RL[packed_row, offset:end] = torch.arange(first, first + lengths[row])
            offset = end
    source_RL, position_RL = source_RL.to(input_ids_BL.device), position_RL.to(input_ids_BL.device)
    ids_RL = input_ids_BL.flatten()[source_RL.clamp(min=0)]
    logits_RLV = model(input_ids=ids_RL, position_ids=position_RL, use_cache=False).logits
    chosen_RL = _chosen_logprobs(logits_RLV[:, :-1], ids_RL[:, 1:])
    has_context_RL = position_RL[:, 1:] > 0
    found = torch.zeros(input_ids_BL.numel(), dtype=chosen_RL.dtype, device=input_ids_BL.device)
    found = found.index_put((source_RL[:, 1:][has_context_RL],), chosen_RL[has_context_RL])
    return found.view(input_ids_BL.shape)


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows into as few bins as first fit finds, the longest first; no bin holds more than `capacity` tokens."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = next((index for index, free in enumerate(room) if free >= lengths[row]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(row)
        room[place] -= lengths[row]
    return bins


@torch.no_grad()
def response_logprobs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    max_tokens_per_batch: int,
) -> list[list[float]]:
    """Return log pi(a_t | a_<t, x) for each token of each response; a batch holds at most that many padded tokens.

    A single sequence longer than `max_tokens_per_batch` makes a batch of its own.
    """
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    device = next(model.parameters()).device
    found: list[list[float]] = [[] for _ in sequences]
    for rows in _length_buckets([len(sequence) for sequence in sequences], max_tokens_per_batch):
        longest = max(len(sequences[row]) for row in rows)
        input_ids_BL = torch.zeros((len(rows), longest), dtype=torch.long)
        mask_BL = torch.zeros((len(rows), longest), dtype=torch.long)
        for index, row in enumerate(rows):
            input_ids_BL[index, : len(sequences[row])] = torch.tensor(sequences[row])
            mask_BL[index, : len(sequences[row])] = 1
        logprobs_BL = token_logprobs(model, input_ids_BL.to(device), mask_BL.to(device)).cpu()
        for index, row in enumerate(rows):
            found[row] = logprobs_BL[index, len(prompts[row]) : len(sequences[row])].tolist()
    return found


def _chosen_logprobs(logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
    """Log-softmax at the given tokens in float32, without a second tensor of the logits' size."""
    if logits_BLV.dtype == torch.float32:
        return _gather_minus_logsumexp(logits_BLV, tokens_BL)
    # Row by row: only one row of a low-precision batch is ever widened to float32.
    rows = zip(logits_BLV, tokens_BL, strict=True)
    return torch.stack([_gather_minus_logsumexp(logits_LV.float(), tokens_L) for logits_LV, tokens_L in rows])


def _gather_minus_logsumexp(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def _length_buckets(lengths: Sequence[int], max_tokens_per_batch: int) -> Iterator[list[int]]:
    """Yield rows in order of length, as many at once as fit when padded to the longest of them."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) + 1) * lengths[row] > max_tokens_per_batch:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows
