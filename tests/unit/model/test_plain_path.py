"""The trainer's forward against transformers' own logits: the same log-probs and gradients, at reduced widths."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.real_widths import batch_of, chunked_logprobs, plain_logprobs, qwen_shaped
from spo.model.logprobs import ATTENTION, checkpoint_activations, give_logprob_head, token_logprobs


def test_blocks_packing_and_layers_that_run_again_change_neither_losses_nor_gradients() -> None:
    ids_BL, mask_BL = batch_of([70, 12, 33])
    found: list[tuple[Tensor, Tensor]] = []
    for forward in (plain_logprobs, chunked_logprobs, token_logprobs):
        ours = forward is token_logprobs
        model = qwen_shaped(ATTENTION if ours else "sdpa", torch.float32, hidden=128, words=997)
        if ours:
            assert give_logprob_head(model)
            assert checkpoint_activations(model, reentrant=False)
        logprobs_BL = forward(model, ids_BL % 990, mask_BL)
        torch.autograd.backward((logprobs_BL * torch.linspace(-1, 2, logprobs_BL.shape[1])).sum())
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append((logprobs_BL.detach(), torch.cat(gradients)))

    plain, *others = found
    for logprobs_BL, gradient in others:
        assert (logprobs_BL - plain[0]).abs().max() < 1e-5
        assert (gradient - plain[1]).abs().max() < 1e-5 * plain[1].abs().max()
