"""The last layer of a language model as log-probs of given tokens, never as logits of all of them.

The logits of a real model are most of a training step's memory: 8 sequences of 4,096 tokens over 152,000 words are
20 GB in float32, and autograd keeps them until the backward pass. Here they exist in blocks of the vocabulary only, in
the forward pass and once more in the backward pass.

Axes: B sequence, L position, T token, D hidden width, V vocabulary, N columns of one block. Log-probs in nats, float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

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
        for rows, columns in _blocks(len(tokens_T), len(weight_VD)):
            logits_TN = _logits(hidden_TD[rows], weight_VD[columns], None if bias_V is None else bias_V[columns])
            total_T[rows] = torch.logaddexp(total_T[rows], logits_TN.logsumexp(dim=-1))
            within_T = (tokens_T[rows] >= columns.start) & (tokens_T[rows] < columns.stop)
            found = logits_TN[within_T].gather(1, (tokens_T[rows][within_T] - columns.start)[:, None])
            chosen_T[rows] += torch.zeros_like(chosen_T[rows]).masked_scatter(within_T, found.flatten())
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
        for rows, columns in _blocks(len(tokens_T), len(weight_VD)):
            weight_ND, bias_N = weight_VD[columns], None if bias_V is None else bias_V[columns]
            slope_TN = _logits(hidden_TD[rows], weight_ND, bias_N)
            slope_TN.sub_(total_T[rows, None]).exp_().mul_(-gradient_T[rows, None])
            within_T = (tokens_T[rows] >= columns.start) & (tokens_T[rows] < columns.stop)
            places = within_T.nonzero().flatten(), tokens_T[rows][within_T] - columns.start
            slope_TN.index_put_(places, gradient_T[rows][within_T], accumulate=True)
            if to_bias_V is not None:
                to_bias_V[columns] += slope_TN.sum(dim=0).to(to_bias_V)
            slope_TN = slope_TN.to(weight_VD.dtype)
            if wants_hidden:
                to_hidden_TD[rows] += slope_TN @ weight_ND
            if to_weight_VD is not None:
                to_weight_VD[columns] += slope_TN.t() @ hidden_TD[rows]
        return to_hidden_TD.to(hidden_TD.dtype) if wants_hidden else None, to_weight_VD, to_bias_V, None


def _logits(hidden_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    return nn.functional.linear(hidden_TD, weight_ND, bias_N).float()


def _blocks(tokens: int, words: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the logits, a block at a time."""
    for first in range(0, tokens, TOKENS_PER_CHUNK):
        rows = slice(first, min(first + TOKENS_PER_CHUNK, tokens))
        columns = max(1, BLOCK_BYTES // (4 * (rows.stop - rows.start)))
        for start in range(0, words, columns):
            yield rows, slice(start, min(start + columns, words))
