"""Tokens per second of raw vLLM with its own defaults, on the work of `serving`: what the engine is measured by."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.result import report
from benchmarks.gpu.serving import Work
from benchmarks.gpu.shapes import write_shape


def measure(dry_run: bool) -> dict[str, object]:
    """Nothing is set but what the work needs; on a CPU, where the default takes gigabytes, a small cache."""
    import vllm

    work = Work.of(dry_run=dry_run)
    small: dict[str, Any] = {"kv_cache_memory_bytes": 32 << 20, "block_size": 32, "enforce_eager": True}
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), work.shape)
        longest = work.prompt_tokens + work.tokens
        engine = vllm.LLM(folder, dtype="bfloat16", max_model_len=longest, **(small if dry_run else {}))
        params = [
            vllm.SamplingParams(temperature=1.0, max_tokens=work.tokens, logprobs=0, seed=number)
            for number in range(work.sequences)
        ]
        inputs = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in work.prompts]

        def sample() -> int:
            outputs = engine.generate(inputs, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return work.measured(sample)


if __name__ == "__main__":
    sys.exit(report(measure))
