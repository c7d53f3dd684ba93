"""Samples of a small model, many rows at once in this process: what an engine would take longer to be started for.

Axes: B row, L position, V vocabulary. Log-probs in nats, of the model itself: before temperature and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

ROWS = 512


@dataclass(frozen=True)
class Sampler:
    """How responses are drawn; those that are cut off at `max_tokens` lack the end token."""

    end_token: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], how: Sampler, generator: torch.Generator
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of one response to each prompt."""
    found: list[tuple[list[int], list[float]]] = []
    for start in range(0, len(prompts), ROWS):
        found += _sample_rows(model, prompts[start : start + ROWS], how, generator)
    return found


def _sample_rows(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], how: Sampler, generator: torch.Generator
) -> list[tuple[list[int], list[float]]]:
    longest = max(map(len, prompts))
    ids_BL = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, prompt in enumerate(prompts):
        ids_BL[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask_BL[row, longest - len(prompt) :] = 1
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    # Rows that have ended leave the batch once they are a third of it.
    alive, cache = list(range(len(prompts))), DynamicCache()
    ended_B = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(how.max_tokens):
        positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)[:, -ids_BL.shape[1] :]
        out = model(
            input_ids=ids_BL, attention_mask=mask_BL, position_ids=positions_BL, past_key_values=cache, use_cache=True
        )
        logits_BV = out.logits[:, -1].float()
        ids_BL = _drawn(logits_BV, how, generator)
        taken_B = logits_BV.log_softmax(-1).gather(1, ids_BL).squeeze(1)
        for row, over, token, logprob in zip(
            alive, ended_B.tolist(), ids_BL[:, 0].tolist(), taken_B.tolist(), strict=True
        ):
            if not over:
                found[row][0].append(token)
                found[row][1].append(logprob)
        ended_B = ended_B | (ids_BL[:, 0] == how.end_token)
        if bool(ended_B.all()):
            break
        mask_BL = torch.nn.functional.pad(mask_BL, (0, 1), value=1)
        if ended_B.sum() * 3 > len(alive):
            kept = (~ended_B).nonzero()[:, 0]
            cache.batch_select_indices(kept)
            ids_BL, mask_BL, ended_B = ids_BL[kept], mask_BL[kept], ended_B[kept]
            alive = [alive[index] for index in kept.tolist()]
    return found


def _drawn(logits_BV: Tensor, how: Sampler, generator: torch.Generator) -> Tensor:
    """One token of each row; (B, 1)."""
    probabilities_BV = (logits_BV / how.temperature).softmax(-1)
    if how.top_p < 1:
        sorted_BV, order_BV = probabilities_BV.sort(descending=True)
        # The first that reaches the sum stays.
        sorted_BV[sorted_BV.cumsum(-1) - sorted_BV >= how.top_p] = 0
        probabilities_BV = torch.zeros_like(probabilities_BV).scatter(1, order_BV, sorted_BV)
    return torch.multinomial(probabilities_BV, 1, generator=generator)
