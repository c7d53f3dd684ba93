"""Tokens per second of the inference service's engine against raw vLLM, same model, prompts and sampling."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.result import report
from benchmarks.gpu.shapes import SHAPES, write_shape

ROUNDS = 3


def measure(dry_run: bool) -> dict[str, object]:
    """Median tokens per second of each, and their ratio."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Imported late: they read the line above.
    import vllm

    from services.inference.engine import CPU_BLOCK_TOKENS, Engine, EngineSpec, SampleRequest
    from services.inference.settings import Settings

    shape, sequences, prompt_tokens, tokens = ("tiny", 8, 16, 16) if dry_run else ("0.5B", 512, 256, 512)
    settings = Settings(max_sequences=256, kv_cache_memory_bytes=(32 << 20) if dry_run else (6 << 30))
    draw = random.Random(0)
    # No special token, and none that the model lacks.
    prompts = [[draw.randrange(4, SHAPES["tiny"][-1]) for _ in range(prompt_tokens)] for _ in range(sequences)]
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), shape)
        spec = EngineSpec(Path(folder), "benchmark", "bfloat16", prompt_tokens + tokens)
        engine = Engine(spec, settings)
        raw = vllm.LLM(
            folder,
            dtype="bfloat16",
            max_model_len=spec.max_tokens,
            max_num_seqs=settings.max_sequences,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
            enforce_eager=dry_run,
            logprobs_mode="processed_logprobs",
            block_size=CPU_BLOCK_TOKENS if dry_run else None,
        )

        def ours() -> int:
            for number, prompt in enumerate(prompts):
                engine.add(str(number), SampleRequest(tuple(prompt), 1.0, 1.0, tokens, number))
            left, made = len(prompts), 0
            while left:
                for _, sample in engine.step():
                    left, made = left - 1, made + len(sample.token_ids)
            return made

        def theirs() -> int:
            params = [
                vllm.SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0, seed=number)
                for number in range(sequences)
            ]
            inputs = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
            outputs = raw.generate(inputs, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        speeds = {"engine": 0.0, "raw_vllm": 0.0}
        for _ in range(ROUNDS):
            for name, work in (("engine", ours), ("raw_vllm", theirs)):
                began = time.perf_counter()
                made = work()
                # The best round: the first compiles and warms up.
                speeds[name] = max(speeds[name], made / (time.perf_counter() - began))
    return {
        "shape": shape,
        "sequences": sequences,
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "ratio": round(speeds["engine"] / speeds["raw_vllm"], 3),
    }


if __name__ == "__main__":
    sys.exit(report(measure))
