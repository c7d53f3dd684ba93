"""Tokens per second of the inference service's engine; `yardstick` has raw vLLM's on the same work."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.result import report
from benchmarks.gpu.shapes import SHAPES, write_shape

ROUNDS = 3


@dataclass(frozen=True)
class Work:
    """A model of random weights, and so many prompts with so many tokens to sample for each."""

    shape: str
    sequences: int
    prompt_tokens: int
    tokens: int

    @classmethod
    def of(cls, *, dry_run: bool) -> Work:
        """What both engines do."""
        return cls("tiny", 8, 16, 16) if dry_run else cls("0.5B", 512, 256, 512)

    @property
    def prompts(self) -> list[list[int]]:
        """No special token, and none that the model lacks."""
        draw = random.Random(0)
        words = SHAPES["tiny"][-1]
        return [[draw.randrange(4, words) for _ in range(self.prompt_tokens)] for _ in range(self.sequences)]

    def measured(self, sample: Callable[[], int]) -> dict[str, object]:
        """The best round's tokens per second: the first compiles and warms up."""
        best = 0.0
        for _ in range(ROUNDS):
            began = time.perf_counter()
            made = sample()
            best = max(best, made / (time.perf_counter() - began))
        return {"shape": self.shape, "sequences": self.sequences, "tokens_per_second": round(best, 1)}


def measure(dry_run: bool) -> dict[str, object]:
    """With the service's own defaults, but that the cache takes its share of the device."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Imported late: it reads the line above.
    from services.inference.engine import Engine, EngineSpec, SampleRequest
    from services.inference.settings import Settings

    work = Work.of(dry_run=dry_run)
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), work.shape)
        spec = EngineSpec(Path(folder), "benchmark", "bfloat16", work.prompt_tokens + work.tokens)
        engine = Engine(spec, Settings(kv_cache_memory_bytes=(32 << 20) if dry_run else None))

        def sample() -> int:
            for number, prompt in enumerate(work.prompts):
                engine.add(str(number), SampleRequest(tuple(prompt), 1.0, 1.0, work.tokens, number))
            left, made = work.sequences, 0
            while left:
                for _, found in engine.step():
                    left, made = left - 1, made + len(found.token_ids)
            return made

        return work.measured(sample)


if __name__ == "__main__":
    sys.exit(report(measure))
