"""Samples from the shared model, many sequences at once, each with its own temperature, limits and stops.

The log-probs are the model's own, before temperature, top-k and top-p: what `forward` says of the same tokens.
Axes: B sequence, L position, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from services.tinker.shared_model import SharedModel

# Text stops are looked for in the end of what has been sampled.
TAIL_TOKENS = 32


@dataclass(frozen=True)
class SamplingOptions:
    """temperature 0: the likeliest token. top_k below 1: no limit."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass
class SampledTokens:
    """What one sequence has become; `stopped`: by itself, not by its limit."""

    prompt: Sequence[int]
    options: SamplingOptions
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.options.max_tokens


@torch.no_grad()
def sample(model: SharedModel, sequences: Sequence[SampledTokens], check: Callable[[], None]) -> None:
    """Fill in all sequences, with the adapter in use; check: raises once nobody waits any more."""
    longest = max(len(sequence.prompt) for sequence in sequences)
    ids_BL = torch.zeros((len(sequences), longest), dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, sequence in enumerate(sequences):
        ids_BL[row, longest - len(sequence.prompt) :] = torch.tensor(list(sequence.prompt))
        mask_BL[row, longest - len(sequence.prompt) :] = 1
    ids_BL, mask_BL = ids_BL.to(model.device), mask_BL.to(model.device)
    cache = DynamicCache()
    while not all(sequence.done for sequence in sequences):
        check()
        logits_BV = model.next_logits(ids_BL, mask_BL, cache)
        logprobs_BV = logits_BV.log_softmax(-1)
        chosen = [
            0 if sequence.done else _draw(logits_V, sequence.options, sequence.generator)
            for logits_V, sequence in zip(logits_BV, sequences, strict=True)
        ]
        ids_BL = torch.tensor(chosen, device=model.device).unsqueeze(1)
        mask_BL = torch.nn.functional.pad(mask_BL, (0, 1), value=1)
        taken_B = logprobs_BV.gather(1, ids_BL).squeeze(1).tolist()
        for sequence, token, logprob in zip(sequences, chosen, taken_B, strict=True):
            if not sequence.done:
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.stopped = _stops(model, sequence)


@torch.no_grad()
def prompt_logprobs(model: SharedModel, prompt: Sequence[int], last: int) -> list[float]:
    """Of each token given those before it; NaN for the first, and for all but the last so many where last is not 0."""
    ids_BL = torch.tensor([list(prompt)], device=model.device)
    logits_LV = model.logits(ids_BL, torch.ones_like(ids_BL))[0, :-1]
    logprobs_L = logits_LV.gather(1, ids_BL[0, 1:, None]).squeeze(1) - logits_LV.logsumexp(-1)
    found = [float("nan"), *logprobs_L.tolist()]
    unasked = len(found) - last if last else 0
    return [float("nan")] * unasked + found[unasked:]


def _draw(logits_V: Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    if options.temperature == 0:
        return int(logits_V.argmax())
    scaled_V = (logits_V / options.temperature).cpu()
    if 0 < options.top_k < len(scaled_V):
        scaled_V[scaled_V < scaled_V.topk(options.top_k).values[-1]] = float("-inf")
    probabilities_V = scaled_V.softmax(-1)
    if options.top_p < 1:
        sorted_V, order_V = probabilities_V.sort(descending=True)
        # The first that reaches the sum stays.
        beyond_V = sorted_V.cumsum(-1) - sorted_V >= options.top_p
        probabilities_V[order_V[beyond_V]] = 0
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def _stops(model: SharedModel, sequence: SampledTokens) -> bool:
    options = sequence.options
    if sequence.tokens[-1] in options.stop_tokens:
        return True
    if not options.stop_strings:
        return False
    tail = TAIL_TOKENS + max(map(len, options.stop_strings))
    text = model.tokenizer.decode(sequence.tokens[-tail:])
    return any(stop in text for stop in options.stop_strings)
