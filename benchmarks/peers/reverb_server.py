"""DeepMind Reverb doing the same work, run by a Python of its own: requirements-reverb.txt, Python 3.11 at most.

    python reverb_server.py <response tokens>

Says `ready`, reads lines `insert <count>` and `sample <batches>`, answers each with the CPU seconds it took.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import reverb  # type: ignore[import-not-found]

BATCH = 128
WINDOW = 2048


def main(tokens: int) -> None:
    """Serve one table of the same window and answer until the input ends."""
    table = reverb.Table(
        name="online",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=WINDOW,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server(tables=[table])
    client = reverb.Client(f"localhost:{server.port}")
    rng = np.random.default_rng(0)
    step = {
        "prompt_token_ids": rng.integers(0, 150_000, tokens // 3, dtype=np.int32),
        "response_token_ids": rng.integers(0, 150_000, tokens, dtype=np.int32),
        "sampling_logprobs": rng.standard_normal(tokens).astype(np.float32),
        "reference_logprobs": rng.standard_normal(tokens).astype(np.float32),
        "response_text": rng.integers(32, 127, 3 * tokens, dtype=np.uint8),
        "numbers": rng.standard_normal(16).astype(np.float32),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        order, count = line.split()
        before = time.process_time()
        {"insert": insert, "sample": sample}[order](client, step, int(count))
        print(time.process_time() - before, flush=True)


def insert(client: Any, step: dict[str, Any], count: int) -> None:
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for _ in range(count):
            writer.append(step)
            writer.create_item("online", 1.0, {name: column[-1:] for name, column in writer.history.items()})
        writer.flush()


def sample(client: Any, _step: dict[str, Any], batches: int) -> None:
    for _ in range(batches):
        drawn = list(client.sample("online", num_samples=BATCH, emit_timesteps=False))
        assert len(drawn) == BATCH


if __name__ == "__main__":
    main(int(sys.argv[1]))
