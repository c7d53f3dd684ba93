"""Peak memory and time of the last layer's log-probs, forward and backward: in blocks, and as whole logits."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from benchmarks.gpu.result import report
from benchmarks.trainer import PeakMemory
from spo.model.logprobs import chosen_logprobs


def measure(dry_run: bool) -> dict[str, object]:
    """For each way: bytes above the inputs per token, milliseconds."""
    tokens, width, vocabulary = (256, 64, 2000) if dry_run else (8192, 896, 151_936)
    device = torch.device("cpu" if dry_run else "cuda")
    dtype = torch.bfloat16
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    chosen = torch.randint(vocabulary, (tokens,), device=device)

    def plain() -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight).float()
        return torch.log_softmax(logits, -1).gather(-1, chosen[:, None]).sum()

    def chunked() -> Tensor:
        return chosen_logprobs(hidden, weight, None, chosen).sum()

    found: dict[str, object] = {"tokens": tokens, "width": width, "vocabulary": vocabulary}
    for name, forward in (("in_blocks", chunked), ("whole_logits", plain)):
        for _ in range(2):
            hidden.grad = weight.grad = None
            memory, began = PeakMemory(device), time.perf_counter()
            forward().backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        found[name] = {
            "bytes_per_token": round(memory.bytes_above_start() / tokens),
            "milliseconds": round(1000 * seconds, 2),
        }
    return found


if __name__ == "__main__":
    sys.exit(report(measure))
